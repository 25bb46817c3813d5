"""Draining servers, with a fake clock: the last checkpoints of their jobs, the waits, and the deadlines."""

from typing import Any

import pytest

from shoal import errors
from shoal._wire import Lease
from shoal.events import CheckpointEnded
from shoal.status import JobState, Role
from shoal_coordinator.job.recovery import MAX_FAILED_RESTARTS
from shoal_coordinator.messages import CommitCheckpoint, CreateShards, DropShards, ScanCheckpoints, TakeCut, events
from support.clusters.cluster_rig import FIXED, KEEPING, Rig, job, session


@pytest.fixture
def rig() -> Rig:
    return Rig(KEEPING).servers("s0", "s1").workers("w0", "w1")


@pytest.fixture
def running(rig: Rig) -> Rig:
    rig.submit(job(epochs=2, **FIXED))
    rig.start("a", "w0", "w1")
    assert rig.state("a") is JobState.RUNNING
    return rig


def perform(rig: Rig, kind: Any, **options: Any) -> Any:
    """Performs what is decided up to the first effect of a kind, which is given."""
    rig.perform(until=kind, **options)
    return rig.pending[0]


def fail(rig: Rig, reason: str = "the disk is full") -> None:
    effect = rig.pending.pop(0)
    rig.handle(events.CheckpointFailed(effect.job, reason, effect=effect.number))


def homes(rig: Rig, name: str = "a") -> list[str]:
    return [shard.server for shard in rig.machine.job(name).placed.shards]


def homes_planned(rig: Rig, name: str) -> set[str]:
    placement = rig.machine.job(name).placement
    assert placement
    return {shard.server for shard in placement.shards}


def restores(rig: Rig) -> list[str]:
    return [reason for _, reason in rig.history("a") if reason.startswith("continues from")]


