"""Who is in the cluster and alive, by leases. Pure: no clock, no I/O.

A member that does not beat for a lease's length is dead, and so is that incarnation for ever; what comes back is a new
one. A process that was killed and started again at once under its old id is refused until the old lease has run out,
because a live process with the same id looks just like that from here: it tries again, for at most one lease.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from shoal import errors
from shoal.status import MemberStatus, Role, ServerLoad
from shoal.v1 import state_pb2
from shoal_coordinator.messages import Registration

MAX_MEMBERS = 100_000
# The dead are kept for status: so many of them, for so many seconds.
MAX_DEAD = 256
DEAD_KEPT_S = 600.0
# How long members may take to find a coordinator that was away, however short their leases: a channel tries again every
# 2 s at least, and a heartbeat is due within moments then.
RETURN_S = 5.0


@dataclass(slots=True)
class Member:
    """One incarnation of a member."""

    registration: Registration
    incarnation: int
    last_seen: float
    alive: bool = True  # once False, it stays so
    enrolled: bool = False  # sessions: it has had its part in a job; an incarnation gets one
    draining: bool = False  # it said that it was going: servers before they do; once True, it stays so
    shards: int = 0
    bytes: int = 0
    load: ServerLoad = field(default_factory=ServerLoad)

    @property
    def id(self) -> str:
        """The member id."""
        return self.registration.member

    @property
    def role(self) -> Role:
        """What it is."""
        return self.registration.role

    def status(self, now: float, job: str) -> MemberStatus:
        """This member as users see it; `job` is what it works on, or empty."""
        return MemberStatus(
            member=self.id,
            role=self.role,
            incarnation=self.incarnation,
            address=self.registration.address,
            device=self.registration.device,
            metrics_address=self.registration.metrics_address,
            alive=self.alive,
            silent_s=max(0.0, now - self.last_seen),
            shards=self.shards,
            bytes=self.bytes,
            job=job,
            load=self.load,
            leaving=self.draining,
        )

    def to_proto(self) -> state_pb2.MemberRecord:
        """The record of this member."""
        return state_pb2.MemberRecord(
            registration=self.registration.to_proto(),
            incarnation=self.incarnation,
            enrolled=self.enrolled,
            dead=not self.alive,
            last_seen=0.0 if self.alive else self.last_seen,
            leaving=self.draining,
        )

    @classmethod
    def from_proto(cls, record: state_pb2.MemberRecord) -> "Member":
        """The member that a record is of; when a living one was last seen is the caller's to say."""
        return cls(
            Registration.from_proto(record.registration),
            record.incarnation,
            record.last_seen,
            alive=not record.dead,
            enrolled=record.enrolled,
            draining=record.leaving,
        )


