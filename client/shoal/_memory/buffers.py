"""Large buffers that are used again: fresh memory costs a page fault for every page that is touched.

They are private to the process; what processes share is in `shoal._transport.segment`.
"""

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

from shoal._memory.borrowed_arrays import lend

# Smaller ones come from the allocator, which uses them again by itself.
SMALLEST_BYTES = 64 << 10
# Where buffers start, in bytes. An odd number of 64 KiB leads to 16 places in 1 MiB.
_CACHE_LINE, _LARGE, _PERIOD = 64, 1 << 24, 1 << 20
_places = itertools.cycle(range(0, 16 * 3 << 16, 3 << 16))


class BufferPool:
    """Lends buffers that come back by themselves. Any thread may use it.

    Nothing here waits for the lock, since the garbage collector may give a buffer back, and code that it runs may take
    one, while the same thread holds it: whoever comes meanwhile does without, and whoever held it looks again.

    Args:
        max_bytes: of free buffers together, at most; the oldest go first.
        idle_s: seconds after which `trim` drops a buffer that nobody took.
        clock: seconds that only grow.
    """

    def __init__(self, max_bytes: int, idle_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._idle_s, self._clock = max_bytes, idle_s, clock
        self._returned: deque[memoryview] = deque()  # those that nobody has put among the free ones yet
        self._lock = threading.Lock()  # guards all below
        self._free: list[tuple[float, memoryview]] = []  # since when; the oldest first
        self._free_bytes = 0  # of all of these; at most _max_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of the buffers that wait to be taken."""
        return self._free_bytes

    def take(self, nbytes: int) -> np.ndarray:
        """Lends a buffer; it comes back once the array and all its views have been collected.

        Returns:
            A flat array of so many unsigned bytes, of any content; it begins at a multiple of 64 bytes.
        """
        if not SMALLEST_BYTES <= nbytes <= self._max_bytes:
            return np.asarray(allocate(nbytes))
        memory = self._take_free(nbytes) or allocate(nbytes)
        # An array that somebody keeps must not keep the pool, and all that is free in it.
        return lend(memory, _give_back, weakref.ref(self), memory)

    def trim(self) -> None:
        """Drops what nobody has taken for `idle_s` seconds; to be called once in a while."""
        self._settle()
        if not self._lock.acquire(blocking=False):
            return  # the next time
        try:
            latest = self._clock() - self._idle_s
            dropped = self._drop_oldest(sum(since <= latest for since, _ in self._free))
        finally:
            self._lock.release()
        self._settle()
        del dropped  # not under the lock: the kernel takes its time

    def _take_free(self, nbytes: int) -> memoryview | None:
        if not self._lock.acquire(blocking=False):
            return None
        try:
            # The youngest is the likeliest to be in a cache, and the oldest can go.
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
        """Puts what came back among the free ones. Everyone who has held the lock calls it: none stays behind."""
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
    """A buffer, not initialised.

    It starts on a cache line, where NumPy's need not: each 64-byte load and store of a kernel would touch two lines,
    and Adam take a quarter longer. And large ones start far apart modulo 1 MiB: when an arena's are a page apart modulo
    their size, as the allocator lays several of 64 MiB, Adam takes 1.5 times as long (measured on an AMD EPYC 7003).
    """
    period, place = (_PERIOD, next(_places)) if nbytes >= _LARGE else (_CACHE_LINE, 0)
    memory = np.empty(nbytes + period, np.uint8)
    start = (place - memory.ctypes.data) % period
    return memory.data[start : start + nbytes]


__all__ = ["SMALLEST_BYTES", "BufferPool", "allocate"]
