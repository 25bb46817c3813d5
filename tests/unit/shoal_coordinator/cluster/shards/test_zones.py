"""Zones of servers: a backup is in another zone than its primary if possible, and moves there later if not at first."""

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from shoal.status import JobState, Role
from shoal.variables import Variable
from shoal_coordinator.cluster import Member
from shoal_coordinator.cluster.shards.rebalance import Move
from shoal_coordinator.cluster.shards.rebalancer import PAUSE_S, SETTLED_S
from shoal_coordinator.cluster.shards.zones import barred_servers, move_apart, server_for_backup
from shoal_coordinator.job import GroupCopies
from shoal_coordinator.messages import AddBackup, Registration, events
from support.clusters.cluster_rig import KEEPING, Rig, done_of, job, only

POLICY = replace(KEEPING, smallest_move_bytes=1)


def server(name: str, address: str, zone: str = "") -> Member:
    return Member(Registration(Role.SERVER, name, f"p-{name}", address, zone=zone), 1, 0.0)


class TestServerForBackup:
    SERVERS = (server("s1", "h:1", "hill"), server("s2", "h:2", "lake"), server("s3", "h:3", "lake"))

    def choose(self, zone: str = "hill", /, **options: Any) -> str | None:
        found = server_for_backup(self.SERVERS, zone, {"s1": 0, "s2": 5, "s3": 9}, **options)
        return found.id if found else None

    def test_it_is_in_another_zone_although_the_hosts_are_equal(self) -> None:
        assert self.choose("hill") == "s2"
        assert self.choose("lake") == "s1"

    def test_without_a_zone_it_is_that_with_the_fewest_bytes(self) -> None:
        assert self.choose("") == "s1"

    def test_it_is_in_the_same_zone_if_there_is_no_other_one(self) -> None:
        here = [server("s2", "h:2", "lake"), server("s3", "h:3", "lake")]
        found = server_for_backup(here, "lake", {})
        assert found is here[0]
        assert server_for_backup([], "lake", {}) is None

    def test_an_empty_zone_is_the_host(self) -> None:
        there = [server("s1", "hill:2"), server("s2", "lake:1")]
        found = server_for_backup(there, server("s0", "hill:1").zone, {})
        assert found is there[1]
        assert server("s0", "[fd00::5]:7070").zone == "[fd00::5]"
        assert server("s0", "hill:1", "lake").zone == "lake"

    def test_a_zone_and_a_host_of_one_name_are_one_zone(self) -> None:
        there = [server("s1", "lake:2"), server("s2", "meadow:1")]
        found = server_for_backup(there, server("s0", "hill:1", "lake").zone, {})
        assert found is there[1]

    def test_a_copy_waits_for_busy_servers_of_other_zones(self) -> None:
        assert self.choose(busy={"s2"}) == "s3"
        assert self.choose(busy={"s2", "s3"}) is None

    @pytest.mark.parametrize("why", ["failed", "late"])
    def test_a_copy_does_not_wait_for_servers_that_may_not_take_it(self, why: str) -> None:
        assert self.choose(busy={"s2", "s3"}, **{why: {"s2", "s3"}}) == "s1"
        assert self.choose(busy={"s2", "s3"}, **{why: {"s2"}}) is None

    def test_a_server_on_which_a_copy_has_failed_is_the_last_choice(self) -> None:
        assert self.choose(failed={"s2", "s3"}) == "s1"
        assert self.choose(failed={"s1", "s2", "s3"}) == "s2"


ZONES = {"a0": "a", "a1": "a", "a2": "a", "b0": "b", "b1": "b"}


class TestMoveApart:
    SERVERS = MappingProxyType(dict(zip(ZONES, (0, 1, 2, 9, 8), strict=True)))

    def test_a_backup_in_the_zone_of_its_primary_moves_to_the_emptiest_server_of_another_one(self) -> None:
        pairs = {3: ("a0", "b0"), 7: ("a0", "a1"), 9: ("b0", "b1")}
        assert move_apart(pairs, self.SERVERS, ZONES) == Move(7, "b1")
        assert move_apart({9: ("b0", "b1")}, self.SERVERS, ZONES) == Move(9, "a0")

    def test_a_backup_in_another_zone_stays(self) -> None:
        assert move_apart({3: ("a0", "b0"), 4: ("b0", "a0")}, self.SERVERS, ZONES) is None

    def test_a_backup_stays_if_no_server_of_another_zone_can_take_it(self) -> None:
        assert move_apart({7: ("a0", "a1")}, {"a0": 0, "a1": 0, "a2": 0}, ZONES) is None


def test_backups_that_are_apart_are_barred_from_the_zone_of_their_primary() -> None:
    barred = barred_servers({3: ("a0", "b0"), 7: ("a0", "a1"), 9: ("b0", "a1")}, ZONES)
    assert barred == {3: {"a0", "a1", "a2"}, 7: {"a0"}, 9: {"b0", "b1"}}


