"""Copies of lock groups: backups are made, and jobs continue with them when servers are lost."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from shoal.optim import SGD, ConstantLR
from shoal.status import JobState, Role, ServerLoad
from shoal_coordinator.job import GroupCopies
from shoal_coordinator.messages import (
    AddBackup,
    AdmitWorker,
    CheckpointPublished,
    DropBackup,
    DropCopy,
    DropShards,
    Effect,
    ProbeServer,
    Registration,
    RemoveWorker,
    SetLearningRate,
    TakeCut,
    events,
)
from support.clusters.cluster_rig import HEARTBEAT_TIMEOUT_S, KEEPING, POLICY, Rig, done_of, job, only

SERVERS = ("s0", "s1", "s2")


def running(servers: int = 3, policy: Any = KEEPING, **options: Any) -> Rig:
    """A job `a` with two groups, of which both have complete backups if there are two servers."""
    rig = Rig(policy).servers(*SERVERS[:servers]).workers("w0", "w1")
    rig.submit(job(replicas=2, **options))
    return rig.start("a", "w0", "w1")


def copies(rig: Rig, name: str = "a") -> list[GroupCopies]:
    return rig.machine.job(name).copies.groups


def of_server(rig: Rig, server: str) -> GroupCopies:
    return next(it for it in copies(rig) if it.primary.member == server)


def backup_lost(rig: Rig, server: str) -> ProbeServer:
    """Lets the backup of a server's group report that it has lost its primary. Returns the probe of that server."""
    group = of_server(rig, server)
    assert group.backup
    rig.break_replica(group.backup.member, "a", group.group)
    probe = only(rig.pending, ProbeServer)
    assert probe.server == group.primary
    return probe


