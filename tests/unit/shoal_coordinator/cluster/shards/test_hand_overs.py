"""Hand-overs: jobs with replicas move off draining servers while they train."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.status import JobState, MemberStatus, Role
from shoal.variables import Variable
from shoal_coordinator.cluster.shards.copy_keeper import COPIES_AT_A_TIME
from shoal_coordinator.cluster.shards.draining import HAND_OVERS_AT_A_TIME
from shoal_coordinator.job import GroupCopies
from shoal_coordinator.messages import (
    AddBackup,
    AdmitWorker,
    CommitCheckpoint,
    DropBackup,
    DropCopy,
    Promote,
    ScanCheckpoints,
    TakeCut,
    events,
)
from support.clusters.cluster_rig import KEEPING, POLICY, Rig, done_of, job, only, session

SERVERS = ("s0", "s1", "s2")
VARIABLES = {name: Variable((8, 4)) for name in "uvw"}


def running(servers: int = 3, policy: Any = KEEPING, **options: Any) -> Rig:
    """A job `a` with one group on each server, and complete backups."""
    rig = Rig(policy).servers(*SERVERS[:servers]).workers("w0", "w1")
    rig.submit(job(replicas=2, **{"shards": servers, **options}))
    return rig.start("a", "w0", "w1", variables=VARIABLES)


def copies(rig: Rig, name: str = "a") -> list[GroupCopies]:
    return rig.machine.job(name).copies.groups


def on(rig: Rig, server: str) -> list[GroupCopies]:
    """Returns the groups that have a copy on a server."""
    return [it for it in copies(rig) if it.has_copy_on(server)]


def served_by(rig: Rig, server: str) -> list[GroupCopies]:
    return [it for it in copies(rig) if it.primary.member == server]


def seen(rig: Rig, server: str) -> MemberStatus:
    return next(it for it in rig.machine.status(rig.now).members if it.member == server)


class TestAJobMoves:
    def test_without_a_restart_and_then_the_server_may_leave(self) -> None:
        rig = running()
        assert rig.drain("s1") == ("a",)
        rig.perform()
        assert rig.drain("s1") == ()
        assert not on(rig, "s1")
        before = copies(rig)
        rig.leave("s1")
        assert copies(rig) == before, "nothing depends on it any more"
        status = rig.status("a")
        assert (status.state, status.restarts, status.failovers, status.copies) == (JobState.RUNNING, 0, 0, 2)
        assert status.checkpoint is None
        assert any("s1 is about to leave; its shards have moved" in reason for _, reason in rig.history("a"))

    def test_of_a_cluster_without_checkpoint_storage(self) -> None:
        rig = running(policy=POLICY)
        assert rig.drain("s1") == ("a",)
        rig.perform()
        assert rig.drain("s1") == ()
        rig.leave("s1")
        assert rig.state("a") is JobState.RUNNING

    def test_of_a_session(self) -> None:
        rig = Rig(KEEPING).servers(*SERVERS).join(Role.SESSION, "x")
        rig.submit(session(replicas=2))
        rig.start("s", "x")
        assert rig.drain("s1") == ("s",)
        rig.perform()
        assert rig.drain("s1") == ()
        rig.leave("s1")
        assert rig.state("s") is JobState.RUNNING

    def test_and_the_former_primary_frees_its_copy_after_the_new_one_knows(self) -> None:
        rig = running()
        [group] = served_by(rig, "s1")
        rig.drain("s1")
        rig.perform(until=Promote)
        promotion = next(it for it in rig.pending if isinstance(it, Promote))
        assert (promotion.server, promotion.term) == (group.backup, group.term + 2)
        assert not any(isinstance(it, DropCopy) for it in rig.pending)
        rig.crash()
        rig.pending.remove(promotion)
        rig.handle(done_of(promotion))
        freed = [it for it in rig.pending if isinstance(it, DropCopy)]
        assert [(it.server, it.group, it.term) for it in freed] == [(group.primary, group.group, group.term + 2)]

    def test_after_a_copy_is_made_if_there_is_none(self) -> None:
        rig = running(2)
        rig.kill("s0")
        rig.perform()
        rig.servers("s0")
        assert rig.drain("s1") == ("a",)
        assert not any(isinstance(it, ScanCheckpoints | Promote) for it in rig.pending)
        rig.perform()
        assert rig.drain("s1") == ()
        assert {it.primary.member for it in copies(rig)} == {"s0"}
        assert rig.status("a").restarts == 0

    def test_after_a_copy_is_made_elsewhere_if_the_backup_is_on_a_draining_server(self) -> None:
        rig = running(shards=1)
        [group] = copies(rig)
        assert group.backup
        rig.drain(group.backup.member)
        assert rig.drain(group.primary.member) == ("a",)
        rig.perform()
        [after] = copies(rig)
        assert after.primary.member == ({*SERVERS} - {group.primary.member, group.backup.member}).pop()
        assert rig.drain(group.primary.member) == rig.drain(group.backup.member) == ()
        rig.leave(group.primary.member)
        rig.leave(group.backup.member)
        assert rig.status("a").restarts == 0

    def test_from_a_draining_server_that_took_over_a_lost_one(self) -> None:
        rig = running(shards=1)
        [group] = copies(rig)
        assert group.backup
        rig.drain(group.backup.member)
        rig.pending.clear()
        rig.crash()
        rig.kill(group.primary.member) if copies(rig)[0].backup else rig.perform()
        rig.perform()
        assert rig.drain(group.backup.member) == ()
        assert rig.status("a").restarts == 0

    def test_with_its_pending_effects(self) -> None:
        rig = running(2, max_workers=3).workers("w2")
        rig.describe("a", "w2", VARIABLES)
        rig.enter("a", "w2")
        rig.drain("s1")
        told = [it for it in rig.machine.pending_effects if isinstance(it, AdmitWorker | Promote)]
        assert isinstance(told[0], Promote)
        assert isinstance(told[-1], AdmitWorker)
        assert "s1" not in {it.member for it in told[-1].servers}

    def test_not_while_a_checkpoint_is_taken(self) -> None:
        rig = running()
        rig.handle(events.CheckpointRequested("a"))
        rig.perform(until=TakeCut)
        assert rig.drain("s1") == ("a",)
        assert not any(isinstance(it, Promote) for it in rig.pending)
        rig.perform()
        assert rig.drain("s1") == ()
        assert rig.checkpoint("a").number == 1
        assert not rig.status("a").checkpoint_failure


class TestAServerThatHandedOverStays:
    """The next primary, or its backup, is lost before the next primary knows that it is the primary."""

    def handed_over(self) -> tuple[Rig, GroupCopies]:
        """Returns a job whose group on s1 was handed over, with two complete copies elsewhere. Nobody knows it yet."""
        rig = running().servers("s3")
        rig.drain("s1")
        rig.perform(until=Promote)
        promotion = only([rig.pending.pop(0)], Promote)
        rig.perform()
        [group] = on(rig, "s1")
        assert (group.group, group.primary, group.backup is None) == (promotion.group, promotion.server, False)
        return rig, group

    @pytest.mark.parametrize("lost", ["primary", "backup"])
    def test_until_the_decision_after_the_loss_is_known(self, lost: str) -> None:
        rig, group = self.handed_over()
        rig.kill(getattr(group, lost).member)
        [after] = [it for it in copies(rig) if it.group == group.group]
        assert after.primary == (group.backup if lost == "primary" else group.primary)
        assert not after.told
        assert rig.drain("s1") == ("a",), "it may leave, although its callers have no other primary yet"
        rig.crash()
        assert rig.drain("s1") == ("a",), "a coordinator that restarts has forgotten the former primary"
        rig.perform()
        freed = {it.server.member for it in rig.performed if isinstance(it, DropCopy) and it.group == group.group}
        assert "s1" in freed
        assert rig.drain("s1") == ()
        assert (rig.state("a"), rig.status("a").restarts) == (JobState.RUNNING, 0)


class TestManyGroups:
    def test_move_a_few_at_a_time(self) -> None:
        users = [f"x{index}" for index in range(9)]
        rig = Rig(KEEPING).servers(*SERVERS).join(Role.SESSION, *users)
        for user in users:
            rig.submit(session(f"of-{user}", replicas=2, shards=1))
            rig.start(f"of-{user}", user)
        groups = [it for user in users for it in copies(rig, f"of-{user}")]
        assert sum(it.primary.member == "s1" for it in groups) > HAND_OVERS_AT_A_TIME
        assert sum(it.has_copy_on("s1") for it in groups) > 5
        while rig.drain("s1"):
            told = rig.machine.pending_effects
            assert sum(isinstance(it, Promote) for it in told) <= HAND_OVERS_AT_A_TIME
            for server in ("s0", "s2"):
                dropped = [it for it in told if isinstance(it, DropBackup) and it.server.member == server]
                assert len(dropped) <= COPIES_AT_A_TIME
            effect = rig.pending.pop(0)
            later, rig.pending = rig.pending, [effect]
            rig.perform(until=())
            rig.pending += later
        rig.perform()
        rig.leave("s1")
        for user in users:
            status = rig.status(f"of-{user}")
            assert (status.state, status.copies, status.failovers) == (JobState.RUNNING, 2, 0)

    def test_keep_two_copies_though_the_only_other_server_is_replaced(self) -> None:
        users = [f"x{index}" for index in range(9)]
        rig = Rig(KEEPING).servers(*SERVERS).join(Role.SESSION, *users)
        for user in users:
            rig.submit(session(f"of-{user}", replicas=2, shards=1))
            rig.start(f"of-{user}", user)
        rig.drain("s1")

        def kept() -> dict[str, GroupCopies]:
            found = {user: it for user in users for it in copies(rig, f"of-{user}")}
            return {user: it for user, it in found.items() if it.primary.member == "s1" and it.backup}

        waiting = [user for user, it in kept().items() if not it.growing]
        assert waiting, "all copies are made at the same time"
        rig.replace("s0")
        assert {*waiting} <= {*kept()}, "s1 has handed over to the last complete copy"
        while rig.drain("s1"):
            rig.perform()
            rig.pass_time(1)
        assert {rig.status(f"of-{user}").copies for user in users} == {2}


class TestAJobIsSaved:
    def test_if_no_server_can_take_its_shards(self) -> None:
        rig = running(1, min_replicas=1)
        assert rig.drain("s0") == ("a",)
        assert isinstance(rig.pending[0], ScanCheckpoints)
        rig.perform(step=7)
        assert rig.drain("s0") == ()
        assert rig.status("a").restarts == 1

    def test_if_all_servers_leave(self) -> None:
        rig = running(2)
        rig.drain("s0")
        rig.perform(until=AddBackup)
        rig.drain("s1")
        rig.perform(step=7)
        assert rig.drain("s0") == rig.drain("s1") == ()
        assert rig.status("a").restarts == 1
        assert rig.checkpoint("a").step == 7

    def test_if_the_only_other_server_is_full(self) -> None:
        rig = running(2)
        rig.kill("s0")
        rig.perform()
        rig.servers("s0")
        rig.drain("s1")
        while copy := next((it for it in rig.pending if isinstance(it, AddBackup)), None):
            rig.pending.remove(copy)
            rig.handle(done_of(copy, "server s0 is full"))
            rig.perform(until=(AddBackup, ScanCheckpoints))
        assert any(isinstance(it, ScanCheckpoints) for it in rig.pending)
        rig.perform(step=7)
        assert rig.drain("s1") == ()
        assert rig.status("a").restarts == 1

    def test_but_not_after_the_last_hand_over_has_begun(self) -> None:
        rig = running(2)
        assert rig.drain("s1", left_s=20.0) == ("a",)
        rig.servers("s2").perform(until=Promote)
        assert not served_by(rig, "s1")
        rig.pass_time(11)
        assert on(rig, "s1"), "its servers do not know the decision yet"
        assert rig.drain("s1", left_s=9.0) == ("a",)
        rig.perform()
        assert rig.drain("s1", left_s=8.0) == ()
        assert not on(rig, "s1")
        assert rig.status("a").restarts == 0

    def test_if_it_has_not_moved_in_half_of_the_time(self) -> None:
        rig = running(2)
        rig.kill("s0")
        rig.perform()
        rig.servers("s0")
        assert rig.drain("s1", left_s=60.0) == ("a",)
        copy = next(it for it in rig.pending if isinstance(it, AddBackup))
        rig.pending.clear()
        rig.pass_time(25)
        assert rig.drain("s1", left_s=35.0) == ("a",)
        assert not rig.pending, "the copy is still being made"
        rig.pass_time(10)
        assert copy in rig.machine.pending_effects
        assert rig.drain("s1", left_s=25.0) == ("a",)
        assert any(isinstance(it, ScanCheckpoints) for it in rig.pending)
        rig.perform(step=7)
        assert rig.drain("s1") == ()
        assert rig.status("a").restarts == 1

    def test_over_the_coordinators_death_after_the_cut(self) -> None:
        """The next coordinator believes that the job can move, but commits are held."""
        rig = running(1, min_replicas=1)
        rig.drain("s0")
        rig.perform(until=CommitCheckpoint)
        rig.crash()
        rig.perform()
        assert rig.drain("s0") == ()
        assert rig.status("a").restarts == 1


class TestUsers:
    def test_see_how_many_groups_are_left(self) -> None:
        rig = running()
        assert seen(rig, "s1").moving_groups == 0
        rig.drain("s1")
        rig.pass_time(1.0)
        assert seen(rig, "s1").moving_groups == len(on(rig, "s1")) > 0
        rig.perform()
        assert seen(rig, "s1").moving_groups == 0

    def test_see_in_the_job_that_it_moves(self) -> None:
        rig = running()
        rig.handle(events.CheckpointRequested("a"))
        rig.drain("s1")
        assert "moves off server s1, which is about to leave: 1 lock group left" in rig.status("a").reason
        rig.perform()
        assert "about to leave" not in rig.status("a").reason


@given(st.data())
def test_servers_that_leave_and_return_one_by_one_cost_nothing(data: st.DataObject) -> None:
    """Effects are done in any order, and the coordinator may restart between any two."""
    rig = running()
    for server in data.draw(st.permutations(SERVERS)):
        while rig.drain(server):
            assert rig.pending, "the server waits for nothing"
            if data.draw(st.booleans(), label="crash"):
                rig.crash()
            effect = rig.pending.pop(data.draw(st.integers(0, len(rig.pending) - 1), label="next"))
            later, rig.pending = rig.pending, [effect]
            rig.perform(until=())
            rig.pending += later
            assert rig.status("a").copies == 2
        rig.leave(server)
        rig.servers(server).perform()
        assert rig.status("a").copies == 2
    status = rig.status("a")
    assert (status.restarts, status.failovers, status.state) == (0, 0, JobState.RUNNING)


@pytest.mark.parametrize("kind", [DropBackup, Promote, DropCopy, AddBackup])
def test_a_coordinator_that_restarts_goes_on(kind: Any) -> None:
    rig = running()
    rig.drain("s1")
    rig.perform(until=kind)
    rig.crash().perform()
    assert rig.drain("s1") == ()
    assert rig.status("a").copies == 2
