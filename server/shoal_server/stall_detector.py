"""Transfers by gRPC that do not move: found out and ended, so that their threads serve others.

On a lane, the kernel keeps this time (`shoal._transport.lane`), and the thread is nobody else's.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StallDetector:
    """Threads that wait for a peer to take or to bring something, and since when. Any thread may use it.

    Args:
        after_s: seconds without any progress that are too many.
        clock: seconds that only grow.
    """

    def __init__(self, after_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._after_s, self._clock = after_s, clock
        self._lock = threading.Lock()  # guards _waiting; nothing is called under it
        self._waiting: dict[object, tuple[float, Callable[[], object]]] = {}  # since when, and what ends it

    @contextmanager
    def waiting(self, end: Callable[[], object]) -> Iterator[None]:
        """Waits, in the block, for a peer's next move; `end`, from another thread, makes it stop waiting."""
        place = object()
        with self._lock:
            self._waiting[place] = self._clock(), end
        try:
            yield
        finally:
            with self._lock:
                del self._waiting[place]

    def end(self) -> int:
        """Ends what has not moved for too long, and says how many that were; to be called once in a while."""
        latest = self._clock() - self._after_s
        with self._lock:
            stalled = [end for since, end in self._waiting.values() if since <= latest]
        for end in stalled:
            end()
        return len(stalled)