class TestAJobIsSaved:
    def test_and_goes_back_to_that_and_then_the_server_may_go(self, running: Rig) -> None:
        before = homes(running)
        assert running.drain("s1") == ("a",)
        assert running.drain("s1") == ("a",), "a repeat only reads"
        assert [type(effect) for effect in running.pending] == [ScanCheckpoints]
        cut = perform(running, TakeCut)
        assert cut.last
        assert running.drain("s1") == ("a",)
        running.perform(step=7)
        assert running.drain("s1") == ()
        told = "server s1 is about to leave; the job continues from checkpoint 1"
        assert ("pending", told) in running.history("a")
        assert running.status("a").restarts == 1
        running.leave("s1")
        running.pass_time(15, "s1")
        running.start("a", "w0", "w1")
        assert running.state("a") is JobState.STARTING, "one server would have room for all"
        running.servers("s1").start("a", "w0", "w1")
        assert running.state("a") is JobState.RUNNING
        assert restores(running) == ["continues from a/1, step 7"]
        assert homes(running) == before

    def test_once_though_two_servers_go(self, running: Rig) -> None:
        assert running.drain("s0") == running.drain("s1") == ("a",)
        running.perform(step=7)
        assert running.drain("s0") == running.drain("s1") == ()
        told = "servers s0, s1 are about to leave; the job continues from checkpoint 1"
        assert ("pending", told) in running.history("a")
        assert len(running.saved) == 1
        running.leave("s0")
        running.leave("s1")
        running.servers("s0").start("a", "w0", "w1")
        assert running.status("a").reason.startswith("waiting for server s1 to restart (until ")
        running.servers("s1").start("a", "w0", "w1")
        assert (running.state("a"), running.status("a").restarts) == (JobState.RUNNING, 1)

    def test_while_a_second_server_goes_after_the_cut(self, running: Rig) -> None:
        running.drain("s0")
        perform(running, CommitCheckpoint)
        assert running.drain("s1") == ("a",)
        running.perform()
        assert running.drain("s0") == running.drain("s1") == ()
        assert (len(running.saved), running.status("a").restarts) == (1, 1)

    @pytest.mark.parametrize("kind", [ScanCheckpoints, TakeCut, CommitCheckpoint, DropShards])
    def test_over_the_coordinators_death(self, running: Rig, kind: Any) -> None:
        running.drain("s1")
        perform(running, kind, step=7)
        running.crash()
        assert running.drain("s1") == (() if kind is DropShards else ("a",))
        running.perform(step=7)
        assert running.drain("s1") == ()
        running.leave("s1")
        running.start("a", "w0", "w1")
        running.crash()
        assert "server s1 to restart" in running.status("a").reason
        running.servers("s1").start("a", "w0", "w1")
        assert restores(running) == ["continues from a/1, step 7"]

    def test_once_more_where_a_cut_was_made_before_the_server_said_anything(self, running: Rig) -> None:
        running.handle(events.CheckpointRequested("a"))
        write = perform(running, CommitCheckpoint)
        assert not write.cut.held_by
        assert running.drain("s1") == ("a",)
        assert perform(running, TakeCut).last
        assert running.status("a").restarts == 0
        running.perform(step=9)
        assert running.drain("s1") == ()
        assert sorted(number for _, number in running.saved) == [1, 2]

    def test_by_the_checkpoint_under_way_where_its_cut_is_still_to_come(self, running: Rig) -> None:
        running.handle(events.CheckpointRequested("a"))
        running.drain("s1")
        assert perform(running, TakeCut).last
        running.perform()
        assert running.drain("s1") == ()
        assert len(running.saved) == 1
        ends = [event for event in running.machine.job("a").log.after(0) if isinstance(event, CheckpointEnded)]
        assert [end.failure for end in ends] == [""]

    def test_and_so_is_a_checkpoint_that_is_requested_meanwhile(self, running: Rig) -> None:
        """Since the last cut nothing was committed, so it has all that one more would have."""
        running.drain("s1")
        perform(running, CommitCheckpoint, step=7)
        asked = running.handle(events.CheckpointRequested("a"))
        assert asked.number == 2
        running.perform()
        assert running.drain("s1") == ()
        ends = [event for event in running.machine.job("a").log.after(0) if isinstance(event, CheckpointEnded)]
        assert [(end.attempt, end.saved.number if end.saved else 0, end.failure) for end in ends] == [
            (1, 1, ""),
            (2, 1, ""),
        ]

    def test_and_training_after_the_cut_is_repeated_and_counts_once(self, running: Rig) -> None:
        """Its cut holds training back for a while; what takes longer to write than that, it goes on for."""
        before, after = running.lease("a", "w0"), running.lease("a", "w1")
        running.lease("a", "w0", before.number)
        running.report("a", "w0", step=1, accepted=1, samples=32)
        running.drain("s1")
        perform(running, CommitCheckpoint, step=1)
        running.lease("a", "w1", after.number)  # its commit was held back, for 20 s
        running.report("a", "w1", step=1, accepted=1, samples=32)
        assert running.status("a").progress.samples == 64
        running.perform()
        assert running.drain("s1") == ()
        running.leave("s1")
        running.servers("s1").start("a", "w0", "w1")
        assert restores(running) == ["continues from a/1, step 1"]
        assert running.status("a").progress.samples == 32
        ranges, done = [before.range], {"w0": 0, "w1": 0}
        while leases := {worker: running.lease("a", worker, number) for worker, number in done.items()}:
            done = {worker: lease.number for worker, lease in leases.items() if isinstance(lease, Lease)}
            ranges += [lease.range for lease in leases.values() if isinstance(lease, Lease)]
        assert ranges.count(after.range) == 1
        assert len(ranges) == len(set(ranges)) == 8, "two epochs of 100 samples, in ranges of 32 and less"

    def test_that_is_at_its_end_is_let_end(self, running: Rig) -> None:
        for worker in ("w0", "w1"):
            running.finish("a", worker)
        assert running.drain("s1") == ("a",)
        running.perform()
        assert (running.state("a"), running.drain("s1")) == (JobState.SUCCEEDED, ())
        assert len(running.saved) == 1


