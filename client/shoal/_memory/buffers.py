"""A pool of large buffers, which avoids the page faults of fresh memory.

The buffers are private to the process. `shoal._transport.segment` has the memory that processes share.
"""

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

from shoal._memory.borrowed_arrays import lend

# Smaller buffers come from the allocator, which reuses them itself.
SMALLEST_BYTES = 64 << 10
# Start addresses of buffers, in bytes. Steps of an odd multiple of 64 KiB give 16 places in 1 MiB.
_CACHE_LINE, _LARGE, _PERIOD = 64, 1 << 24, 1 << 20
_places = itertools.cycle(range(0, 16 * 3 << 16, 3 << 16))


class BufferPool:
    """A pool that lends buffers, which return when they are collected. Any thread may use it.

    No method waits for the lock, because the garbage collector may return a buffer on a thread that holds the lock. If
    the lock is taken, a method does only what needs no lock. The holder handles the buffers that were returned
    meanwhile, after it has released the lock.

    Args:
        max_bytes: largest total size of the free buffers, in bytes. The oldest are dropped first.
        idle_s: seconds after which `trim` drops a free buffer.
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, max_bytes: int, idle_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._idle_s, self._clock = max_bytes, idle_s, clock
        self._returned: deque[memoryview] = deque()  # not yet in _free
        self._lock = threading.Lock()  # guards all attributes below
        self._free: list[tuple[float, memoryview]] = []  # time of return and memory; the oldest first
        self._free_bytes = 0  # of all in _free; at most _max_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of the free buffers."""
        return self._free_bytes

    def take(self, nbytes: int) -> np.ndarray:
        """Lends a buffer. It returns to the pool when the array and all its views have been collected.

        Returns:
            A flat array of `nbytes` unsigned bytes with undefined content. It starts at a multiple of 64 bytes.
        """
        if not SMALLEST_BYTES <= nbytes <= self._max_bytes:
            return np.asarray(allocate(nbytes))
        memory = self._take_free(nbytes) or allocate(nbytes)
        # A weak reference, so that an array does not keep the pool and its free buffers alive.
        return lend(memory, _give_back, weakref.ref(self), memory)

    def trim(self) -> None:
        """Drops buffers that have been free for `idle_s` seconds. Call it periodically."""
        self._settle()
        if not self._lock.acquire(blocking=False):
            return  # a later call drops them
        try:
            latest = self._clock() - self._idle_s
            dropped = self._drop_oldest(sum(since <= latest for since, _ in self._free))
        finally:
            self._lock.release()
        self._settle()
        del dropped  # not under the lock, because unmapping is slow

    def _take_free(self, nbytes: int) -> memoryview | None:
        if not self._lock.acquire(blocking=False):
            return None
        try:
            # The youngest buffer is the most likely to be in a CPU cache.
            for index in reversed(range(len(self._free))):
                if self._free[index][1].nbytes == nbytes:
                    self._free_bytes -= nbytes
                    return self._free.pop(index)[1]
            return None
        finally:
            self._lock.release()
            self._settle()

    def _receive(self, memory: memoryview) -> None:
        self._returned.append(memory)
        self._settle()

    def _settle(self) -> None:
        """Moves returned buffers to the free ones. Every holder of the lock calls it after its release."""
        while self._returned and self._lock.acquire(blocking=False):
            try:
                dropped = self._collect()
            finally:
                self._lock.release()
            del dropped  # not under the lock, as above

    def _collect(self) -> list[memoryview]:
        dropped = []
        while self._returned:
            memory = self._returned.popleft()
            while self._free_bytes + memory.nbytes > self._max_bytes:
                dropped += self._drop_oldest(1)
            self._free.append((self._clock(), memory))
            self._free_bytes += memory.nbytes
        return dropped

    def _drop_oldest(self, count: int) -> list[memoryview]:
        dropped = [memory for _, memory in self._free[:count]]
        del self._free[:count]
        self._free_bytes -= sum(memory.nbytes for memory in dropped)
        return dropped


def _give_back(pool: weakref.ref[BufferPool], memory: memoryview) -> None:
    alive = pool()
    if alive is not None:
        alive._receive(memory)


def allocate(nbytes: int) -> memoryview:
    """Allocates a buffer without initializing it.

    The buffer starts on a cache line. A NumPy array may start within one, and then each 64-byte load or store of a
    kernel touches two lines, and Adam takes a quarter longer. Large buffers also start far apart modulo 1 MiB. If the
    buffers of an arena were only a memory page apart in this sense, Adam would take 1.5 times as long (measured on an
    AMD EPYC 7003).
    """
    period, place = (_PERIOD, next(_places)) if nbytes >= _LARGE else (_CACHE_LINE, 0)
    memory = np.empty(nbytes + period, np.uint8)
    start = (place - memory.ctypes.data) % period
    return memory.data[start : start + nbytes]


__all__ = ["SMALLEST_BYTES", "BufferPool", "allocate"]
