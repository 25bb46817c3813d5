"""The members of a cluster, and which of them are alive. Pure: no clock, no I/O.

A member that sends no heartbeat for the heartbeat timeout is lost. Its incarnation never returns: a process that comes
back gets a new incarnation. Before the timeout has expired, the coordinator cannot know that a process is dead. So if a
process is killed and restarted at once under its old id, its registration is refused until then. The new process
retries, for at most one timeout.

A session whose connection has ended is absent. It may live, so it stays until a process wants its id or its place.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from shoal import errors
from shoal._limits import catalogue
from shoal.status import Role, ServerLoad
from shoal_coordinator.cluster.dead_members import DeadMembers
from shoal_coordinator.cluster.expiry_breaker import ExpiryBreaker
from shoal_coordinator.cluster.heartbeat_interval import CALLS_PER_S, LONGEST_S, heartbeat_interval_s
from shoal_coordinator.cluster.member import Member
from shoal_coordinator.messages import DrainOrder, Registration, ServerRef

MAX_MEMBERS = catalogue.MAX_MEMBERS.default
# Seconds that members may take to find a restarted coordinator, however short the heartbeat timeout: a channel retries
# at least every 2 s, and a heartbeat follows soon after. In a large cluster, the interval is added.
RETURN_S = 5.0

_ID = attrgetter("registration.member")


class Membership:
    """All members, with at most one incarnation of each id.

    Args:
        heartbeat_timeout_s: seconds without a heartbeat after which a member is lost.
        changed: called with the id of a member whose record was changed or removed.
        return_s: seconds for which a drained server is expected to return.
        holder_members: limit of the live members of one holder.

    Attributes:
        heartbeat_timeout_s: as given.
        incarnation: the last incarnation that was used, for any member. A forgotten id never gets an old number again.
        breaker: holds expiry back while the coordinator may miss heartbeats.
        shortest_interval_s: seconds between the heartbeats of a member in a small cluster.
    """

    def __init__(
        self,
        heartbeat_timeout_s: float,
        changed: Callable[[str], None] = lambda _: None,
        *,
        return_s: float = 60.0,
        holder_members: int = catalogue.HOLDER_MEMBERS.default,
    ) -> None:
        self.heartbeat_timeout_s, self._return_s = heartbeat_timeout_s, return_s
        self._holder_members = holder_members
        self.shortest_interval_s = 0.5
        self._changed = changed
        self._members: dict[str, Member] = {}
        # The live members, in order of id, so that an event of one of a thousand members need not look for the others.
        self._live: dict[Role, list[Member]] = {role: [] for role in Role}
        self._held: Counter[str] = Counter()  # the number of live members by holder
        self._dead = DeadMembers()
        self._heard_since = 0.0  # no live member was last heard before this time; it may be earlier than necessary
        self.incarnation = 0
        self.breaker = ExpiryBreaker(heartbeat_timeout_s)

    def restore(self, members: Iterable[Member], incarnation: int, now: float) -> None:
        """Restores the members that an earlier coordinator knew. All heartbeat timeouts start now.

        Args:
            members: all remembered members.
            incarnation: the last one that was used.
            now: when this coordinator started, in seconds of Unix time.
        """
        self.incarnation = incarnation
        members = list(members)
        for member in sorted(members, key=_ID):
            if member.alive:
                self._live[member.role].append(member)
                self._held[member.registration.holder] += 1
        # The earlier coordinator may have had a longer timeout, and so a longer interval.
        interval_s = min(self._alive / CALLS_PER_S, LONGEST_S)
        return_s = RETURN_S + (interval_s if interval_s > self.shortest_interval_s else 0.0)
        for member in members:
            if member.alive:
                member.last_seen = now + max(0.0, return_s - self.heartbeat_timeout_s)
            self._members[member.id] = member
            if member.last_seen > now and not member.alive:  # the clock has gone back
                member.last_seen = now
                self._changed(member.id)
        self._dead = DeadMembers(member for member in members if not member.alive)

    def __iter__(self) -> Iterator[Member]:
        """Iterates over all remembered members, alive or not, in order of id."""
        return (self._members[member] for member in sorted(self._members))

    def __len__(self) -> int:
        return len(self._members)

    @property
    def _alive(self) -> int:
        """The number of live members."""
        return sum(map(len, self._live.values()))

    def unordered(self) -> Iterable[Member]:
        """Returns all remembered members, for reading only."""
        return self._members.values()

    def count_alive(self, role: Role) -> int:
        """Returns the number of live members of one role."""
        return len(self._live[role])

    def alive(self, role: Role) -> list[Member]:
        """Returns the live members of one role, in order of id."""
        return list(self._live[role])

    @property
    def not_draining(self) -> list[Member]:
        """The live servers that are not draining, in order of id: shards may be placed on them."""
        return [member for member in self._live[Role.SERVER] if not member.draining]

    def expected(self, now: float) -> dict[str, float]:
        """Returns the servers that are draining, or have left recently and may return under their ids.

        A server that drains because a user has ordered it is not expected back.

        Returns:
            By id, the time until which each is expected; 0 if it has not left yet.
        """
        until = {it.id: 0.0 if it.alive else it.last_seen + self._return_s for it in self if it.may_return}
        return {member: end for member, end in until.items() if not end or now < end}

    @property
    def heartbeat_interval_s(self) -> float:
        """The seconds from one heartbeat or report of a member to the next, as members are told now."""
        return heartbeat_interval_s(self._alive, self.heartbeat_timeout_s, self.shortest_interval_s)

    def is_alive(self, member: str) -> bool:
        """Returns whether the id belongs to a live member."""
        return member in self._members and self._members[member].alive

    def incarnation_at(self, server: ServerRef) -> int:
        """Returns the incarnation of a live server at this address; 0 if there is none."""
        known = self._members.get(server.member)
        return known.incarnation if known and known.alive and known.registration.address == server.address else 0

    @property
    def live_servers(self) -> dict[ServerRef, int]:
        """The incarnations of the live servers."""
        return {ServerRef(it.id, it.registration.address): it.incarnation for it in self._live[Role.SERVER]}

    def register(self, registration: Registration, now: float) -> Member:
        """Makes a process a member. Call `expire` first, so that no lost member counts as alive.

        Raises:
            DuplicateMember: another live process has the id.
            Overloaded: there are too many members, or too many of this holder are alive.
        """
        known = self._members.get(registration.member)
        if known and known.alive:
            known.check_repeated_by(registration, now, self.heartbeat_timeout_s)
            if known.registration != registration:
                self._changed(known.id)
            known.registration, known.last_seen = registration, now
            return known
        if known is None and len(self._members) >= MAX_MEMBERS:
            raise catalogue.MAX_MEMBERS.refusal(
                f"the cluster has {MAX_MEMBERS} members", "stop one that is not needed", limit=MAX_MEMBERS
            )
        self._check_holder(registration.holder)
        self.incarnation += 1
        member = Member(registration, self.incarnation, now)
        self._members[member.id] = member
        if known:
            self._dead.remove(known)
        insort(self._live[member.role], member, key=_ID)
        self._held[registration.holder] += 1
        self._changed(member.id)
        return member

    def find(self, member: str) -> Member | None:
        """Returns a remembered member, alive or not."""
        return self._members.get(member)

    def mark_enrolled(self, member: Member) -> None:
        """Records that a session has had its assignment."""
        member.enrolled = True
        self._changed(member.id)

    def is_draining(self, member: str) -> bool:
        """Returns whether the id belongs to a live server that is draining."""
        return self.is_alive(member) and self._members[member].draining

    def start_draining(self, member: Member, order: DrainOrder | None = None) -> None:
        """Records that a server is draining, perhaps by an order of a user; it stays alive until it leaves."""
        member.draining, member.order = True, order or member.order
        self._changed(member.id)

    def mark_drained(self, member: Member) -> None:
        """Records that no live job needs a draining server any more."""
        member.drained = True
        self._changed(member.id)

    def check(self, member: str, incarnation: int) -> Member:
        """Returns the live member with this incarnation.

        Raises:
            Fenced: that incarnation has ended or never existed.
        """
        known = self._members.get(member)
        if known is None or not known.alive or known.incarnation != incarnation:
            raise errors.Fenced(
                f"incarnation {incarnation} of {member} was declared lost or replaced; register again",
                member=member,
                incarnation=incarnation,
            )
        return known

    def mark_alive(self, member: str, incarnation: int, now: float) -> Member:
        """Records that a member has shown that it is alive, by a heartbeat or a report.

        Args:
            member, incarnation: as for `check`.
            now: seconds of Unix time.

        Returns:
            The member.

        Raises:
            Fenced: that incarnation has ended.
        """
        known = self.check(member, incarnation)
        known.last_seen = now
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
        """Records a heartbeat.

        Args:
            member, incarnation: as for `check`.
            shards: number of shards that a server holds.
            held_bytes: bytes that a server holds.
            now: seconds of Unix time.
            load: load of a server, or None.

        Returns:
            The member.

        Raises:
            Fenced: that incarnation has ended.
        """
        known = self.mark_alive(member, incarnation, now)
        known.shards, known.bytes, known.load = shards, held_bytes, load or known.load
        return known

    def leave(self, member: str, incarnation: int, now: float) -> Member | None:
        """Ends a membership.

        Args:
            member, incarnation: as for `check`.
            now: seconds of Unix time.

        Returns:
            The member; None if this incarnation had ended before.

        Raises:
            UnknownMember: no member of this id is remembered.
        """
        known = self._members.get(member)
        if known is None:
            raise errors.UnknownMember(f"{member!r} cannot leave: it is no member; check the id", member=member)
        if not known.alive or known.incarnation != incarnation:
            return None
        known.last_seen = now
        if known.role is not Role.SERVER:  # a server is expected back only if it was draining
            known.draining = True
        self._mark_dead([known], now)
        return known

    def expire(self, now: float, claimed: str = "") -> list[Member]:
        """Marks members as lost after the heartbeat timeout, and returns them. Forgets members that were lost long ago.

        Args:
            now: seconds of Unix time.
            claimed: an id for which a process registers. That process reached the coordinator, so `breaker` does not
                hold back the expiry of this id.
        """
        if now - self._heard_since <= self.heartbeat_timeout_s:  # the usual case, of every tick and every registration
            self.breaker.end_holds()
            return []
        alive = [member for live in self._live.values() for member in live]
        silent = [member for member in alive if now - member.last_seen > self.heartbeat_timeout_s]
        last_seen: dict[str, list[float]] = {}
        for member in alive:
            last_seen.setdefault(member.group, []).append(member.last_seen)
        expire = self.breaker.may_expire(last_seen, now)
        silent = [member for member in silent if member.id == claimed or member.group in expire]
        silent.sort(key=_ID)
        self._mark_dead(silent, now)
        # At most `now`: a restarted coordinator sets a later time for members that have not returned.
        seen = (member.last_seen for member in alive if member.alive)
        self._heard_since = min(now, min(seen, default=now))
        return silent

    def lose_silent(self, server: str, incarnation: int, asked_at: float, now: float) -> Member | None:
        """Marks a server as lost that did not answer a call, unless `breaker` holds that back.

        Args:
            server: its member id.
            incarnation: its incarnation when it was called.
            asked_at: time of the call. A later heartbeat shows that it is alive.
            now: seconds of Unix time.

        Returns:
            The server; None if it is not declared lost.
        """
        known = self._members.get(server)
        if known is None or not known.alive or known.incarnation != incarnation or known.last_seen > asked_at:
            return None
        last_seen = [it.last_seen for live in self._live.values() for it in live if it.group == known.group]
        if not self.breaker.may_lose_silent(len(self._live[Role.SERVER]), last_seen, now):
            return None
        self._mark_dead([known], now)
        return known

    def note_attendance(self, member: str, incarnation: int, *, absent: bool) -> None:
        """Records that a member is absent, or has returned before another process took its id or its place.

        Args:
            member, incarnation: as for `check`.
            absent: whether it is absent.

        Raises:
            Fenced: that incarnation has ended.
        """
        self.check(member, incarnation).absent = absent

    def lose_absent(self, member: str, now: float, by: Registration | None = None) -> list[Member]:
        """Marks a member as lost if it is absent, because its id or its place is wanted.

        Args:
            member: id of the member.
            now: seconds of Unix time.
            by: the process that wants its id; None if its place is wanted.

        Returns:
            The member, if it is lost now.
        """
        lost = [it for it in [self._members.get(member)] if it and it.is_free_for(by)]
        self._mark_dead(lost, now)
        return lost

    def extend_timeouts(self, seconds: float) -> None:
        """Extends all heartbeat timeouts by a time in which the coordinator itself was paused and received nothing."""
        for live in self._live.values():
            for member in live:
                member.last_seen += seconds

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        incarnations = [member.incarnation for member in self._members.values()]
        assert len(set(incarnations)) == len(incarnations), "two members share an incarnation"
        assert max(incarnations, default=0) <= self.incarnation, "an incarnation that was not given out"
        assert all(key == member.id for key, member in self._members.items())
        alive = sorted((member for member in self._members.values() if member.alive), key=_ID)
        assert self._live == {role: [member for member in alive if member.role is role] for role in Role}
        assert self._held == Counter(member.registration.holder for member in alive)
        assert all(member.last_seen >= self._heard_since for member in alive)
        assert [*self._dead] == [*DeadMembers(it for it in self._members.values() if not it.alive)]

    def _check_holder(self, holder: str) -> None:
        """Checks that a holder may have one more member. Without tokens, members have no holder."""
        theirs = self._held[holder]
        if holder and theirs >= self._holder_members:
            raise catalogue.HOLDER_MEMBERS.refusal(
                f"{theirs} processes of {holder} are members", "stop one that is not needed", limit=self._holder_members
            )

    def _mark_dead(self, members: Iterable[Member], now: float) -> None:
        for member in members:
            member.alive = False
            live = self._live[member.role]
            del live[bisect_left(live, member.id, key=_ID)]
            self._held[member.registration.holder] -= 1
            self._dead.add(member)
            self._changed(member.id)
        for forgotten in self._dead.take_forgotten(now):
            del self._members[forgotten.id]
            self._changed(forgotten.id)
