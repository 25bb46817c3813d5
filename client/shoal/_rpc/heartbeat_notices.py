"""Notices about heartbeats that fail: the first failure, reminders, and the first answer afterwards (no clock).

A member repeats a failed heartbeat several times a second. Without this, its log would have one line for each attempt.
"""

from dataclasses import dataclass

from shoal import errors

# Least time between two notices about the same failure, in seconds.
REMINDER_S = 10.0


@dataclass(frozen=True, slots=True)
class Notice:
    """A line for the member's log.

    Attributes:
        text: what happens.
        seconds: for how long heartbeats have failed; 0 at the first failure.
    """

    text: str
    seconds: float


class HeartbeatNotices:
    """Decides which failed heartbeats a member writes to its log. `now` is in seconds of any clock."""

    def __init__(self) -> None:
        self._failing: type[_Silent] | type[_Refusing] | None = None  # None while heartbeats are answered
        self._since = self._noticed_at = 0.0

    def failed(self, error: errors.ShoalError, now: float) -> Notice | None:
        """Records a failed heartbeat. Returns a notice if the failure is new, or if a reminder is due."""
        failing = _Silent if isinstance(error, errors.Unreachable) else _Refusing
        if self._failing is None:
            self._since = now
        elif failing is self._failing and now - self._noticed_at < REMINDER_S:
            return None
        text = failing.reminder if failing is self._failing else failing.first
        self._failing, self._noticed_at = failing, now
        return Notice(text, round(now - self._since, 1))

    def answered(self, now: float) -> Notice | None:
        """Records an answer. Returns a notice if the heartbeat before it failed."""
        if self._failing is None:
            return None
        text, self._failing = self._failing.last, None
        return Notice(text, round(now - self._since, 1))


class _Silent:
    first = "the coordinator does not answer; trying again"
    reminder = "the coordinator still does not answer; trying again"
    last = "the coordinator answers again"


class _Refusing:
    first = "the coordinator refuses heartbeats; trying again"
    reminder = "the coordinator still refuses heartbeats; trying again"
    last = "the coordinator accepts heartbeats again"


__all__ = ["REMINDER_S", "HeartbeatNotices", "Notice"]