def kinds(effects: Sequence[Effect]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


class TestBackups:
    def test_every_group_gets_one_on_another_server(self) -> None:
        rig = running()
        assert len(copies(rig)) == 2
        for group in copies(rig):
            assert group.backup
            assert group.backup.member != group.primary.member
        assert rig.status("a").copies == 2
        placement = rig.machine.job("a").placed
        assert [shard.backup for shard in placement.shards] == [it.backup.member for it in copies(rig) if it.backup]
        assert {shard.term for shard in placement.shards} == {1}

    def test_are_made_after_the_values_are_in_place(self) -> None:
        rig = Rig(KEEPING).servers(*SERVERS).workers("w0", "w1")
        rig.submit(job(replicas=2))
        rig.describe("a", "w0")
        assert not any(isinstance(it, AddBackup) for it in rig.machine.pending_effects)
        rig.perform(until=AddBackup)
        assert isinstance(rig.pending[0], AddBackup)
        assert rig.machine.job("a").created

    def test_are_not_made_for_a_job_with_one_copy(self) -> None:
        rig = Rig(KEEPING).servers(*SERVERS).workers("w0", "w1")
        rig.submit(job())
        rig.start("a", "w0", "w1")
        assert not any(it.second for it in copies(rig))
        assert rig.status("a").copies == 0
        assert not any(isinstance(it, AddBackup) for it in rig.performed)

    def test_prefer_another_host(self) -> None:
        rig = Rig(KEEPING).workers("w0", "w1")
        for name, address in (("s0", "hill:1"), ("s1", "hill:2"), ("s2", "lake:1")):
            register(rig, name, address)
        rig.submit(job(replicas=2, shards=1))
        rig.start("a", "w0", "w1")
        [group] = copies(rig)
        assert group.backup
        assert (group.primary.member, group.backup.member) == ("s0", "s2")

    def test_that_fail_are_tried_on_another_server_after_a_pause(self) -> None:
        rig = Rig(KEEPING).servers(*SERVERS).workers("w0", "w1")
        rig.submit(job(replicas=2, shards=1))
        rig.describe("a", "w0")
        rig.perform(until=AddBackup)
        first = only(rig.pending, AddBackup)
        rig.pending.clear()
        rig.handle(done_of(first, "server s1 is full"))
        told = only(rig.pending, DropBackup)
        assert told.term == first.term + 1
        rig.perform()
        assert not rig.pending, "it is too early"
        assert "server s1 is full" in rig.status("a").reason
        rig.pass_time(1.0)
        second = only(rig.pending, AddBackup)
        assert second.backup != first.backup
        assert second.term == first.term + 2

    def test_that_fail_everywhere_are_tried_ever_more_slowly(self) -> None:
        rig = Rig(KEEPING).servers("s0", "s1").workers("w0", "w1")
        rig.submit(job(replicas=2, shards=1))
        rig.describe("a", "w0")
        tries = 0
        rig.perform(until=AddBackup)
        for _ in range(120):
            while rig.pending:
                effect = rig.pending.pop(0)
                tries += isinstance(effect, AddBackup)
                if isinstance(effect, DropCopy):
                    rig.handle(events.EffectDone(effect=effect.number))
                    continue
                assert isinstance(effect, AddBackup | DropBackup)
                rig.handle(done_of(effect, "unequal kernels" if isinstance(effect, AddBackup) else ""))
            rig.pass_time(1.0)
        assert 5 <= tries <= 10

    @pytest.mark.parametrize(("lasts_s", "soon"), [(3.0, True), (0.1, False)])
    def test_that_lasted_are_made_again_soon_however_often_they_broke(self, lasts_s: float, soon: bool) -> None:
        rig = running()
        for _ in range(6):
            rig.pass_time(lasts_s)
            group = copies(rig)[0]
            rig.break_replica(group.primary.member, "a", group.group)
            rig.perform()
            waited = 0.0
            while rig.status("a").copies < 2:
                rig.pass_time(0.5).perform()
                waited += 0.5
        assert (waited <= 1.0) is soon, "only copies that break at once are tried ever more slowly"

    def test_wait_for_a_second_server(self) -> None:
        rig = Rig(KEEPING).servers("s0").workers("w0", "w1")
        rig.submit(job(replicas=2))
        rig.start("a", "w0", "w1")
        assert "waiting for servers: 1 of 2, for 2 copies" in rig.status("a").reason
        rig.servers("s1").start("a", "w0", "w1")
        assert rig.state("a") is JobState.RUNNING
        assert rig.status("a").copies == 2

    @pytest.mark.parametrize(("least", "begins"), [(0, False), (2, False), (1, True)])
    def test_are_complete_before_the_job_begins_and_acknowledges_updates(self, least: int, begins: bool) -> None:
        rig = Rig(KEEPING).servers("s0", "s1").workers("w0", "w1")
        rig.submit(job(replicas=2, min_replicas=least))
        for worker in ("w0", "w1"):
            rig.describe("a", worker)
        perform_all_but(rig, AddBackup)
        for worker in ("w0", "w1"):
            rig.enter("a", worker)
        perform_all_but(rig, AddBackup)
        assert rig.status("a").copies == 1
        assert (rig.state("a") is JobState.RUNNING) is begins
        failed = next(it for it in rig.pending if isinstance(it, AddBackup))
        rig.pending.remove(failed)
        rig.handle(done_of(failed, "no memory"))
        perform_all_but(rig, AddBackup)
        assert rig.status("a").reason == f"{'continues' if begins else 'waits'} with 1 of 2 copies: no memory"
        rig.pass_time(1.0).perform()
        assert rig.state("a") is JobState.RUNNING
        assert rig.status("a").copies == 2

    def test_are_made_later_if_the_job_may_begin_with_one(self) -> None:
        rig = Rig(KEEPING).servers("s0").workers("w0", "w1")
        rig.submit(job(replicas=2, min_replicas=1))
        rig.start("a", "w0", "w1")
        assert rig.state("a") is JobState.RUNNING
        assert rig.status("a").copies == 1
        assert "continues with 1 of 2 copies; takes another server" in rig.status("a").reason
        rig.servers("s1").perform()
        assert rig.status("a").copies == 2
        assert not rig.status("a").reason

    def test_share_one_server_with_a_norm_over_all_gradients(self) -> None:
        rig = running(optimizer=SGD(0.1, clip_norm=1.0), shards=1)
        assert len(copies(rig)) == 1


def perform_all_but(rig: Rig, kind: type[Effect]) -> None:
    """Performs the pending effects, and those that follow, except those of one kind, which take longer."""
    while others := [it for it in rig.pending if not isinstance(it, kind)]:
        rig.pending.remove(others[0])
        rig.pending.insert(0, others[0])
        rig.perform_first()


def register(rig: Rig, name: str, address: str) -> None:
    rig.processes += 1
    registration = Registration(Role.SERVER, name, f"p{rig.processes}", address)
    rig.lives[name] = rig.handle(events.RegistrationReceived(registration)).incarnation


class TestLostServers:
    def test_leave_their_jobs_running(self) -> None:
        rig = running()
        before, group = rig.machine.job("a").placed, of_server(rig, "s1")
        rig.kill("s1")
        assert rig.status("a").restarts == 0
        assert rig.state("a") is JobState.RUNNING
        assert rig.status("a").failovers == 1
        after = rig.machine.job("a").placed
        assert after.generation == before.generation
        heir = next(it for it in copies(rig) if it.group == group.group)
        assert group.backup == heir.primary
        assert heir.term == group.term + 1
        assert {it.server for it in after.shards if it.group == group.group} == {heir.primary.member}
        assert any("is lost; " in reason and "with its shards" in reason for _, reason in rig.history("a"))

    def test_are_replaced_before_anything_else_is_told(self) -> None:
        rig = running()
        rig.kill("s1")
        assert kinds(rig.pending)[0] == "Promote"
        rig.perform()
        assert rig.status("a").copies == 2, "the third server has the missing copies"

    def test_leave_one_copy_on_the_last_server(self) -> None:
        rig = running(2)
        rig.kill("s1")
        rig.perform()
        assert rig.status("a").copies == 1
        rig.servers("s1").perform()
        assert rig.status("a").copies == 2
        assert rig.status("a").restarts == 0
        rig.kill("s0")
        assert rig.status("a").failovers == 2
        assert {it.primary.member for it in copies(rig)} == {"s1"}

    def test_that_have_both_copies_send_the_job_back(self) -> None:
        rig = running(2)
        rig.kill("s0", "s1")
        assert rig.status("a").restarts == 1
        assert not copies(rig)

    def test_send_the_job_back_before_the_backup_is_complete(self) -> None:
        rig = Rig(KEEPING).servers(*SERVERS).workers("w0", "w1")
        rig.submit(job(replicas=2, shards=1))
        rig.describe("a", "w0")
        rig.perform(until=AddBackup)
        rig.kill("s0")
        assert rig.status("a").restarts == 1

    def test_fail_a_job_without_checkpoints_only_when_all_copies_are_gone(self) -> None:
        rig = running(2, POLICY)
        rig.kill("s0")
        assert rig.state("a") is JobState.RUNNING
        rig.perform()
        rig.kill("s1")
        assert rig.state("a") is JobState.FAILED

    def test_with_a_backup_make_the_primary_continue_alone(self) -> None:
        rig = running(shards=1)
        [group] = copies(rig)
        assert group.backup
        rig.kill(group.backup.member)
        assert isinstance(rig.pending[0], DropBackup)
        assert rig.pending[0].term == group.term + 1
        assert rig.status("a").failovers == 0
        rig.perform()
        [again] = copies(rig)
        assert again.backup not in (None, group.backup)

    def test_keep_the_variables_of_an_ended_job(self) -> None:
        rig = running(2)
        rig.handle(events.JobCancelled("a"))
        rig.kill("s0")
        rig.perform()
        assert {shard.server for shard in rig.machine.job("a").placed.shards} == {"s1"}


class TestPendingEffects:
    def test_go_to_the_new_primary_after_its_promotion(self) -> None:
        rig = running()
        rig.leave("w0")
        rig.handle(events.LearningRateRequested("a", ConstantLR(0.5)))
        removal, rate = rig.pending
        assert isinstance(removal, RemoveWorker)
        rig.handle(events.WorkerFenced(removal.number, 7))
        rig.kill("s1")
        meant = rig.machine.job("a").servers
        told = [it for it in rig.machine.pending_effects if not isinstance(it, AddBackup)]
        assert kinds(told)[0] == "Promote"
        again = [it for it in told if isinstance(it, RemoveWorker | SetLearningRate)]
        assert [it.servers for it in again] == [meant, meant]
        assert {it.number for it in again}.isdisjoint({removal.number, rate.number})
        assert isinstance(again[0], RemoveWorker)
        assert again[0].committed_steps == 7

    def test_admit_a_worker_again(self) -> None:
        rig = running(max_workers=3).workers("w2")
        rig.describe("a", "w2")
        rig.enter("a", "w2")
        admission = only(rig.pending, AdmitWorker)
        rig.kill("s1")
        [again] = [it for it in rig.machine.pending_effects if isinstance(it, AdmitWorker)]
        assert "s1" not in {it.member for it in again.servers}
        rig.handle(events.WorkerAdmitted(admission.job, admission.assignment, 3, effect=admission.number))
        assert again in rig.machine.pending_effects, "the outcome of the earlier effect counts for nothing"

    def test_refuse_the_fences_of_an_effect_that_was_replaced(self) -> None:
        rig = running()
        rig.leave("w0")
        removal = only(rig.pending, RemoveWorker)
        rig.kill("s1")
        with pytest.raises(Exception, match="was dropped"):
            rig.handle(events.WorkerFenced(removal.number, 7))

    def test_save_the_job_again_after_a_cut_that_failed(self) -> None:
        rig = running()
        rig.handle(events.CheckpointRequested("a"))
        rig.perform(until=TakeCut)
        rig.kill("s1")
        assert not any(isinstance(it, TakeCut) for it in rig.machine.pending_effects)
        assert "was lost during the checkpoint" in rig.status("a").checkpoint_failure
        rig.perform()
        rig.pass_time(1.0).perform()
        assert rig.checkpoint("a").number
        assert not any(isinstance(it, CheckpointPublished) for it in rig.performed)

    def test_lose_workers_at_the_same_time_as_a_server_that_is_saving(self) -> None:
        rig = running().workers("w2")
        rig.handle(events.CheckpointRequested("a"))
        rig.perform(until=TakeCut)
        rig.kill("s1", "w0", "w2")  # the server is handled first, and the scheduler must not see w0 and w2 then
        rig.machine.validate()
        assert "was lost during the checkpoint" in rig.status("a").checkpoint_failure
        assert rig.status("a").workers == ("w1",)

    def test_drop_every_copy(self) -> None:
        rig = running()
        rig.handle(events.JobCancelled("a"))
        rig.perform()
        rig.handle(events.JobDropped("a"))
        dropped = only(rig.pending, DropShards)
        assert {it.member for it in dropped.servers} >= {"s0", "s1"}
        holders = {it.member for effect in rig.performed if isinstance(effect, AddBackup) for it in (effect.backup,)}
        assert holders <= {it.member for it in dropped.servers}

    def test_are_repeated_by_the_next_coordinator(self) -> None:
        rig = running()
        rig.kill("s1")
        before, placement = copies(rig), rig.machine.job("a").placed
        rig.crash()
        assert copies(rig) == before
        assert rig.machine.job("a").placed == placement
        assert rig.status("a").failovers == 1
        rig.perform()
        assert rig.status("a").copies == 2


class TestReports:
    def test_of_a_primary_end_its_backup_at_once(self) -> None:
        rig = running()
        group = copies(rig)[0]
        rig.break_replica(group.primary.member, "a", group.group)
        told = only(rig.pending, DropBackup)
        assert (told.term, told.server) == (group.term + 1, group.primary)
        rig.break_replica(group.primary.member, "a", group.group, term=group.term)
        assert rig.pending == [told], "a repeated report changes nothing"
        rig.perform()
        rig.pass_time(1.0).perform()
        assert rig.status("a").copies == 2

    def test_of_a_backup_ask_the_primary(self) -> None:
        rig = running()
        probe = backup_lost(rig, "s1")
        assert backup_lost(rig, "s1") == probe, "a repeated report changes nothing"
        rig.now += 1.0
        rig.pending.clear()
        rig.handle(done_of(probe, "it does not answer"))
        assert rig.status("a").failovers == 1
        assert not rig.machine.members.is_alive("s1")
        assert "s1" in rig.handle(events.TimePassed())

    def test_of_a_backup_whose_primary_answers_end_the_backup(self) -> None:
        rig = running()
        probe = backup_lost(rig, "s1")
        rig.pending.clear()
        rig.handle(done_of(probe))
        told = only(rig.pending, DropBackup)
        assert told.server == probe.server
        assert rig.status("a").failovers == 0

    def test_of_silence_are_refuted_by_a_heartbeat(self) -> None:
        rig = running()
        probe = backup_lost(rig, "s1")
        rig.pending.clear()
        rig.now += 0.5
        rig.beat("s1")
        rig.handle(done_of(probe, "it does not answer"))
        assert rig.machine.members.is_alive("s1")

    def test_end_one_server_within_a_heartbeat_timeout(self) -> None:
        rig = running()
        for server, lost in (("s1", True), ("s0", False)):
            rig.perform()
            probe = backup_lost(rig, server)
            rig.pending.clear()
            rig.handle(done_of(probe, "it does not answer"))
            assert rig.machine.members.is_alive(server) is not lost
        rig.pass_time(HEARTBEAT_TIMEOUT_S + 1.5, "s0")
        assert not rig.machine.members.is_alive("s0")

    def test_of_workers_that_found_their_shards_gone_ask_the_servers(self) -> None:
        rig = running()
        rig.finish("a", "w0", "UNKNOWN_JOB: there is no job a", shards_lost=True)
        asked = [it.server.member for it in rig.pending if isinstance(it, ProbeServer)]
        assert asked == [it.member for it in rig.machine.job("a").servers]
        assert rig.status("a").restarts == 0
        restarted = next(it for it in rig.pending if isinstance(it, ProbeServer) and it.server.member == "s1")
        rig.pending.remove(restarted)
        rig.handle(done_of(restarted, "there is no job a"))
        rig.perform()
        assert rig.status("a").failovers == 1
        assert rig.status("a").restarts == 0

    def test_of_another_generation_or_server_count_for_nothing(self) -> None:
        rig = running()
        group = copies(rig)[0]
        third = ({"s0", "s1", "s2"} - {it.member for it in (group.primary, group.backup) if it}).pop()
        rig.break_replica(third, "a", group.group)
        rig.handle(events.HeartbeatReceived("s0", rig.lives["s0"], load=ServerLoad()))
        assert not rig.pending


class TestStaleCopies:
    def test_are_freed_when_the_primary_knows_that_it_has_no_backup(self) -> None:
        rig = running()
        group = copies(rig)[0]
        rig.break_replica(group.primary.member, "a", group.group)
        told = only(rig.pending, DropBackup)
        rig.crash()
        rig.pending.clear()
        rig.handle(done_of(told))
        [freed] = [it for it in rig.pending if isinstance(it, DropCopy)]
        assert (freed.server, freed.group, freed.term) == (group.backup, group.group, group.term + 1)
        rig.crash()
        assert freed in rig.pending, "it is repeated like all effects"

    def test_of_lost_servers_are_not_freed(self) -> None:
        rig = running(shards=1)
        [group] = copies(rig)
        assert group.backup
        rig.kill(group.backup.member)
        assert not any(isinstance(it, DropCopy) for it in rig.perform())

    def test_that_are_reported_are_freed(self) -> None:
        """A backup may be made on a server after it was told to free that of the same decision."""
        rig = running()
        group = copies(rig)[0]
        third = ({"s0", "s1", "s2"} - {it.member for it in (group.primary, group.backup) if it}).pop()
        rig.break_replica(third, "a", group.group)
        assert not rig.pending, "this term is the present one"
        rig.break_replica(third, "a", group.group, term=0)
        rig.break_replica(third, "a", group.group, term=0)
        freed = only(rig.pending, DropCopy)
        assert (freed.server.member, freed.term) == (third, group.term)

    def test_go_with_the_shards(self) -> None:
        rig = running()
        group = copies(rig)[0]
        rig.break_replica(group.primary.member, "a", group.group)
        rig.perform(until=DropCopy)
        rig.handle(events.JobCancelled("a"))
        rig.handle(events.JobDropped("a"))
        assert not any(isinstance(it, DropCopy) for it in rig.machine.pending_effects)


def test_states_refuse_two_copies_on_a_server() -> None:
    rig = running()
    group = copies(rig)[0]
    with pytest.raises(AssertionError, match="two copies"):
        replace(group, backup=group.primary).validate()