class Membership:
    """All members, at most one incarnation of each id.

    Args:
        heartbeat_timeout_s: seconds of silence after which a member is dead.
        return_s: how long a server that said it was going, and went, is expected back.
        changed: told the id of a member whose record is another one now, or gone.
    """

    def __init__(
        self, heartbeat_timeout_s: float, changed: Callable[[str], None] = lambda _: None, *, return_s: float = 60.0
    ) -> None:
        self._heartbeat_timeout_s, self._return_s = heartbeat_timeout_s, return_s
        self._changed = changed
        self._members: dict[str, Member] = {}
        # The last incarnation given out, to whomever: an id forgotten long ago never gets a number again.
        self.incarnation = 0

    def restore(self, members: Iterable[Member], incarnation: int, now: float) -> None:
        """Takes up what an earlier coordinator knew. It may have been away for long: all leases begin now.

        Args:
            members: all that are remembered.
            incarnation: the last one that was given out.
            now: when this coordinator began.
        """
        self.incarnation = incarnation
        for member in members:
            if member.alive:
                member.last_seen = now + max(0.0, RETURN_S - self._heartbeat_timeout_s)
            self._members[member.id] = member

    def __iter__(self) -> Iterator[Member]:
        """All members that are remembered, in order of id, the dead among them."""
        return iter(sorted(self._members.values(), key=lambda member: member.id))

    def alive(self, role: Role) -> list[Member]:
        """The live members of one role, in order of id."""
        return [member for member in self if member.alive and member.role is role]

    @property
    def not_draining(self) -> list[Member]:
        """The live servers that are not about to go, in order of id: where shards may be placed."""
        return [member for member in self.alive(Role.SERVER) if not member.draining]

    def expected(self, now: float) -> dict[str, float]:
        """The servers that are about to go, or have gone a while ago, and may be back under their names.

        Returns:
            By id, until when each is expected; 0: it has not gone yet.
        """
        leaving = [member for member in self if member.draining and member.role is Role.SERVER]
        until = {member.id: 0.0 if member.alive else member.last_seen + self._return_s for member in leaving}
        return {member: end for member, end in until.items() if not end or now < end}

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
            if known.registration != registration:
                self._changed(known.id)
            known.registration, known.last_seen = registration, now
            return known
        if known is None and len(self._members) >= MAX_MEMBERS:
            raise errors.Overloaded(f"the cluster has {MAX_MEMBERS} members, the most it takes", members=MAX_MEMBERS)
        self.incarnation += 1
        member = Member(registration, self.incarnation, now)
        self._members[member.id] = member
        self._changed(member.id)
        return member

    def find(self, member: str) -> Member | None:
        """A member that is remembered, dead or alive."""
        return self._members.get(member)

    def mark_enrolled(self, member: Member) -> None:
        """Notes that a session has had its part in a job."""
        member.enrolled = True
        self._changed(member.id)

    def is_draining(self, member: str) -> bool:
        """Whether the id belongs to a live server that is about to go."""
        return self.is_alive(member) and self._members[member].draining

    def start_draining(self, member: Member) -> None:
        """Notes that a server is going; it is alive until it has gone."""
        member.draining = True
        self._changed(member.id)

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

    def heartbeat(
        self,
        member: str,
        incarnation: int,
        shards: int,
        held_bytes: int,
        now: float,
        load: ServerLoad | None = None,
    ) -> Member:
        """Renews a lease; servers say what they hold and do.

        Raises:
            Fenced: that incarnation is over.
        """
        known = self.check(member, incarnation)
        known.last_seen, known.shards, known.bytes, known.load = now, shards, held_bytes, load or known.load
        return known

    def leave(self, member: str, incarnation: int, now: float) -> Member | None:
        """Ends a membership; None if it had ended before."""
        known = self._members.get(member)
        if known is None or not known.alive or known.incarnation != incarnation:
            return None
        known.last_seen = now
        if known.role is not Role.SERVER:  # which is expected back only if it has announced that it would go
            known.draining = True
        self._bury([known], now)
        return known

    def expire(self, now: float) -> list[Member]:
        """Declares dead who has been silent for longer than the lease, and forgets those who died long ago."""
        silent = [member for member in self if member.alive and now - member.last_seen > self._heartbeat_timeout_s]
        self._bury(silent, now)
        return silent

    def extend_timeouts(self, seconds: float) -> None:
        """Lets every lease run longer, for a time in which the coordinator itself was away and heard nobody."""
        for member in self._members.values():
            if member.alive:
                member.last_seen += seconds

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        incarnations = [member.incarnation for member in self._members.values()]
        assert len(set(incarnations)) == len(incarnations), "two members share an incarnation"
        assert max(incarnations, default=0) <= self.incarnation, "an incarnation from the future"
        assert all(key == member.id for key, member in self._members.items())
        assert sum(not member.alive for member in self._members.values()) <= MAX_DEAD

    def _check_same_process(self, known: Member, registration: Registration, now: float) -> None:
        if known.registration.process == registration.process and known.role is registration.role:
            return
        left_s = max(0.0, known.last_seen + self._heartbeat_timeout_s - now)
        where = f" at {known.registration.address}" if known.registration.address else ""
        raise errors.DuplicateMember(
            f"a live process{where} has the member id {known.id}: give each process its own, or stop that one; if it "
            f"was this one's earlier life and has died, try again in {left_s:.1f} s, when its lease has run out",
            member=known.id,
            address=known.registration.address,
            retry_in_s=f"{left_s:.3f}",
        )

    def _bury(self, members: Iterable[Member], now: float) -> None:
        for member in members:
            member.alive = False
            self._changed(member.id)
        dead = sorted((member for member in self if not member.alive), key=lambda member: -member.last_seen)
        for place, member in enumerate(dead):
            if place >= MAX_DEAD or now - member.last_seen > DEAD_KEPT_S:
                del self._members[member.id]
                self._changed(member.id)