def join(rig: Rig, **zones: str) -> Rig:
    """Lets servers of one host register, with their zones."""
    for name, zone in zones.items():
        rig.processes += 1
        registration = Registration(Role.SERVER, name, f"p{rig.processes}", f"h:{rig.processes}", zone=zone)
        rig.lives[name] = rig.handle(events.RegistrationReceived(registration)).incarnation
    return rig


def running(rig: Rig, shards: int = 12) -> Rig:
    rig.workers("w0", "w1").submit(job(replicas=2, shards=shards))
    variables = {f"v{number}": Variable((8, 4)) for number in range(shards)}
    return rig.start("a", "w0", "w1", variables=variables).pass_time(SETTLED_S)


def groups(rig: Rig) -> list[GroupCopies]:
    return rig.machine.job("a").copies.groups


def are_apart(rig: Rig) -> bool:
    zones = {it.id: it.zone for it in rig.machine.members.alive(Role.SERVER)}
    return all(it.backup and zones[it.primary.member] != zones[it.backup.member] for it in groups(rig))


def move_all(rig: Rig, idle_s: float = SETTLED_S + 1) -> None:
    """Performs all effects until nothing moves any more."""
    begun, idle = len(rig.performed), 0
    while idle <= idle_s:
        if rig.pending:
            rig.perform_first()
            idle = 0
        else:
            rig.pass_time(1)
            idle += 1
        assert len(rig.performed) < begun + 200, "the moves come to no end"
    status = rig.status("a")
    assert (status.state, status.restarts, status.copies) == (JobState.RUNNING, 0, 2)


def test_all_backups_are_in_the_other_zone_although_that_has_one_server() -> None:
    rig = running(join(Rig(POLICY), s0="a", s1="a", s2="b", s3="a"))
    assert are_apart(rig)
    move_all(rig)
    assert are_apart(rig), "even shares are no reason for copies in one zone"


def test_backups_move_to_a_zone_that_joins() -> None:
    rig = running(join(Rig(POLICY), s0="a", s1="a"))
    assert not are_apart(rig)
    move_all(join(rig, s2="b"))
    assert are_apart(rig)
    move_all(join(rig, s3="b", s4="a"))
    assert are_apart(rig)


@pytest.mark.parametrize("lost", ["s0", "s2"])
def test_copies_are_apart_after_a_server_was_lost_and_another_one_came(lost: str) -> None:
    rig = running(join(Rig(POLICY), s0="a", s1="a", s2="b"))
    rig.kill(lost)
    move_all(rig)
    assert are_apart(rig) == (lost == "s0")
    move_all(join(rig, **{lost: "a" if lost == "s0" else "b"}))
    assert are_apart(rig)


def test_the_next_backup_is_apart_from_the_server_that_becomes_the_primary() -> None:
    """Server s0 drains. Its groups are handed over to s2, so the new backups are in zone a, where s0 was."""
    rig = running(join(Rig(POLICY), s0="a", s1="a", s2="b", s3="b"))
    rig.handle(events.DrainRequested("s0", rig.lives["s0"], left_s=60.0))
    for _ in range(100):
        added = [it for it in rig.pending if isinstance(it, AddBackup) and it.as_backup]
        assert {it.backup.member for it in added if it.server.member in ("s2", "s3")} <= {"s1"}
        if rig.pending:
            rig.perform_first()
        else:
            rig.pass_time(0.1)
    assert not any(it.has_copy_on("s0") for it in groups(rig))
    assert are_apart(rig)


def next_copy(rig: Rig, within_s: float) -> str:
    """Performs all effects until a copy is to be made. Returns the server that gets it."""
    until = rig.now + within_s
    while not (rig.pending and isinstance(rig.pending[0], AddBackup)):
        if rig.pending:
            rig.perform_first()
        else:
            assert rig.now < until, "no copy is made"
            rig.pass_time(0.5)
    return only(rig.pending, AddBackup).backup.member


def fail_copy(rig: Rig) -> None:
    rig.handle(done_of(rig.pending.pop(0), "it has no memory"))


def test_a_backup_that_failed_in_the_other_zone_is_made_in_this_one_and_moves_later() -> None:
    rig = running(join(Rig(POLICY), s0="a", s1="a", s2="b"), shards=1)
    [group] = groups(rig)
    assert (group.primary.member, group.backup and group.backup.member) == ("s0", "s2")
    rig.break_replica("s0", "a", group.group)
    assert next_copy(rig, 2.0) == "s1"
    rig.perform_first()
    assert rig.status("a").copies == 2
    for pause_s in (2.0, PAUSE_S + 2):
        assert next_copy(rig, pause_s) == "s2", "no server has come or gone"
        fail_copy(rig)
        assert rig.status("a").copies == 2
    move_all(rig, 2 * PAUSE_S + 5)
    assert are_apart(rig)


def test_the_zone_of_a_server_survives_a_restart_of_the_coordinator() -> None:
    rig = running(join(Rig(POLICY), s0="a", s1="a")).crash()
    zones = {it.member: it.zone for it in rig.machine.status(rig.now).members if it.role is Role.SERVER}
    assert zones == {"s0": "a", "s1": "a"}
    move_all(join(rig, s2="b"))
    assert are_apart(rig)
