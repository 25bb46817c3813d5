from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shoal import errors
from shoal.status import Role, ServerLoad
from shoal.v1 import state_pb2
from shoal_coordinator.cluster import dead_members, membership
from shoal_coordinator.cluster.expiry_breaker import HOLD_TIMEOUTS
from shoal_coordinator.cluster.member import Member
from shoal_coordinator.cluster.membership import Membership
from shoal_coordinator.messages import Registration
from support.line_counts import lines_of
from support.run_lengths import draws

HEARTBEAT_TIMEOUT_S, START = 5.0, 1_000.0


def worker(name: str = "w0", process: str = "p0") -> Registration:
    return Registration(Role.WORKER, name, process)


def test_a_repeated_registration_is_the_same_life() -> None:
    members = Membership(HEARTBEAT_TIMEOUT_S)
    first = members.register(worker(), 0.0)
    assert members.register(worker(), 1.0).incarnation == first.incarnation
    assert members.expire(1.0 + HEARTBEAT_TIMEOUT_S) == []


def test_another_process_with_a_live_id_is_refused_with_a_retry_delay() -> None:
    members = Membership(HEARTBEAT_TIMEOUT_S)
    members.register(worker(), 0.0)
    with pytest.raises(errors.DuplicateMember, match=r"try again in 3\.0 s") as refused:
        members.register(worker(process="p1"), 2.0)
    assert refused.value.details["retry_in_s"] == "3.000"
    with pytest.raises(errors.DuplicateMember):
        members.register(Registration(Role.SESSION, "w0", "p0"), 2.0)


def test_another_caller_cannot_take_over_a_live_member_with_its_process_id() -> None:
    members = Membership(HEARTBEAT_TIMEOUT_S)
    first = members.register(replace(worker(), holder="ann"), 0.0)
    for other in ("bob", ""):
        with pytest.raises(errors.DuplicateMember):
            members.register(replace(worker(), holder=other), 1.0)
    assert members.register(replace(worker(), holder="ann"), 1.0) is first
    assert first.registration.holder == "ann"


def test_a_killed_process_comes_back_under_its_id_when_the_lease_is_over() -> None:
    members = Membership(HEARTBEAT_TIMEOUT_S)
    first = members.register(worker(), 0.0).incarnation
    assert [member.id for member in members.expire(HEARTBEAT_TIMEOUT_S + 0.1)] == ["w0"]
    second = members.register(worker(process="p1"), HEARTBEAT_TIMEOUT_S + 0.1).incarnation
    assert second > first
    with pytest.raises(errors.Fenced, match="register again"):
        members.heartbeat("w0", first, 0, 0, HEARTBEAT_TIMEOUT_S + 0.2)
    members.heartbeat("w0", second, 0, 0, HEARTBEAT_TIMEOUT_S + 0.2)


class TestAnAbsentSession:
    @staticmethod
    def session(process: str, holder: str = "ann") -> Registration:
        return Registration(Role.SESSION, "x", process, holder=holder)

    @pytest.fixture
    def members(self) -> Membership:
        members = Membership(HEARTBEAT_TIMEOUT_S)
        life = members.register(self.session("p0"), 0.0).incarnation
        members.note_attendance("x", life, absent=True)
        return members

    def test_gives_its_id_to_another_process_of_its_holder_at_once(self, members: Membership) -> None:
        [lost] = members.lose_absent("x", 1.0, self.session("p1"))
        assert not lost.alive
        members.register(self.session("p1"), 1.0)
        with pytest.raises(errors.Fenced):
            members.note_attendance("x", lost.incarnation, absent=False)
        members.validate()

    def test_stays_a_member_until_a_process_wants_its_id(self, members: Membership) -> None:
        members.heartbeat("x", 1, 0, 0, 2.0)
        assert members.expire(2.0 + HEARTBEAT_TIMEOUT_S) == []

    @pytest.mark.parametrize("by", [("p0", "ann"), ("p1", "bob"), ("p0", "bob")])
    def test_keeps_its_id_if_itself_or_another_holder_registers(self, members: Membership, by: tuple[str, str]) -> None:
        assert members.lose_absent("x", 1.0, self.session(*by)) == []

    def test_keeps_its_id_once_it_has_returned(self, members: Membership) -> None:
        members.note_attendance("x", 1, absent=False)
        assert members.lose_absent("x", 1.0, self.session("p1")) == members.lose_absent("y", 1.0) == []
        with pytest.raises(errors.DuplicateMember):
            members.register(self.session("p1"), 1.0)


def test_the_dead_stay_dead() -> None:
    members = Membership(HEARTBEAT_TIMEOUT_S)
    life = members.register(worker(), 0.0).incarnation
    members.expire(HEARTBEAT_TIMEOUT_S + 1)
    for call in (members.check, lambda name, life: members.heartbeat(name, life, 0, 0, HEARTBEAT_TIMEOUT_S + 1)):
        with pytest.raises(errors.Fenced):
            call("w0", life)
    with pytest.raises(errors.Fenced):
        members.check("nobody", 1)
    assert members.register(worker(), HEARTBEAT_TIMEOUT_S + 1).incarnation != life  # the same process, another life


