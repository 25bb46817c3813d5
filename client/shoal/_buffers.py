"""Large buffers that are used again: fresh memory costs a page fault for every page that is touched.

They are private to the process; what processes share is in `shoal._segment`.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

from shoal._leases import lend

# Smaller ones come from the allocator, which uses them again by itself.
SMALLEST_BYTES = 64 << 10
_ALIGNMENT = 64  # a cache line, and the widest vector


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
            return np.asarray(_allocate(nbytes))
        memory = self._take_free(nbytes) or _allocate(nbytes)
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


def _allocate(nbytes: int) -> memoryview:
    memory = np.empty(nbytes + _ALIGNMENT - 1, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory.data[start : start + nbytes]


__all__ = ["SMALLEST_BYTES", "BufferPool"]
