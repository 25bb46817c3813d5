"""The members that have ended, which the status shows for a while. Pure: no clock, no I/O."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from operator import attrgetter

from shoal_coordinator.cluster.member import Member

# Their number, and for how many seconds each is kept.
MAX_DEAD = 256
DEAD_KEPT_S = 600.0

_LAST_SEEN = attrgetter("last_seen", "registration.member")


class DeadMembers:
    """Dead members, those that were last seen first: a death of one of a thousand members must not visit all.

    Args:
        members: the first ones.
    """

    def __init__(self, members: Iterable[Member] = ()) -> None:
        self._members = sorted(members, key=_LAST_SEEN)

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members)

    def add(self, member: Member) -> None:
        """Adds a member, whose `last_seen` does not change any more."""
        insort(self._members, member, key=_LAST_SEEN)

    def remove(self, member: Member) -> None:
        """Removes a member whose id has a new incarnation."""
        del self._members[bisect_left(self._members, _LAST_SEEN(member), key=_LAST_SEEN)]

    def take_forgotten(self, now: float) -> list[Member]:
        """Removes and returns those that are too many, or were seen last too long ago."""
        forgotten = []
        while self._members and (len(self) > MAX_DEAD or now - self._members[0].last_seen > DEAD_KEPT_S):
            forgotten.append(self._members.pop(0))
        return forgotten


__all__ = ["DEAD_KEPT_S", "MAX_DEAD", "DeadMembers"]