class TestAJobThatCannotBeSaved:
    @pytest.mark.parametrize("failed_before", [0, 5])
    def test_is_tried_again_and_trains_on_as_long_as_the_server_waits(self, running: Rig, failed_before: int) -> None:
        for _ in range(failed_before):
            running.handle(events.CheckpointRequested("a"))
            fail(running)
        assert running.drain("s1") == ("a",)
        for attempt in range(10):
            assert [type(effect) for effect in running.pending] == [ScanCheckpoints], f"abandoned after {attempt}"
            fail(running)
            assert not running.pending, "not at once"
            assert running.drain("s1") == ("a",)
            running.pass_time(6)
            assert running.state("a") is JobState.RUNNING
        assert running.status("a").restarts == 0
        running.perform(step=70)
        assert running.drain("s1") == ()
        assert running.checkpoint("a").step == 70

    def test_restarts_from_an_older_checkpoint_after_the_server_left(self, running: Rig) -> None:
        running.handle(events.CheckpointRequested("a"))
        running.perform(step=3)
        running.drain("s1")
        fail(running)
        running.leave("s1")
        assert any("server s1 has left" in why and "from checkpoint 1" in why for _, why in running.history("a"))
        assert running.machine.job("a").awaits_checkpoint is False

    def test_restarts_from_an_older_checkpoint_if_the_server_stops_waiting(self, running: Rig) -> None:
        running.handle(events.CheckpointRequested("a"))
        running.perform(step=3)
        running.drain("s1")
        perform(running, CommitCheckpoint)  # which hangs
        running.pending.clear()
        running.pass_time(30)
        assert running.drain("s1") == ("a",)
        running.leave("s1")
        assert any("server s1 has left" in reason and "checkpoint 1" in reason for _, reason in running.history("a"))
        running.servers("s1").start("a", "w0", "w1")
        assert restores(running) == ["continues from a/1, step 3"]

    def test_goes_back_at_once_where_nothing_was_trained(self, rig: Rig) -> None:
        rig.submit(job(**FIXED))
        rig.describe("a", "w0")
        assert rig.state("a") is JobState.PLACING
        assert rig.drain("s1") == ()
        assert rig.status("a").restarts == 1
        rig.leave("s1")
        rig.servers("s1").start("a", "w0", "w1")
        assert rig.state("a") is JobState.RUNNING

    def test_is_not_waited_for_in_a_cluster_without_a_folder(self) -> None:
        rig = Rig().servers("s0", "s1").workers("w0", "w1")
        rig.submit(job(**FIXED))
        rig.start("a", "w0", "w1")
        assert rig.drain("s1") == ()
        assert rig.state("a") is JobState.RUNNING, "until the server goes"
        rig.leave("s1")
        assert rig.state("a") is JobState.FAILED

    def test_of_a_session_is_saved_and_names_the_checkpoint_to_restore(self, rig: Rig) -> None:
        rig.join(Role.SESSION, "x").submit(session(**FIXED))
        rig.start("s", "x")
        assert rig.drain("s1") == ("s",)
        done = rig.perform()
        assert (rig.state("s"), rig.drain("s1")) == (JobState.FAILED, ())
        assert any(isinstance(effect, DropShards) for effect in done), "or commits stay held on servers that stay"
        assert rig.status("s").reason == (
            "server s1 is about to leave; it was saved as s/1: open the session again with restore='s/1', or with "
            "restore='auto' in every run"
        )

    def test_of_a_session_names_its_checkpoint_when_the_server_leaves(self, rig: Rig) -> None:
        rig.join(Role.SESSION, "x").submit(session(**FIXED))
        rig.start("s", "x")
        rig.handle(events.CheckpointRequested("s"))
        rig.perform()
        rig.drain("s1")
        fail(rig)
        assert rig.state("s") is JobState.RUNNING
        rig.leave("s1")
        assert "; it was saved as s/1: open the session again with restore='s/1'" in rig.status("s").reason


