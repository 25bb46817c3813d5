"""Stall detector: ends gRPC transfers that do not move, so that their threads can serve other calls.

Lanes do not need it: the operating system ends a lane's transfers that do not move (`shoal._transport.lane_socket`),
and each lane has a thread of its own.
"""

import math
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
        # Deadline, and the function that ends the wait.
        self._waiting: dict[object, tuple[float, Callable[[], object]]] = {}

    @contextmanager
    def waiting(self, end: Callable[[], object], within_s: float = math.inf) -> Iterator[None]:
        """Marks the block as waiting for a peer's next move.

        Args:
            end: called from another thread if the wait takes too long; it must end the wait.
            within_s: seconds until the deadline of the whole transfer. The wait ends at this deadline at the latest.
        """
        place = object()
        with self._lock:
            self._waiting[place] = self._clock() + min(self._after_s, within_s), end
        try:
            yield
        finally:
            with self._lock:
                del self._waiting[place]

    def end(self) -> int:
        """Ends all stalled transfers and returns their number. Call it periodically."""
        now = self._clock()
        with self._lock:
            stalled = [end for give_up, end in self._waiting.values() if give_up <= now]
        for end in stalled:
            end()
        return len(stalled)
