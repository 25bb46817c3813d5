"""Pace of a member's heartbeats and reports: when the next one is due.

The coordinator states the heartbeat interval. A report counts as a heartbeat, and is due a little earlier than a
heartbeat. So a member whose reports are answered in time sends no heartbeats. If a report is not answered in time, the
member sends a heartbeat, for which the coordinator has reserved threads.
"""

import threading
import time
from collections.abc import Callable

from shoal._system import ENTROPY

# When calls are due, in parts of the interval since the last call was sent. The exact part is drawn for each call, so
# that members that started together do not call together.
_REPORT, _HEARTBEAT = (0.80, 0.88), (0.95, 1.0)
# When the next heartbeat is due after one without an answer. The interval is at most a third of the heartbeat timeout,
# and a heartbeat fails after one interval. So the next one still arrives within the timeout.
_RETRY = (0.4, 0.5)
# The interval until the coordinator has stated one.
_FIRST_INTERVAL_S = 1.0


class HeartbeatPace:
    """When the calls of one member are due. Thread-safe.

    Args:
        clock: monotonic clock, in seconds.
        jitter: returns numbers in [0, 1).
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, jitter: Callable[[], float] = ENTROPY.random
    ) -> None:
        self._clock, self._jitter = clock, jitter
        self._lock = threading.Lock()  # guards what follows
        self._interval_s = _FIRST_INTERVAL_S
        self._heartbeat_at = self._report_at = clock()

    @property
    def now(self) -> float:
        """The time by this pace's clock, for `answered`."""
        return self._clock()

    @property
    def interval_s(self) -> float:
        """The interval that the coordinator has stated last, in seconds."""
        with self._lock:
            return self._interval_s

    @property
    def heartbeat_due_s(self) -> float:
        """The seconds until a heartbeat is due; 0 if it is due now."""
        with self._lock:
            return max(0.0, self._heartbeat_at - self._clock())

    @property
    def report_due_s(self) -> float:
        """The seconds until a report may be sent; 0 if it may be sent now."""
        with self._lock:
            return max(0.0, self._report_at - self._clock())

    def answered(self, sent_at: float, interval_s: float) -> None:
        """Notes that a registration, a heartbeat or a report was answered.

        Args:
            sent_at: when it was sent, by `now`.
            interval_s: the interval in the reply, in seconds; 0 if it has none.
        """
        with self._lock:
            self._interval_s = interval_s if interval_s > 0 else self._interval_s
            self._heartbeat_at = max(self._heartbeat_at, sent_at + self._part(_HEARTBEAT))

    def unanswered(self) -> None:
        """Notes that a heartbeat or a registration was not answered."""
        with self._lock:
            self._heartbeat_at = self._clock() + self._part(_RETRY)

    def reporting(self) -> None:
        """Notes that a report is sent, whatever becomes of it."""
        with self._lock:
            self._report_at = self._clock() + self._part(_REPORT)

    def _part(self, of: tuple[float, float]) -> float:
        """Returns a part of the interval, in seconds."""
        least, most = of
        return self._interval_s * (least + (most - least) * self._jitter())


__all__ = ["HeartbeatPace"]