class TestASessionThatBegins:
    @pytest.fixture
    def placing(self, rig: Rig) -> Rig:
        rig.join(Role.SESSION, "x").submit(session(**FIXED))
        rig.describe("s", "x")
        assert rig.state("s") is JobState.PLACING
        return rig

    def test_gets_another_place(self, placing: Rig) -> None:
        assert homes_planned(placing, "s") == {"s0", "s1"}
        placing.perform(until=CreateShards)
        [earlier] = placing.pending
        assert placing.drain("s1") == ()
        assert homes_planned(placing, "s") == {"s0"}
        assert ("placing", "server s1 is about to leave, so its variables are placed again") in placing.history("s")
        placing.pending.remove(earlier)  # which is under way
        placing.leave("s1")
        placing.perform()
        placing.handle(events.ShardsCreated(earlier.job, None, effect=earlier.number))
        placing.enter("s", "x")
        placing.perform()
        assert placing.state("s") is JobState.RUNNING

    def test_waits_for_a_server_if_none_stays(self, placing: Rig) -> None:
        placing.drain("s0")
        placing.drain("s1")
        assert placing.status("s").reason == "waiting for servers s0, s1 to restart"
        placing.leave("s1")
        placing.servers("s1")
        placing.start("s", "x")
        assert (placing.state("s"), homes_planned(placing, "s")) == (JobState.RUNNING, {"s1"})

    def test_fails_and_says_to_open_it_again_once_it_is_placed(self, placing: Rig) -> None:
        """Who is in it may have brought values, which the others would not have."""
        placing.perform()
        assert placing.drain("s1") == ()
        assert placing.state("s") is JobState.FAILED
        assert placing.status("s").reason == (
            "server s1 is about to leave; it has no checkpoint yet, so the work is lost: open the session again"
        )


class TestTheServer:
    def test_gets_no_new_shards_while_it_goes(self, rig: Rig) -> None:
        assert rig.drain("s1") == ()
        rig.submit(job(**FIXED))
        rig.start("a", "w0", "w1")
        assert set(homes(rig)) == {"s0"}

    def test_is_shown_to_be_going_and_gone(self, rig: Rig) -> None:
        rig.drain("s1")

        def seen() -> tuple[bool, bool]:
            [member] = [it for it in rig.machine.status(rig.now).members if it.member == "s1"]
            return member.alive, member.draining

        assert seen() == (True, True)
        rig.crash()
        assert seen() == (True, True)
        rig.leave("s1")
        assert seen() == (False, True)
        rig.servers("s1")
        assert seen() == (True, False)

    def test_is_waited_for_until_a_deadline_and_then_replaced(self, running: Rig) -> None:
        running.drain("s1")
        running.perform()
        running.leave("s1")
        running.start("a", "w0", "w1")
        left = running.now
        assert running.status("a").reason == "waiting for server s1 to restart (until 13:47:40 UTC at the latest)"
        while not running.pending and running.now < left + 90:
            running.pass_time(1)
        assert running.now - left == pytest.approx(KEEPING.server_return_s, abs=1)
        running.start("a", "w0", "w1")
        assert (running.state("a"), set(homes(running))) == (JobState.RUNNING, {"s0"})

    def test_that_is_killed_while_it_goes_is_waited_for_too(self, running: Rig) -> None:
        running.drain("s1")
        running.perform()
        running.kill("s1")
        running.pass_time(20)
        running.start("a", "w0", "w1")
        assert "server s1 to restart" in running.status("a").reason

    def test_that_goes_again_and_again_ends_no_job(self, running: Rig) -> None:
        """A rollout over many servers, each of which goes before the job has begun to run."""
        for _ in range(MAX_FAILED_RESTARTS + 2):
            running.drain("s1")
            running.perform()
            running.leave("s1")
            running.servers("s1")
            running.describe("a", "w0")
        assert any(isinstance(effect, CreateShards) for effect in running.pending)

    def test_alone_is_drained_and_its_latest_life(self, rig: Rig) -> None:
        with pytest.raises(errors.BadRequest, match="w0 is a worker; only servers can be drained"):
            rig.drain("w0")
        with pytest.raises(errors.Fenced):
            rig.handle(events.DrainRequested("s1", rig.lives["s1"] + 1))
