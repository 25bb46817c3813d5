"""Who is in the cluster and alive, by leases. Pure: no clock, no I/O.

A member that does not beat for a lease's length is dead, and so is that incarnation for ever; what comes back is a new
one. A process that was killed and started again at once under its old id is refused until the old lease has run out,
because a live process with the same id looks just like that from here: it tries again, for at most one lease.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shoal import errors
from shoal.status import Role

_ID = re.compile(r"[a-z0-9-]{1,63}")
MAX_MEMBERS = 100_000
# The dead are kept for status: so many of them, for so many seconds.
MAX_DEAD = 256
DEAD_KEPT_S = 600.0


@dataclass(frozen=True, slots=True)
class Registration:
    """What a process says of itself when it wants to be a member."""

    role: Role
    member: str
    process: str  # drawn by each process: the same id from two of them is a clash, from one a retry
    address: str = ""
    device: str = ""
    metrics_address: str = ""

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.member):
            raise errors.BadRequest(f"member id {self.member!r} is not 1 to 63 characters of a-z, 0-9 and -")
        if not self.process:
            raise errors.BadRequest(f"{self.member} names no process; draw a random one when the process starts")
        if self.role is Role.SERVER and not self.address:
            raise errors.BadRequest(f"server {self.member} gives no address; workers could not reach it")


@dataclass(slots=True)
class Member:
    """One incarnation of a member."""

    registration: Registration
    incarnation: int
    last_seen: float
    alive: bool = True  # once False, it stays so
    enrolled: bool = False  # sessions: it has had its part in a job; an incarnation gets one
    shards: int = 0
    bytes: int = 0

    @property
    def id(self) -> str:
        """The member id."""
        return self.registration.member

    @property
    def role(self) -> Role:
        """What it is."""
        return self.registration.role


class Membership:
    """All members, at most one incarnation of each id.

    Args:
        lease_s: seconds of silence after which a member is dead.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._members: dict[str, Member] = {}
        # The last incarnation given out, to whomever: an id forgotten long ago never gets a number again.
        self._incarnation = 0

    def __iter__(self) -> Iterator[Member]:
        """All members that are remembered, in order of id, the dead among them."""
        return iter(sorted(self._members.values(), key=lambda member: member.id))

    def alive(self, role: Role) -> list[Member]:
        """The live members of one role, in order of id."""
        return [member for member in self if member.alive and member.role is role]

    def is_alive(self, member: str) -> bool:
        """Whether the id belongs to a live member."""
        return member in self._members and self._members[member].alive

    def register(self, registration: Registration, now: float) -> Member:
        """Makes a process a member; to be called after `expire`, so that nobody dead is taken for alive.

        Raises:
            DuplicateMember: another process has the id.
            Overloaded: there are too many members.
        """
        known = self._members.get(registration.member)
        if known and known.alive:
            self._check_same_process(known, registration, now)
            known.registration, known.last_seen = registration, now
            return known
        if known is None and len(self._members) >= MAX_MEMBERS:
            raise errors.Overloaded(f"the cluster has {MAX_MEMBERS} members, the most it takes", members=MAX_MEMBERS)
        self._incarnation += 1
        member = Member(registration, self._incarnation, now)
        self._members[member.id] = member
        return member

    def check(self, member: str, incarnation: int) -> Member:
        """The live member that a caller claims to be.

        Raises:
            Fenced: that incarnation is over, or never was.
        """
        known = self._members.get(member)
        if known is None or not known.alive or known.incarnation != incarnation:
            raise errors.Fenced(
                f"incarnation {incarnation} of {member} was declared dead or replaced; register again",
                member=member,
                incarnation=incarnation,
            )
        return known

    def beat(self, member: str, incarnation: int, shards: int, held_bytes: int, now: float) -> Member:
        """Renews a lease.

        Raises:
            Fenced: that incarnation is over.
        """
        known = self.check(member, incarnation)
        known.last_seen, known.shards, known.bytes = now, shards, held_bytes
        return known

    def leave(self, member: str, incarnation: int, now: float) -> Member | None:
        """Ends a membership; None if it had ended before."""
        known = self._members.get(member)
        if known is None or not known.alive or known.incarnation != incarnation:
            return None
        self._bury([known], now)
        return known

    def expire(self, now: float) -> list[Member]:
        """Declares dead who has been silent for longer than the lease, and forgets those who died long ago."""
        silent = [member for member in self if member.alive and now - member.last_seen > self._lease_s]
        self._bury(silent, now)
        return silent

    def forgive(self, seconds: float) -> None:
        """Lets every lease run longer, for a time in which the coordinator itself was away and heard nobody."""
        for member in self._members.values():
            if member.alive:
                member.last_seen += seconds

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        incarnations = [member.incarnation for member in self._members.values()]
        assert len(set(incarnations)) == len(incarnations), "two members share an incarnation"
        assert max(incarnations, default=0) <= self._incarnation, "an incarnation from the future"
        assert all(key == member.id for key, member in self._members.items())
        assert sum(not member.alive for member in self._members.values()) <= MAX_DEAD

    def _check_same_process(self, known: Member, registration: Registration, now: float) -> None:
        if known.registration.process == registration.process and known.role is registration.role:
            return
        left_s = max(0.0, known.last_seen + self._lease_s - now)
        raise errors.DuplicateMember(
            f"a live process has the member id {known.id}: give each process its own; if it was this one's earlier "
            f"life and has died, try again in {left_s:.1f} s, when its lease has run out",
            member=known.id,
            retry_in_s=f"{left_s:.3f}",
        )

    def _bury(self, members: Iterable[Member], now: float) -> None:
        for member in members:
            member.alive = False
        dead = sorted((member for member in self if not member.alive), key=lambda member: -member.last_seen)
        for place, member in enumerate(dead):
            if place >= MAX_DEAD or now - member.last_seen > DEAD_KEPT_S:
                del self._members[member.id]
