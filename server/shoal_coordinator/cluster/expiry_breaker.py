"""Circuit breaker of expiry: declares no member lost while the coordinator itself may be missing heartbeats. Pure.

In two cases, a missing heartbeat does not prove that its sender is dead: the coordinator refused or queued heartbeats,
or many members fell silent at the same time. One failure of the network or of the coordinator is then more likely than
many failures of machines. So expiry waits. The wait is limited, so that jobs go on if the members are really dead.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

# The largest share of the live members that may fall silent without a hold, and the smallest number of live members for
# which it is checked: in a smaller cluster, two deaths are a large share.
SILENT_SHARE, SHARE_OF_AT_LEAST = 0.2, 10
# The longest wait of expiry, in heartbeat timeouts. A dead member is declared lost at most one timeout later than this.
# The default, 15 s, is shorter than a restart from a checkpoint, and longer than most failures of a network switch.
HOLD_TIMEOUTS = 3.0
# Heartbeats count as queued if one waited for a thread for at least this part of the heartbeat timeout. Members send at
# least two heartbeats in each timeout.
QUEUED_PART = 0.25


@dataclass(frozen=True, slots=True)
class ExpiryHold:
    """A time during which no member is declared lost.

    Attributes:
        since: when it began, in seconds of Unix time.
        silent: number of members that would be declared lost.
        why: the reason.
    """

    since: float
    silent: int
    why: str


class ExpiryBreaker:
    """Decides whether silent members may be declared lost.

    Every member is declared lost within `(1 + HOLD_TIMEOUTS)` heartbeat timeouts after its last heartbeat.

    Args:
        heartbeat_timeout_s: seconds.

    Attributes:
        hold: the hold in progress, or None.
    """

    def __init__(self, heartbeat_timeout_s: float) -> None:
        self._timeout_s = heartbeat_timeout_s
        self._unheard: tuple[float, str] | None = None  # when heartbeats were last not heard, and why
        self.hold: ExpiryHold | None = None

    def heartbeats_delayed(self, wait_s: float, refused: int, now: float) -> None:
        """Records how long heartbeats waited at the coordinator, and how many it refused.

        Args:
            wait_s: longest wait of a heartbeat for a thread since the last call, in seconds.
            refused: number of refused heartbeats and registrations since the last call.
            now: seconds of Unix time.
        """
        if refused:
            self._unheard = now, f"{refused} heartbeats or registrations were refused"
        elif wait_s > QUEUED_PART * self._timeout_s:
            self._unheard = now, f"a heartbeat waited {wait_s:.1f} s for a thread"

    def may_expire(self, last_seen: Collection[float], now: float) -> bool:
        """Returns whether the silent members may be declared lost now. Starts or ends a hold.

        Args:
            last_seen: time of the last heartbeat of each live member.
            now: seconds of Unix time.
        """
        silent = _count(now - seen > self._timeout_s for seen in last_seen)
        why = self._doubt(last_seen, now) if silent else ""
        if not why:
            self.hold = None
        elif self.hold is None:
            self.hold = ExpiryHold(now, silent, why)
        elif now - self.hold.since >= HOLD_TIMEOUTS * self._timeout_s:
            self.hold = None
        else:
            self.hold = replace(self.hold, silent=silent)
        return self.hold is None

    def _doubt(self, last_seen: Collection[float], now: float) -> str:
        """Returns why silence may not mean death, or nothing."""
        if self._unheard and now - self._unheard[0] <= self._timeout_s:
            return self._unheard[1]
        # Half a timeout, because members that fall silent at once do not reach the timeout at once.
        late = _count(now - seen > self._timeout_s / 2 for seen in last_seen)
        if len(last_seen) >= SHARE_OF_AT_LEAST and late > SILENT_SHARE * len(last_seen):
            return f"{late} of {len(last_seen)} live members fell silent at once"
        return ""


def _count(conditions: Iterable[bool]) -> int:
    return sum(conditions)