def test_a_member_that_has_returned_to_a_restarted_coordinator_is_lost_in_time() -> None:
    timeout_s = membership.RETURN_S / 2
    earlier = Membership(timeout_s)
    earlier.register(worker(), START)
    members = Membership(timeout_s)
    members.restore(earlier, 1, START)
    assert members.expire(START + 0.1) == []
    members.heartbeat("w0", 1, 0, 0, START + 0.2)
    members.validate()
    assert members.expire(START + 0.2 + timeout_s) == []
    assert [member.id for member in members.expire(START + 0.3 + timeout_s)] == ["w0"]


def test_leave_ends_it_at_once_and_only_the_life_that_leaves() -> None:
    members = Membership(HEARTBEAT_TIMEOUT_S)
    first = members.register(worker(), 0.0).incarnation
    left = members.leave("w0", first, 1.0)
    assert left
    assert left.id == "w0"
    assert members.leave("w0", first, 1.0) is None
    members.register(worker(process="p1"), 1.0)
    assert members.leave("w0", first, 1.0) is None
    assert members.is_alive("w0")


def test_members_that_left_differ_from_members_that_died() -> None:
    members = Membership(HEARTBEAT_TIMEOUT_S)
    life = members.register(worker(), 0.0).incarnation
    members.register(Registration(Role.WORKER, "w1", "p1"), 0.0)
    members.leave("w0", life, 1.0)
    members.expire(HEARTBEAT_TIMEOUT_S + 1)
    told = {member.id: member.status(HEARTBEAT_TIMEOUT_S + 1, "") for member in members}
    assert {name: (it.alive, it.draining) for name, it in told.items()} == {"w0": (False, True), "w1": (False, False)}
    assert members.expected(HEARTBEAT_TIMEOUT_S + 1) == {}, "which only servers are"


def test_a_server_that_goes_is_expected_back_for_a_while() -> None:
    members = Membership(HEARTBEAT_TIMEOUT_S, return_s=60)
    server = members.register(Registration(Role.SERVER, "s0", "p0", "h:1"), START)
    members.register(Registration(Role.SERVER, "s1", "p1", "h:2"), START)
    assert members.expected(START) == {}
    members.start_draining(server)
    assert [member.id for member in members.not_draining] == ["s1"]
    assert (members.is_draining("s0"), members.is_draining("s1"), members.is_draining("s9")) == (True, False, False)
    assert members.expected(START + 999) == {"s0": 0.0}, "it has not gone yet"
    members.leave("s0", server.incarnation, START + 10)
    assert not members.is_draining("s0")
    assert members.expected(START + 69) == {"s0": START + 70}
    assert members.expected(START + 70) == {}
    members.register(Registration(Role.SERVER, "s0", "p2", "h:1"), START + 30)
    assert members.expected(START + 30) == {}
    assert [member.id for member in members.not_draining] == ["s0", "s1"]


def test_a_beat_renews_the_lease_and_brings_the_load() -> None:
    members = Membership(HEARTBEAT_TIMEOUT_S)
    life = members.register(Registration(Role.SERVER, "s0", "p", address="h:1"), 0.0).incarnation
    members.heartbeat("s0", life, 3, 1024, 4.0, ServerLoad(updates=5, waiting_pulls=1))
    assert members.expire(4.0 + HEARTBEAT_TIMEOUT_S) == []
    (server,) = members.alive(Role.SERVER)
    assert (server.shards, server.bytes) == (3, 1024)
    assert server.status(4.0, "").load == ServerLoad(updates=5, waiting_pulls=1)
    assert members.alive(Role.WORKER) == []


def test_the_dead_are_remembered_for_a_while_and_not_too_many() -> None:
    members = Membership(HEARTBEAT_TIMEOUT_S)
    for number in range(dead_members.MAX_DEAD + 10):
        members.register(worker(f"w{number}"), float(number) / 1000)
    assert members.expire(100.0 - HOLD_TIMEOUTS * HEARTBEAT_TIMEOUT_S) == []  # so many at once
    members.expire(100.0)
    assert len(list(members)) == dead_members.MAX_DEAD
    members.expire(100.0 + dead_members.DEAD_KEPT_S)
    assert list(members) == []


def test_a_member_that_came_back_is_not_forgotten_with_the_dead() -> None:
    members = Membership(HEARTBEAT_TIMEOUT_S)
    for number in range(dead_members.MAX_DEAD):
        name = f"w{number}"
        members.leave(name, members.register(worker(name), float(number)).incarnation, float(number))
    members.register(worker("w0", "p1"), 300.0)
    for name in ("x", "y"):
        members.leave(name, members.register(worker(name), 300.0).incarnation, 300.0)
    members.validate()
    assert members.is_alive("w0")
    assert len(members) == 1 + dead_members.MAX_DEAD
    assert members.find("w1") is None, "the first that died"


