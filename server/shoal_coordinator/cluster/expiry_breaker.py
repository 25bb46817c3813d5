"""Circuit breaker of expiry: declares no member lost while the coordinator itself may be missing heartbeats. Pure.

In two cases, a missing heartbeat does not prove that its sender is dead: the coordinator refused or queued heartbeats,
or many members fell silent at the same time. One failure of the network or of the coordinator is then more likely than
many failures of machines. So expiry waits. The wait is limited, so that jobs go on if the members are really dead.

Members are judged in groups: servers and workers are one group, and the sessions of each holder are another one. A user
whose sessions stop at the same time must not delay the expiry of servers, workers and other users' sessions.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

# The largest share of the live members of a group that may fall silent without a hold, and the smallest number of live
# members for which it is checked: in a smaller group, two deaths are a large share.
SILENT_SHARE, SHARE_OF_AT_LEAST = 0.2, 10
# The longest wait of expiry, in heartbeat timeouts. A dead member is declared lost at most one timeout later than this.
# The default, 15 s, is shorter than a restart from a checkpoint, and longer than most failures of a network switch.
HOLD_TIMEOUTS = 3.0
# Heartbeats count as queued if one waited for a thread for at least this part of the heartbeat timeout. Members send at
# least two heartbeats in each timeout.
QUEUED_PART = 0.25


@dataclass(frozen=True, slots=True)
class ExpiryHold:
    """A time during which no member of some groups is declared lost.

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
    """

    def __init__(self, heartbeat_timeout_s: float) -> None:
        self._timeout_s = heartbeat_timeout_s
        self._unheard: tuple[float, str] | None = None  # when heartbeats were last not heard, and why
        self._holds: dict[str, ExpiryHold] = {}  # in progress, by group, oldest first
        self._silent_at: list[float] = []  # when servers were lost that did not answer, in the last heartbeat timeout

    @property
    def hold(self) -> ExpiryHold | None:
        """The oldest hold in progress, with the silent members of all groups; None if there is none."""
        oldest = next(iter(self._holds.values()), None)
        return replace(oldest, silent=sum(hold.silent for hold in self._holds.values())) if oldest else None

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

    def may_lose_silent(self, servers: int, last_seen: Collection[float], now: float) -> bool:
        """Returns whether a server may be declared lost that does not answer, before its heartbeat timeout expires.

        A backup did not reach it, and the coordinator does not either, which are two witnesses. So heartbeats that were
        not heard hold nothing back. But one failure of the network must not end many servers: within a heartbeat
        timeout, one server may be lost in this way, or `SILENT_SHARE` of them, and none while many members are silent.
        The others have to wait for their heartbeat timeouts.

        Args:
            servers: number of live servers.
            last_seen: the time of the last heartbeat of each live server and worker.
            now: seconds of Unix time.
        """
        self._silent_at = [at for at in self._silent_at if now - at <= self._timeout_s]
        if len(self._silent_at) >= max(1, int(SILENT_SHARE * servers)) or self._are_many_late(last_seen, now):
            return False
        self._silent_at.append(now)
        return True

    def end_holds(self) -> None:
        """Ends all holds, because no member is silent."""
        self._holds.clear()

    def may_expire(self, last_seen: Mapping[str, Collection[float]], now: float) -> set[str]:
        """Returns the groups whose silent members may be declared lost now. Starts and ends holds.

        Args:
            last_seen: by group, the time of the last heartbeat of each live member. The name of a group is a plural
                noun, for the reason of a hold.
            now: seconds of Unix time.
        """
        for group in self._holds.keys() - last_seen.keys():
            del self._holds[group]
        return {group for group, seen in last_seen.items() if not self._is_held(group, seen, now)}

    def _is_held(self, group: str, last_seen: Collection[float], now: float) -> bool:
        silent = _count(now - seen > self._timeout_s for seen in last_seen)
        why = self._doubt(group, last_seen, now) if silent else ""
        hold = self._holds.get(group, ExpiryHold(now, silent, why))
        if not why or now - hold.since >= HOLD_TIMEOUTS * self._timeout_s:
            self._holds.pop(group, None)
            return False
        self._holds[group] = replace(hold, silent=silent)
        return True

    def _doubt(self, group: str, last_seen: Collection[float], now: float) -> str:
        """Returns why silence may not mean death, or nothing."""
        if self._unheard and now - self._unheard[0] <= self._timeout_s:
            return self._unheard[1]
        if late := self._are_many_late(last_seen, now):
            return f"{late} of {len(last_seen)} live {group} fell silent at once"
        return ""

    def _are_many_late(self, last_seen: Collection[float], now: float) -> int:
        """Returns the number of late members if it is a large share; otherwise 0."""
        # Half a timeout, because members that fall silent at once do not reach the timeout at once.
        late = _count(now - seen > self._timeout_s / 2 for seen in last_seen)
        return late if len(last_seen) >= SHARE_OF_AT_LEAST and late > SILENT_SHARE * len(last_seen) else 0


def _count(conditions: Iterable[bool]) -> int:
    return sum(conditions)
