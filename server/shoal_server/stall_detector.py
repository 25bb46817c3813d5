"""Stall detector: ends gRPC transfers that do not move, so that their threads can serve other calls.

Lanes do not need it: the operating system ends a lane's transfers that do not move (`shoal._transport.lane`), and each
lane has a thread of its own.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StallDetector:
    """Records the threads that wait for a peer, and since when. Thread-safe.

    Args:
        after_s: seconds without progress after which a transfer counts as stalled.
        clock: monotonic clock, in seconds.
    """

    def __init__(self, after_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._after_s, self._clock = after_s, clock
        self._lock = threading.Lock()  # guards _waiting; nothing is called under it
        # Start time, and the function that ends the wait.
        self._waiting: dict[object, tuple[float, Callable[[], object]]] = {}

    @contextmanager
    def waiting(self, end: Callable[[], object]) -> Iterator[None]:
        """Marks the block as waiting for a peer's next move.

        Args:
            end: called from another thread if the wait takes too long; it must end the wait.
        """
        place = object()
        with self._lock:
            self._waiting[place] = self._clock(), end
        try:
            yield
        finally:
            with self._lock:
                del self._waiting[place]

    def end(self) -> int:
        """Ends all stalled transfers and returns their number. Call it periodically."""
        latest = self._clock() - self._after_s
        with self._lock:
            stalled = [end for since, end in self._waiting.values() if since <= latest]
        for end in stalled:
            end()
        return len(stalled)
