"""Copy pace: the bytes a second that all copies of a server may send, so that training keeps its network."""

import threading
import time
from collections.abc import Callable

# Seconds of the bound that copies may send at once after a pause.
_BURST_S = 0.01


class TokenBucket:
    """A bound on bytes a second, without a clock of its own.

    Args:
        rate: bytes a second, > 0.
        burst_s: seconds of the rate that may be sent at once after a pause.
    """

    def __init__(self, rate: float, burst_s: float = _BURST_S) -> None:
        self._rate, self._burst_s = rate, burst_s
        self._free_at = float("-inf")  # when all that was taken has been paid for

    def take(self, nbytes: int, now: float) -> float:
        """Takes bytes, and returns the seconds until they may be sent. Earlier bytes are sent before.

        Args:
            nbytes: bytes to send.
            now: the time, in seconds.
        """
        start = max(self._free_at, now - self._burst_s)
        self._free_at = start + nbytes / self._rate
        return max(0.0, start - now)


class CopyPace:
    """The pace of all copies of a server together. Any thread may use it.

    Args:
        bytes_a_second: the bound; 0 means none.
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, bytes_a_second: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # guards _bucket; nothing is called under it
        self._bucket = TokenBucket(bytes_a_second) if bytes_a_second else None

    def wait(self, nbytes: int, ended: threading.Event) -> None:
        """Waits until bytes may be sent. Called without any lock.

        Args:
            nbytes: bytes that the caller sends next.
            ended: ends the wait early, because the bytes are not sent any more.
        """
        if self._bucket is None:
            return
        with self._lock:
            seconds = self._bucket.take(nbytes, self._clock())
        if seconds > 0:
            ended.wait(seconds)


__all__ = ["CopyPace", "TokenBucket"]
