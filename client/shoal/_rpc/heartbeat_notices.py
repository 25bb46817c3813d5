"""Notices about heartbeats that fail: the failure, reminders, and the first answer afterwards (no clock).

A member repeats a failed heartbeat several times a second. Without this module, its log would have one line for each
attempt. A silence of less than two seconds gives no line: the first heartbeat of a member that has just started may
come before its connection is open.
"""

from dataclasses import dataclass

from shoal import errors

# Least time between two notices about the same failure, in seconds.
REMINDER_S = 10.0
# Seconds of silence before its first notice.
SILENCE_S = 2.0


@dataclass(frozen=True, slots=True)
class Notice:
    """A line for the member's log.

    Attributes:
        text: what happens.
        seconds: for how long heartbeats have failed; 0 if the first one was refused.
    """

    text: str
    seconds: float


class HeartbeatNotices:
    """Decides which failed heartbeats a member writes to its log. `now` is in seconds of any clock."""

    def __init__(self) -> None:
        self._failing: type[_Silent] | type[_Refusing] | None = None  # None while heartbeats are answered
        self._since = self._noticed_at = 0.0
        self._told = False  # whether there was a notice of this failure

    def failed(self, error: errors.ShoalError, now: float) -> Notice | None:
        """Records a failed heartbeat. Returns a notice if the first one or a reminder is due."""
        failing = _Silent if isinstance(error, errors.Unreachable) else _Refusing
        if self._failing is None:
            self._since = now
        if failing is not self._failing:
            self._failing, self._told = failing, False
        first_at = self._since + (SILENCE_S if failing is _Silent else 0.0)
        due_at = self._noticed_at + REMINDER_S if self._told else first_at
        if now < due_at:
            return None
        text = failing.reminder if self._told else failing.first
        self._told, self._noticed_at = True, now
        return Notice(text, round(now - self._since, 1))

    def answered(self, now: float) -> Notice | None:
        """Records an answer. Returns a notice if there was one about the failure that it ends."""
        failing, self._failing = self._failing, None
        told, self._told = self._told, False
        return Notice(failing.last, round(now - self._since, 1)) if failing and told else None


class _Silent:
    first = "the coordinator does not answer; trying again"
    reminder = "the coordinator still does not answer; trying again"
    last = "the coordinator answers again"


class _Refusing:
    first = "the coordinator refuses heartbeats; trying again"
    reminder = "the coordinator still refuses heartbeats; trying again"
    last = "the coordinator accepts heartbeats again"


__all__ = ["REMINDER_S", "SILENCE_S", "HeartbeatNotices", "Notice"]