@pytest.mark.parametrize(
    "arguments",
    [
        {"role": Role.WORKER, "member": "", "process": "p"},
        {"role": Role.WORKER, "member": "W0", "process": "p"},
        {"role": Role.WORKER, "member": "w/0", "process": "p"},
        {"role": Role.WORKER, "member": "w" * 64, "process": "p"},
        {"role": Role.WORKER, "member": "w0", "process": ""},
        {"role": Role.SERVER, "member": "s0", "process": "p"},
        {"role": Role.SERVER, "member": "s0", "process": "p", "address": "h:1", "zone": "rack 4"},
        {"role": Role.SERVER, "member": "s0", "process": "p", "address": "h:1", "zone": "z" * 254},
    ],
)
def test_bad_registrations(arguments: Mapping[str, Any]) -> None:
    with pytest.raises(errors.BadRequest):
        Registration(**arguments)


@pytest.mark.parametrize("zone", ["", "rack-4", "ip-10-0-0-4.eu-west-1.compute.internal", "z" * 253])
def test_the_zone_of_a_server_is_stored(zone: str) -> None:
    member = Member(Registration(Role.SERVER, "s0", "p", "h:1", zone=zone), 1, 0.0)
    again = Member.from_proto(state_pb2.MemberRecord.FromString(member.to_proto().SerializeToString()))
    assert again.registration == member.registration
    assert again.zone == (zone or "h")
    assert again.status(0.0, "").zone == zone


def test_a_record_of_an_earlier_version_has_no_zone() -> None:
    member = Member(Registration(Role.SERVER, "s0", "p", "h:1", zone="rack-4"), 1, 0.0)
    record = member.to_proto()
    record.registration.ClearField("zone")
    assert Member.from_proto(record).registration.zone == ""
    assert Member.from_proto(record).zone == "h"


def test_too_many_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MAX_MEMBERS", 2)
    members = Membership(HEARTBEAT_TIMEOUT_S)
    members.register(worker("w0"), 0.0)
    members.register(worker("w1"), 0.0)
    with pytest.raises(errors.Overloaded):
        members.register(worker("w2"), 0.0)


class Leases(RuleBasedStateMachine):
    """A model of who is alive, beside the real one."""

    def __init__(self) -> None:
        super().__init__()
        self.members = Membership(HEARTBEAT_TIMEOUT_S)
        self.now = 0.0
        self.alive: dict[str, tuple[str, int, float]] = {}  # process, incarnation, last seen
        self.given: list[int] = []

    names, processes = st.sampled_from(["a", "b", "c"]), st.sampled_from(["p", "q"])

    @rule(name=names, process=processes)
    def register(self, name: str, process: str) -> None:
        self.pass_time(0.0)
        known = self.alive.get(name)
        if known and known[0] != process:
            with pytest.raises(errors.DuplicateMember):
                self.members.register(worker(name, process), self.now)
            return
        incarnation = self.members.register(worker(name, process), self.now).incarnation
        if known:
            assert incarnation == known[1]
        else:
            assert incarnation not in self.given
            self.given.append(incarnation)
        self.alive[name] = (process, incarnation, self.now)

    @rule(name=names)
    def beat(self, name: str) -> None:
        if name in self.alive:
            process, incarnation, _ = self.alive[name]
            self.members.heartbeat(name, incarnation, 0, 0, self.now)
            self.alive[name] = (process, incarnation, self.now)

    @rule(name=names)
    def leave(self, name: str) -> None:
        if name in self.alive:
            assert self.members.leave(name, self.alive.pop(name)[1], self.now)

    @rule(seconds=st.floats(0, 2 * HEARTBEAT_TIMEOUT_S))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        expired = {name for name, (_, _, seen) in self.alive.items() if self.now - seen > HEARTBEAT_TIMEOUT_S}
        assert {member.id for member in self.members.expire(self.now)} == expired
        for name in expired:
            del self.alive[name]

    @invariant()
    def holds(self) -> None:
        self.members.validate()
        assert {member.id for member in self.members if member.alive} == set(self.alive)


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=draws(40), stateful_step_count=30)


def test_a_holder_has_a_limited_number_of_live_members() -> None:
    members = Membership(HEARTBEAT_TIMEOUT_S, holder_members=2)

    def register(name: str, holder: str) -> Member:
        return members.register(Registration(Role.SESSION, name, f"p-{name}", holder=holder), 0.0)

    register("a", "ann")
    second = register("b", "ann")
    with pytest.raises(errors.Overloaded, match=r"2 processes of ann are members; the limit HOLDER_MEMBERS is 2"):
        register("c", "ann")
    assert register("b", "ann") is second, "a repeated call"
    for name in "defg":
        register(name, "")  # without tokens, all members have the same holder
    register("h", "bob")
    members.leave("b", second.incarnation, 0.0)
    register("c", "ann")


def test_a_registration_costs_the_same_with_a_thousand_members_of_its_holder() -> None:
    def lines(count: int) -> int:
        members = Membership(HEARTBEAT_TIMEOUT_S)
        for number in range(count):
            members.register(replace(worker(f"w{number:04}"), holder="ann"), 0.0)
        return lines_of(lambda: members.register(replace(worker("x"), holder="ann"), 0.0))

    assert lines(1_000) <= 1.5 * lines(10)
