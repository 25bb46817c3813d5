"""Cluster machine with a fake clock: scripted scenarios, and random ones that call `validate` after every event."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import settings

from shoal import errors, optim
from shoal._limits import catalogue
from shoal._wire import Lease, NoRange, ReportAck
from shoal._wire.cursor import Cursor
from shoal.consistency import Asynchronous, Consistency, Synchronous
from shoal.status import JobState, Role
from shoal.v1 import state_pb2
from shoal.variables import Variable
from shoal_coordinator.cluster import ClusterPolicy, JobLimits, job_table
from shoal_coordinator.cluster.scheduler import Scheduler
from shoal_coordinator.job.ledger import Ledger
from shoal_coordinator.job.recovery import MAX_FAILED_RESTARTS
from shoal_coordinator.messages import (
    AdmitWorker,
    CreateShards,
    DropShards,
    JobRef,
    ProgramDescription,
    RemoveWorker,
    RestoredCheckpoint,
    ScanCheckpoints,
    TakeCut,
    events,
)
from support.clusters.cluster_rig import (
    GIVEN,
    HEARTBEAT_TIMEOUT_S,
    KEEPING,
    POLICY,
    VARIABLES,
    Rig,
    Voyage,
    job,
    only,
    session,
)
from support.run_lengths import draws, size


@pytest.fixture
def rig() -> Rig:
    return Rig().servers("s0", "s1").workers("w0", "w1")


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
def test_shards_are_laid_out_for_the_wire_that_the_job_asks_for(rig: Rig, wire: str) -> None:
    rig.submit(job(wire_dtype=wire))
    rig.describe("a", "w0")
    created = only(rig.perform(), CreateShards)
    arenas = [arena for shard in created.placement.shards for arena in shard.layout.arenas]
    assert {(arena.dtype.name, arena.wire_dtype.name) for arena in arenas} == {("float32", wire)}


@pytest.mark.parametrize(
    ("mode", "servers"), [(Synchronous(), 2), (Asynchronous(), 2), (Synchronous(backup_workers=1), 1)], ids=str
)
def test_a_clipped_job_is_on_one_server_only_if_servers_close_steps_on_their_own(
    rig: Rig, mode: Consistency, servers: int
) -> None:
    rig.submit(replace(job(optimizer=optim.SGD(0.1, clip_norm=1.0)), consistency=mode))
    rig.describe("a", "w0")
    rig.describe("a", "w1")
    created = only(rig.perform(), CreateShards)
    assert len({shard.server for shard in created.placement.shards}) == servers


def test_a_job_from_submission_to_success(rig: Rig) -> None:
    assert rig.submit(job()).state is JobState.STARTING
    assert [assignment.job for assignment in rig.beat("w0", "w1")] == ["a", "a"]
    assert rig.enter("a", "w0").placement is None
    rig.describe("a", "w0")
    assert rig.state("a") is JobState.PLACING
    rig.describe("a", "w1")
    [created] = rig.perform()
    assert isinstance(created, CreateShards)
    assert {shard.server for shard in created.placement.shards} == {"s0", "s1"}
    assert created.placement.generation == rig.machine.generation == 1

    assert not rig.enter("a", "w0").ready
    admitted = only(rig.perform(), AdmitWorker)
    assert (admitted.worker, admitted.rank, len(admitted.servers)) == ("w0", 0, 2)
    assert not rig.enter("a", "w0").ready, "the other one is not in yet"
    assert rig.state("a") is JobState.PLACING
    rig.enter("a", "w1")
    rig.perform()
    joined = rig.enter("a", "w1")
    assert (joined.ready, joined.rank, joined.step) == (True, 1, 0)
    assert rig.enter("a", "w0").ready
    assert rig.state("a") is JobState.RUNNING

    rig.now += 10
    assert rig.report("a", "w0", step=5, accepted=5, samples=160, values={"loss": 0.5}) is ReportAck.CONTINUE
    assert rig.status("a").progress.samples_per_s == pytest.approx(16)
    while isinstance(lease := rig.lease("a", "w0"), Lease):
        rig.lease("a", "w0", lease.number)
        if rig.lease("a", "w1") is NoRange.FINISHED:
            break
        rig.lease("a", "w1", rig.lease("a", "w1").number)
    rig.finish("a", "w0")
    assert rig.state("a") is JobState.RUNNING
    rig.finish("a", "w1")
    assert rig.state("a") is JobState.SUCCEEDED
    assert [type(effect) for effect in rig.perform()] == [RemoveWorker, RemoveWorker]
    assert rig.status("a").workers == ("w0", "w1")
    assert rig.beat("w0", "w1") == [None, None]
    assert rig.machine.job("a").placed.generation == 1, "variables stay readable"


def test_it_waits_for_all_workers_and_says_so(rig: Rig) -> None:
    rig.submit(job(workers=3))
    assert rig.status("a").reason == "waiting for workers: 2 of 3"
    rig.workers("w2")
    assert rig.state("a") is JobState.STARTING
    assert rig.status("a").reason == ""
    assert rig.history("a")[:2] == [("pending", ""), ("pending", "waiting for workers: 2 of 3")]


def test_jobs_are_served_in_order(rig: Rig) -> None:
    rig.submit(job("first"))
    rig.submit(job("second", workers=2))
    rig.submit(job("third", workers=1))
    rig.start("first", "w0", "w1")
    rig.finish("first", "w0")
    assert rig.beat("w0") == [None], "the second job's turn, and it needs both"
    assert rig.status("second").reason == "waiting for workers: 1 of 2 (1 is alive, busy with first)"
    rig.finish("first", "w1")
    assert [assignment.job for assignment in rig.beat("w0", "w1")] == ["second", "second"]
    assert rig.status("third").reason == "waiting for workers: 0 of 1 (2 are alive, busy with second)"


def test_a_waiting_job_names_a_few_of_the_jobs_that_have_the_workers() -> None:
    rig = Rig(POLICY)
    rig.workers(*(f"w{number}" for number in range(5)))
    for number in range(5):
        rig.submit(job(f"job-{number}", workers=1))
    rig.submit(job("late", workers=1))
    waiting = "waiting for workers: 0 of 1 (5 are alive, busy with job-0, job-1, job-2 and 2 more)"
    assert rig.status("late").reason == waiting
    rig.kill("w4")
    assert rig.status("late").reason == waiting.replace("5 are", "4 are").replace("2 more", "1 more")


def test_a_job_that_needs_too_many_workers_does_not_block_others(rig: Rig) -> None:
    rig.submit(job("huge", workers=9))
    rig.submit(job("small", workers=2))
    assert rig.state("small") is JobState.STARTING
    assert rig.state("huge") is JobState.PENDING


def test_it_waits_for_a_server() -> None:
    rig = Rig().workers("w0")
    rig.submit(job(workers=1))
    rig.describe("a", "w0")
    assert rig.status("a").reason == "waiting for a server"
    rig.servers("s0")
    assert rig.state("a") is JobState.PLACING


def test_a_worker_dies_and_another_takes_its_place(rig: Rig) -> None:
    rig.submit(job())
    rig.start("a", "w0", "w1")
    lost = rig.lease("a", "w1")
    rig.workers("w2").kill("w1")
    removed = only(rig.perform(), RemoveWorker)
    assert (removed.worker, removed.incarnation) == ("w1", rig.lives["w1"])
    [assignment] = rig.beat("w2")
    assert assignment.job == "a"
    assert rig.state("a") is JobState.RUNNING
    rig.describe("a", "w2")
    assert not rig.enter("a", "w2").ready
    rig.perform(step=17)
    joined = rig.enter("a", "w2")
    assert (joined.ready, joined.rank, joined.step) == (True, 1, 17)
    assert rig.lease("a", "w2").range == lost.range
    with pytest.raises(errors.Fenced):
        rig.lease("a", "w1", lost.number)


def test_running_job_waits_for_workers_only_when_all_are_gone(rig: Rig) -> None:
    rig.submit(job())
    rig.start("a", "w0", "w1")
    rig.leave("w0")
    assert rig.status("a").reason.startswith("continues with 1 of 2 workers")
    rig.leave("w1")
    assert rig.status("a").reason == "waiting for workers: 0 of 2"
    rig.workers("w2")
    assert rig.status("a").reason.startswith("continues with 1 of 2 workers")


def test_the_same_worker_comes_back_as_another_life(rig: Rig) -> None:
    rig.submit(job())
    rig.start("a", "w0", "w1")
    first = rig.beat("w1")[0].number
    rig.kill("w1")
    assert rig.status("a").reason == "continues with 1 of 2 workers; takes another one when it is idle"
    rig.workers("w1")
    assert rig.status("a").reason == ""
    assert rig.beat("w1")[0].number > first
    rig.start("a", "w1")
    effects = [effect for effect in rig.performed if getattr(effect, "worker", "") == "w1"]
    assert [type(effect) for effect in effects] == [AdmitWorker, RemoveWorker, AdmitWorker]
    assert rig.status("a").reason == ""


def test_all_workers_die_and_the_job_waits_for_others(rig: Rig) -> None:
    rig.submit(job())
    rig.start("a", "w0", "w1").kill("w0", "w1")
    assert rig.state("a") is JobState.RUNNING
    rig.workers("w2", "w3")
    rig.start("a", "w2", "w3")
    assert rig.enter("a", "w2").ready


def test_a_worker_that_dies_after_another_was_through_is_replaced_while_data_is_left(rig: Rig) -> None:
    rig.submit(job(max_steps=3))
    rig.start("a", "w0", "w1")
    rig.lease("a", "w1")
    rig.finish("a", "w0")
    rig.workers("w2").kill("w1")
    assert rig.state("a") is JobState.RUNNING, "what w1 held was trained on by nobody"
    assert [each.job if each else None for each in rig.beat("w0", "w2")] == [None, "a"]
    rig.start("a", "w2")
    rig.finish("a", "w2")
    assert rig.state("a") is JobState.SUCCEEDED


def test_a_worker_that_dies_when_all_is_done_is_not_replaced(rig: Rig) -> None:
    rig.submit(job(range_size=96))
    rig.start("a", "w0", "w1", samples=64)
    leased = rig.lease("a", "w0")
    rig.lease("a", "w0", done=leased.number)
    rig.finish("a", "w0")
    rig.workers("w2").kill("w1")
    assert rig.state("a") is JobState.SUCCEEDED


def test_the_trainer_of_an_earlier_job_of_that_name_cannot_speak_for_the_new_one(rig: Rig) -> None:
    """Cancelled and submitted again, the job goes to the same lives of the same workers."""
    rig.submit(job())
    rig.start("a", "w0", "w1")
    old = rig.part("a", "w0")
    rig.handle(events.JobCancelled("a"))
    rig.submit(job())
    life = rig.lives["w0"]
    assert rig.part("a", "w0") != old
    assert rig.handle(events.WorkerReported("a", "w0", life, accepted=500, assignment=old)) is ReportAck.DONE
    assert rig.handle(events.LeaseRequested("a", "w0", life, 1, old)) is NoRange.FINISHED
    rig.handle(events.WorkerFinished("a", "w0", life, "UNKNOWN_JOB", old))
    for late in (
        events.JobDescribed("a", "w0", life, ProgramDescription(VARIABLES, 100), old),
        events.JoinRequested("a", "w0", life, True, old),
    ):
        with pytest.raises(errors.Cancelled, match="no assignment"):
            rig.handle(late)
    assert rig.state("a") is JobState.STARTING
    assert rig.status("a").progress.steps == 0


def test_a_worker_that_dies_before_the_start_is_replaced(rig: Rig) -> None:
    rig.submit(job())
    rig.describe("a", "w0")
    rig.leave("w0")
    assert rig.status("a").reason == "waiting for workers: 1 of 2"
    rig.workers("w2")
    rig.start("a", "w1", "w2")
    assert rig.state("a") is JobState.RUNNING


def test_a_server_dies_and_its_jobs_fail_and_say_why(rig: Rig) -> None:
    rig.submit(job())
    rig.start("a", "w0", "w1")
    rig.submit(job("b", workers=1))
    rig.kill("s1")
    status = rig.status("a")
    assert status.state is JobState.FAILED
    assert "server s1 is lost, and with it the last copy of shard" in status.reason
    assert status.reason.endswith(
        "; the cluster has no checkpoint storage, so the work is lost: submit the job again. To save jobs, start the "
        "cluster with --checkpoints (from Python: LocalCluster(checkpoints=...))"
    )
    removed = [effect for effect in rig.perform() if isinstance(effect, RemoveWorker)]
    assert {server.member for effect in removed for server in effect.servers} == {"s0"}, (
        "the dead one is not waited for"
    )
    assert rig.beat("w0")[0].job == "b", "the cluster is healthy"


def test_cancelling_stops_the_workers(rig: Rig) -> None:
    rig.submit(job())
    rig.start("a", "w0", "w1")
    assert rig.handle(events.JobCancelled("a")).state is JobState.CANCELLED
    assert rig.beat("w0", "w1") == [None, None]
    assert rig.report("a", "w0", step=1, accepted=1) is ReportAck.DONE
    assert rig.lease("a", "w0") is NoRange.FINISHED
    assert rig.enter("a", "w0").state is JobState.CANCELLED
    rig.finish("a", "w0", "too late to matter")
    assert rig.handle(events.JobCancelled("a")).state is JobState.CANCELLED
    with pytest.raises(errors.Cancelled):
        rig.describe("a", "w0")


def test_a_job_that_is_cancelled_for_a_reason_says_it(rig: Rig) -> None:
    rig.submit(job())
    reason = "session x could not enter: no such variable"
    status = rig.handle(events.JobCancelled("a", f"{reason}\nand more"))
    assert (status.state, status.reason) == (JobState.CANCELLED, reason)
    assert rig.history("a")[-1] == ("cancelled", reason)
    with pytest.raises(errors.Cancelled, match=f"job a was cancelled: {reason}"):
        status.result()


def test_cancelling_before_it_ran_frees_the_shards(rig: Rig) -> None:
    rig.submit(job())
    rig.describe("a", "w0")
    rig.handle(events.JobCancelled("a"))
    assert [type(effect) for effect in rig.perform()] == [CreateShards, DropShards]
    with pytest.raises(errors.NotPlaced):
        _ = rig.machine.job("a").placed


def test_a_server_that_is_lost_while_shards_are_created_frees_them_if_it_returns(rig: Rig) -> None:
    """A call that makes shards may reach its next process late, after the job was placed on other servers."""
    rig.submit(job())
    rig.describe("a", "w0")
    assert len(rig.machine.job("a").servers) > 1
    rig.kill("s1")
    rig.servers("s1")
    [drop] = [it for it in rig.machine.pending_effects if isinstance(it, DropShards)]
    assert [server.member for server in drop.servers] == ["s0", "s1"]


def test_a_program_that_raises_fails_the_job_with_its_traceback(rig: Rig) -> None:
    rig.submit(job())
    rig.start("a", "w0", "w1")
    rig.finish("a", "w0", "Traceback ...\nValueError: no")
    assert rig.status("a").reason == "worker w0 failed: Traceback ...\nValueError: no"
    with pytest.raises(errors.JobFailed, match="ValueError: no"):
        rig.describe("a", "w1")


def test_a_worker_that_is_finished_before_the_job_ran_fails_it(rig: Rig) -> None:
    rig.submit(job())
    rig.finish("a", "w0")
    assert rig.status("a").reason.startswith("worker w0 finished before the job ran")


def test_a_name_is_used_again_once_its_job_has_ended(rig: Rig) -> None:
    rig.submit(job())
    with pytest.raises(errors.JobExists):
        rig.submit(job())
    rig.start("a", "w0", "w1")
    rig.handle(events.JobCancelled("a"))
    rig.submit(job())
    rig.describe("a", "w0")
    kinds = [type(effect) for effect in rig.pending]
    assert kinds == [RemoveWorker, RemoveWorker, DropShards, CreateShards], "the old shards go first"
    rig.start("a", "w0", "w1")
    assert rig.machine.job("a").placed.generation == 2


def test_a_submission_that_is_repeated_is_answered_as_the_first_was(rig: Rig) -> None:
    first = rig.handle(events.JobSubmitted(job(), "token"))
    assert rig.handle(events.JobSubmitted(job(), "token")) == first
    with pytest.raises(errors.JobExists):
        rig.handle(events.JobSubmitted(job(), "another"))


def test_late_outcomes_of_an_earlier_job_of_the_name_are_ignored(rig: Rig) -> None:
    rig.submit(job())
    rig.describe("a", "w0")
    [late] = rig.pending
    rig.pending.clear()
    rig.handle(events.JobCancelled("a"))
    rig.submit(job())
    for outcome in (events.ShardsCreated(late.job), events.EffectFailed(late.job, "late")):
        rig.handle(outcome)
    assert rig.state("a") is JobState.STARTING


def test_a_failed_effect_fails_the_job(rig: Rig) -> None:
    rig.submit(job())
    rig.describe("a", "w0")
    [effect] = rig.pending
    rig.handle(events.EffectFailed(effect.job, "its shards could not be created: no memory", effect=effect.number))
    assert rig.status("a").reason == "its shards could not be created: no memory"


def test_only_the_newest_finished_jobs_are_kept(rig: Rig) -> None:
    for name in ("a", "b", "c"):
        rig.submit(job(name))
        rig.start(name, "w0", "w1")
        rig.now += 1
        rig.handle(events.JobCancelled(name))
    assert [status.name for status in rig.machine.jobs(rig.now)] == ["c", "b"]
    assert [effect.job.name for effect in rig.perform() if isinstance(effect, DropShards)] == ["a"]
    with pytest.raises(errors.UnknownJob, match=r"'a' has ended and is forgotten: .*the newest 2 with variables"):
        rig.machine.job("a")
    with pytest.raises(errors.UnknownJob, match=r"there is no job 'd'; `shoal jobs --all` lists all jobs$"):
        rig.machine.job("d")
    rig.handle(events.JobDropped("b"))
    with pytest.raises(errors.UnknownJob, match="there is no job 'b'"):
        rig.machine.job("b")


def test_few_names_of_forgotten_jobs_are_remembered(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_table, "FORGOTTEN_NAMES", 1)
    for name in ("a", "b", "c", "d"):
        rig.submit(job(name))
        rig.start(name, "w0", "w1")
        rig.now += 1
        rig.handle(events.JobCancelled(name))
    with pytest.raises(errors.UnknownJob, match="'b' has ended and is forgotten"):
        rig.machine.job("b")
    with pytest.raises(errors.UnknownJob, match="there is no job 'a'"):
        rig.machine.job("a")


def test_a_trained_job_outlives_later_ones_that_have_no_variables(rig: Rig) -> None:
    rig.submit(job("trained"))
    rig.start("trained", "w0", "w1")
    rig.handle(events.JobCancelled("trained"))
    for name in ("a", "b", "c"):
        rig.now += 1
        rig.submit(job(name))
        rig.handle(events.JobCancelled(name))
    assert [status.name for status in rig.machine.jobs(rig.now)] == ["c", "b", "trained"]
    assert rig.machine.job("trained").placed.shards


def test_an_ended_job_counts_among_those_without_variables_once_its_server_is_lost() -> None:
    rig = Rig(POLICY).servers("s0", "s1").workers("w0", "w1")
    for name in ("a", "trained", "c", "d"):
        rig.now += 0.1
        rig.submit(job(name))
        if name == "trained":
            rig.start(name, "w0", "w1")
        rig.handle(events.JobCancelled(name))
    assert [status.name for status in rig.machine.jobs(rig.now)] == ["d", "c", "trained"]
    rig.handle(events.MemberLeft("s0", 1))
    assert [status.name for status in rig.machine.jobs(rig.now)] == ["d", "c"], "the oldest of three"


def test_worker_of_a_job_that_fails_by_its_description_gets_another_job() -> None:
    rig = Rig(POLICY).workers("w0", "w1")  # without servers, so that there are no shards to drop
    rig.submit(job(workers=2))
    rig.submit(job("b", workers=2))
    rig.describe("a", "w0")
    assert rig.describe("a", "w1", samples=99).conflict
    assert rig.state("a") is JobState.FAILED
    assert (rig.state("b"), rig.status("b").workers) == (JobState.STARTING, ("w0", "w1"))


@pytest.mark.parametrize("how", ["dies", "leaves"])
@pytest.mark.parametrize("policy", [POLICY, KEEPING])
def test_the_values_of_an_ended_job_are_lost_with_a_server(policy: ClusterPolicy, how: str) -> None:
    rig = Rig(policy).servers("s0", "s1").workers("w0", "w1")
    rig.submit(job())
    rig.start("a", "w0", "w1")
    if policy.checkpoints:
        rig.handle(events.CheckpointRequested("a"))
        rig.perform()
    rig.handle(events.JobCancelled("a"))
    rig.perform()
    assert {shard.server for shard in rig.machine.job("a").placed.shards} == {"s0", "s1"}
    if how == "dies":
        rig.kill("s1")
    else:
        rig.leave("s1")
    [freed] = rig.perform()
    assert isinstance(freed, DropShards)
    assert [server.member for server in freed.servers] == ["s0"], "the others free what is left"
    rig.servers("s1")
    advice = "`shoal export a/1 FILE` writes the values" if policy.checkpoints else "it has no checkpoint, so submit it"
    said = rf"job a is cancelled, and its values were lost with a server; {advice}"
    for machine in (rig.machine, rig.crash().machine):
        with pytest.raises(errors.NotPlaced, match=said):
            _ = machine.job("a").placed


def test_dropping(rig: Rig) -> None:
    rig.submit(job())
    rig.start("a", "w0", "w1")
    with pytest.raises(errors.JobRunning):
        rig.handle(events.JobDropped("a"))
    rig.handle(events.JobCancelled("a"))
    rig.handle(events.JobDropped("a"))
    assert isinstance(rig.perform()[-1], DropShards)
    with pytest.raises(errors.UnknownJob):
        rig.handle(events.JobDropped("a"))


def test_given_values_are_sent_by_one_worker_and_waited_for(rig: Rig) -> None:
    rig.submit(job())
    for worker in ("w0", "w1", "w0"):
        rig.describe("a", worker, GIVEN)
    rig.perform()
    entered = rig.enter("a", "w0")
    assert entered.assign_values
    assert entered.placement, "known before the start, for the values to be sent"
    assert not rig.enter("a", "w1").assign_values
    rig.enter("a", "w1", assigned=True)
    rig.perform()
    assert rig.state("a") is JobState.PLACING, "only the one that was told to can have sent them"
    entered = rig.enter("a", "w0", assigned=True)
    assert entered.ready
    assert not entered.assign_values


def test_when_the_sender_of_given_values_dies_another_is_asked(rig: Rig) -> None:
    rig.submit(job())
    rig.describe("a", "w0", GIVEN)
    rig.perform()
    rig.leave("w0")
    rig.workers("w2")
    rig.describe("a", "w2", GIVEN)
    rig.enter("a", "w1")
    assert rig.enter("a", "w2").assign_values
    rig.enter("a", "w2", assigned=True)
    rig.perform()
    assert rig.state("a") is JobState.RUNNING


def test_one_that_has_described_before_sends_the_given_values_of_one_that_died(open_sea: Rig) -> None:
    sea = open_sea
    sea.submit(session("s", workers=2))
    sea.describe("s", "x", GIVEN)
    sea.describe("s", "y", GIVEN)
    sea.perform()
    assert sea.enter("s", "x").assign_values
    sea.leave("x")
    assert not sea.enter("s", "z").assign_values, "it joined without knowing the values"
    sea.perform()
    assert sea.enter("s", "y").assign_values
    sea.enter("s", "y", assigned=True)
    sea.perform()
    assert sea.state("s") is JobState.RUNNING


@pytest.mark.parametrize(
    ("variables", "samples", "said"),
    [
        (VARIABLES, 99, "99 samples instead of 100"),
        ({"w": Variable((8, 5)), "b": Variable(4)}, 100, "variable 'w' has shape (8, 5) instead of (8, 4)"),
        ({"w": Variable((8, 4))}, 100, "variable 'b' is missing. All workers need the same version"),
    ],
)
def test_a_different_description_fails_the_job(
    rig: Rig, variables: Mapping[str, Variable], samples: int, said: str
) -> None:
    rig.submit(job())
    rig.describe("a", "w0")
    assert said in rig.describe("a", "w1", variables, samples).conflict
    assert rig.state("a") is JobState.FAILED
    assert said in rig.status("a").reason


@pytest.mark.parametrize("running", [False, True])
def test_a_session_with_other_variables_is_refused_and_the_others_go_on(open_sea: Rig, running: bool) -> None:
    sea = open_sea
    sea.submit(session("s", workers=2))
    sea.describe("s", "x")
    if running:
        sea.start("s", "x", "y")
        sea.leave("y")  # so that there is a free rank
        sea.perform()
    state, history = sea.state("s"), sea.history("s")
    for _ in range(2):
        with pytest.raises(
            errors.InvalidJob, match=r"job s goes on .*z describes .*shape \(8, 5\) instead of \(8, 4\)"
        ):
            sea.describe("s", "z", {"w": Variable((8, 5)), "b": Variable(4)})
    assert (sea.state("s"), sea.history("s")) == (state, history)
    assert "z" not in sea.machine.job("s").workers, "it has no rank, which another session can take"
    sea.describe("s", "z")
    sea.perform()
    sea.enter("s", "z")
    sea.enter("s", "x")
    sea.perform()
    assert sea.state("s") is JobState.RUNNING


def test_a_program_without_variables_is_refused(rig: Rig) -> None:
    rig.submit(job())
    with pytest.raises(errors.InvalidJob, match="define at least one"):
        rig.describe("a", "w0", {})


def test_calls_of_a_worker_outside_the_job_are_refused(rig: Rig) -> None:
    rig.submit(job(workers=1))
    with pytest.raises(errors.Cancelled):
        rig.enter("a", "w1")
    with pytest.raises(errors.Cancelled):
        rig.describe("a", "w1")
    for call in (rig.lease, rig.report, rig.finish):
        with pytest.raises(errors.Forbidden, match="w1 has no assignment in job a, and had none"):
            call("a", "w1")
    with pytest.raises(errors.UnknownJob):
        rig.enter("nope", "w1")


def test_a_worker_whose_assignment_has_ended_is_told_to_stop(rig: Rig) -> None:
    rig.submit(job(workers=1))
    rig.start("a", "w0")
    part = rig.part("a", "w0")
    rig.handle(events.JobCancelled("a"))
    rig.crash()
    lease = events.LeaseRequested("a", "w0", rig.lives["w0"], 0, part)
    assert rig.handle(lease) is NoRange.FINISHED
    assert rig.report("a", "w0") is ReportAck.DONE


# Sessions.


@pytest.fixture
def open_sea() -> Rig:
    rig = Rig().servers("s0")
    rig.join(Role.SESSION, "x", "y", "z")
    return rig


def test_a_session_job_runs_and_ends_with_its_last_session(open_sea: Rig) -> None:
    assert open_sea.submit(session(workers=2)).reason == "waiting for sessions: 0 of 2"
    open_sea.start("s", "x", samples=0)
    assert open_sea.status("s").reason == "waiting for sessions: 1 of 2"
    assert not open_sea.enter("s", "x").ready
    open_sea.start("s", "y", samples=0)
    assert open_sea.enter("s", "x").ready
    with pytest.raises(errors.Overloaded):
        open_sea.enter("s", "z")
    open_sea.finish("s", "x")
    assert open_sea.state("s") is JobState.RUNNING
    open_sea.enter("s", "z")
    open_sea.perform(step=9)
    assert open_sea.enter("s", "z").step == 9, "one that joins late need not describe"
    open_sea.finish("s", "z")
    open_sea.finish("s", "y")
    assert open_sea.state("s") is JobState.SUCCEEDED
    assert open_sea.machine.job("s").placed.shards


def test_a_finished_rank_may_be_taken_by_a_session_that_leaves(open_sea: Rig) -> None:
    open_sea.submit(session(workers=2))
    open_sea.start("s", "x", "y", samples=0)
    open_sea.finish("s", "x")
    open_sea.enter("s", "z")
    open_sea.kill("z")
    open_sea.crash()
    members = [(it.worker, it.rank, it.state) for it in open_sea.status("s").members]
    assert members == [("z", 0, "left"), ("y", 1, "present")]
    open_sea.finish("s", "y")
    assert open_sea.state("s") is JobState.SUCCEEDED


def test_a_session_job_outlives_the_death_of_its_last_session(open_sea: Rig) -> None:
    open_sea.submit(session())
    open_sea.start("s", "x", samples=0).kill("x")
    assert open_sea.state("s") is JobState.RUNNING
    open_sea.join(Role.SESSION, "x")
    open_sea.start("s", "x", samples=0)
    assert open_sea.enter("s", "x").ready
    open_sea.handle(events.JobCancelled("s"))
    assert open_sea.state("s") is JobState.CANCELLED


def test_an_incarnation_of_a_session_has_one_part_in_one_job(open_sea: Rig) -> None:
    open_sea.submit(session(workers=2))
    open_sea.submit(session("t"))
    open_sea.start("s", "x", "y", samples=0)
    with pytest.raises(errors.Fenced):
        open_sea.enter("t", "x")
    open_sea.finish("s", "x")
    with pytest.raises(errors.Fenced):
        open_sea.enter("s", "x")
    open_sea.leave("x")
    open_sea.join(Role.SESSION, "x")
    open_sea.enter("s", "x")


def test_a_session_that_leaves_before_the_start_does_not_end_the_job(open_sea: Rig) -> None:
    open_sea.submit(session(workers=2))
    open_sea.describe("s", "x")
    open_sea.finish("s", "x")
    assert open_sea.state("s") is JobState.PLACING
    open_sea.start("s", "y", "z")
    assert open_sea.state("s") is JobState.RUNNING


def test_a_session_that_could_not_enter_cancels_the_job_that_it_started_unless_another_has_a_part_in_it(
    open_sea: Rig,
) -> None:
    open_sea.submit(session(workers=2))
    open_sea.describe("s", "x")
    open_sea.describe("s", "y")
    assert open_sea.handle(events.JobAbandoned("s", "x", "Ctrl-C")).state is not JobState.CANCELLED
    open_sea.leave("y")
    assert open_sea.handle(events.JobAbandoned("s", "x", "Ctrl-C")).state is JobState.CANCELLED
    assert open_sea.status("s").reason == "Ctrl-C"


def test_a_session_job_whose_last_checkpoint_is_being_written_takes_no_session_and_no_submission() -> None:
    sea = Rig(KEEPING).servers("s0").join(Role.SESSION, "x", "y")
    sea.submit(session())
    sea.start("s", "x", samples=0)
    sea.finish("s", "x")
    said = "job s has finished, and its last checkpoint is being written; try again when it has ended"
    for call in (sea.describe, sea.enter):
        with pytest.raises(errors.Cancelled, match=said):
            call("s", "y")
    with pytest.raises(errors.JobExists, match=said) as raised:
        sea.submit(session())
    assert raised.value.details["ending"] == "1", "clients wait"
    assert sea.handle(events.JobAbandoned("s", "y")).state is JobState.RUNNING
    sea.perform()
    assert sea.state("s") is JobState.SUCCEEDED
    sea.submit(session())
    sea.start("s", "y", samples=0)
    assert sea.enter("s", "y").ready


# Members.


def test_members_stay_alive_after_the_coordinator_was_suspended(rig: Rig) -> None:
    rig.now += 60
    rig.handle(events.TimePassed())
    rig.workers("w2")
    rig.beat("w0", "w1", "s0", "s1")
    assert all(member.alive for member in rig.machine.status(rig.now).members)


def test_every_kind_of_event_is_handled(rig: Rig) -> None:
    kinds = {
        kind.__name__ for kind in [*events.ClusterEvent.__subclasses__(), *events.EffectOutcome.__subclasses__()]
    } - {"EffectOutcome"}
    assert {kind.__name__ for kind in rig.machine.event_kinds} == kinds


def test_deaths_are_reported_once(rig: Rig) -> None:
    rig.now += 2
    rig.handle(events.TimePassed())
    rig.now += 2
    rig.beat("w0", "s0", "s1")
    rig.handle(events.TimePassed())
    rig.now += 2
    assert rig.handle(events.TimePassed()) == {"w1": Role.WORKER}
    assert rig.handle(events.TimePassed()) == {}


def test_status_lists_members_with_their_jobs(rig: Rig) -> None:
    rig.submit(job())
    rig.kill("w1")
    status = rig.machine.status(rig.now)
    assert [(m.member, m.role, m.alive, m.job) for m in status.members] == [
        ("s0", Role.SERVER, True, ""),
        ("s1", Role.SERVER, True, ""),
        ("w0", Role.WORKER, True, "a"),
        ("w1", Role.WORKER, False, ""),
    ]
    assert status.members[3].silent_s == pytest.approx(HEARTBEAT_TIMEOUT_S + 1.5)


@pytest.fixture
def wide() -> Rig:
    """Four workers."""
    return Rig().servers("s0").workers("w0", "w1", "w2", "w3")


def test_a_job_begins_with_fewer_workers_when_no_more_are_idle(rig: Rig) -> None:
    rig.submit(job(workers=4, min_workers=2))
    assert rig.state("a") is JobState.STARTING
    rig.start("a", "w0", "w1")
    assert rig.state("a") is JobState.RUNNING
    assert rig.status("a").reason == ""
    rig.workers("w2")
    assert rig.status("a").workers == ("w0", "w1", "w2")


def test_a_job_waits_for_the_fewest_that_it_may_begin_with(rig: Rig) -> None:
    status = rig.submit(job(workers=5, min_workers=3))
    assert (status.state, status.reason) == (JobState.PENDING, "waiting for workers: 2 of 3")
    rig.workers("w2")
    assert rig.state("a") is JobState.STARTING


def test_extra_workers_join_a_job_once_it_runs(wide: Rig) -> None:
    wide.submit(job(workers=2, max_workers=3))
    assert wide.status("a").workers == ("w0", "w1")
    wide.start("a", "w0", "w1")
    assert wide.status("a").workers == ("w0", "w1", "w2")
    wide.start("a", "w2")
    assert wide.enter("a", "w2").ready
    assert isinstance(wide.lease("a", "w2"), Lease)
    wide.leave("w2")
    assert wide.state("a") is JobState.RUNNING
    assert wide.status("a").workers == ("w0", "w1", "w3"), "another one takes its place"
    assert wide.machine.job("a").data().held == ()


def test_waiting_jobs_come_before_extra_workers_and_none_is_moved(wide: Rig) -> None:
    wide.submit(job(workers=1, max_workers=4))
    wide.submit(job("b", workers=4))
    wide.start("a", "w0")
    assert wide.status("a").workers == ("w0",)
    assert wide.status("b").reason == "waiting for workers: 3 of 4 (1 is alive, busy with a)", "which are kept for it"
    wide.handle(events.JobCancelled("b"))
    assert wide.status("a").workers == ("w0", "w1", "w2", "w3")
    wide.submit(job("c", workers=1))
    assert wide.status("c").reason == "waiting for workers: 0 of 1 (4 are alive, busy with a)"


def test_no_worker_joins_a_job_that_another_has_finished(wide: Rig) -> None:
    wide.submit(job(workers=2, max_workers=4))
    wide.start("a", "w0", "w1", samples=0)
    wide.leave("w2")
    wide.leave("w3")
    wide.finish("a", "w0")
    assert [each.job if each else None for each in wide.beat("w0", "w1")] == [None, "a"]
    wide.finish("a", "w1")
    assert wide.state("a") is JobState.SUCCEEDED


def test_a_worker_that_leaves_gives_back_the_rest_of_its_range(rig: Rig) -> None:
    rig.submit(job(workers=2, range_size=32))
    rig.start("a", "w0", "w1")
    lease = rig.lease("a", "w1")
    rig.handle(events.MemberLeft("w1", rig.lives["w1"], Cursor(lease.number, 8)))
    assert only(rig.perform(), RemoveWorker).worker == "w1", "servers are told"
    assert rig.machine.job("a").data().total.done == 8
    rig.workers("w2")
    assert rig.status("a").workers == ("w0", "w2")
    rig.start("a", "w2")
    assert rig.lease("a", "w2").range == lease.range.after(8)


def test_a_job_that_goes_on_after_max_steps_gives_each_rank_the_rest_of_its_range(rig: Rig) -> None:
    rig.submit(job(workers=2, range_size=32, max_steps=1))
    rig.start("a", "w0", "w1")
    leases = {worker: rig.lease("a", worker) for worker in ("w0", "w1")}
    for worker, lease in leases.items():
        rig.finish("a", worker, cursor=Cursor(lease.number, 8))
    live = rig.machine.job("a")
    assert (live.state, live.data().total.done) == (JobState.SUCCEEDED, 16)
    data = live.held().ledger
    assert data is not None
    resumed = Ledger.resumed(data, epochs=live.spec.epochs, workers=2)
    for rank, worker in reversed([*enumerate(leases)]):
        given = resumed.lease(worker, rank, 2)
        assert isinstance(given, Lease)
        assert given.range == leases[worker].range.after(8)


def test_a_cursor_of_another_lease_is_ignored_when_a_worker_leaves(rig: Rig) -> None:
    rig.submit(job(workers=2))
    rig.start("a", "w0", "w1")
    rig.lease("a", "w1")
    rig.handle(events.MemberLeft("w1", rig.lives["w1"], Cursor(77, 8)))
    assert rig.machine.job("a").data().total.done == 0


def test_too_many_jobs() -> None:
    rig = Rig(replace(POLICY, jobs=JobLimits(live_jobs=1)))
    rig.submit(job())
    with pytest.raises(errors.Overloaded, match=r"has 1 live jobs; the limit MAX_LIVE_JOBS is 1 \(--max-jobs\); try"):
        rig.submit(job("b"))


def test_too_many_jobs_of_a_submitter() -> None:
    rig = Rig(replace(POLICY, jobs=JobLimits(submitter_jobs=2)))
    for name in "ab":
        rig.handle(events.JobSubmitted(job(name), submitter="ipv4:10.0.0.5"))
    with pytest.raises(errors.Overloaded, match=r"10\.0\.0\.5 has 2 live jobs; the limit SUBMITTER_JOBS is 2"):
        rig.handle(events.JobSubmitted(job("c"), submitter="ipv4:10.0.0.5"))
    rig.handle(events.JobSubmitted(job("c"), submitter="ipv4:10.0.0.6"))
    rig.handle(events.JobCancelled("a"))
    rig.handle(events.JobSubmitted(job("d"), submitter="ipv4:10.0.0.5"))


def test_specifications_of_a_submitter_that_are_too_large() -> None:
    rig = Rig(POLICY)
    for name in "ab":
        rig.handle(events.JobSubmitted(job(name), submitter="me", spec_bytes=30 << 20))
    with pytest.raises(errors.Overloaded, match="the limit SUBMITTER_JOB_BYTES is 67108864; try again when one ends"):
        rig.handle(events.JobSubmitted(job("c"), submitter="me", spec_bytes=5 << 20))


def test_variables_of_a_submitter_that_are_too_large() -> None:
    most = 2 * ProgramDescription(VARIABLES, 0).nbytes
    rig = Rig(replace(POLICY, jobs=JobLimits(submitter_value_bytes=most))).servers("s0", "s1").workers(*"uvwxyz")
    for name in "abc":
        rig.handle(events.JobSubmitted(job(name), submitter="me"))
    for worker in "uvwx":
        rig.describe("a" if worker in "uv" else "b", worker)
    text = r"jobs of me have 288 bytes.* have 144 bytes; the limit SUBMITTER_VALUE_BYTES is 288 \(--max-submitter-value"
    with pytest.raises(errors.Overloaded, match=text):
        rig.describe("c", "y")
    rig.crash()  # what is known of the others is stored
    with pytest.raises(errors.Overloaded, match=text):
        rig.describe("c", "y")
    rig.handle(events.JobCancelled("a"))
    rig.describe("c", "y")


def test_variables_of_a_submitter_have_a_limit_by_default() -> None:
    rig = Rig(POLICY).servers("s0").workers(*"uv")
    huge = {name: Variable((3 << 36,), "float32") for name in "ab"}  # 768 GiB each
    rig.handle(events.JobSubmitted(job("a"), submitter="me"))
    with pytest.raises(errors.Overloaded, match=r"the limit SUBMITTER_VALUE_BYTES is 1099511627776 \(--max-submitter"):
        rig.describe("a", "u", huge)


def test_a_flood_of_jobs_is_refused() -> None:
    limit, most = size((50, 1_000), (catalogue.MAX_LIVE_JOBS.default, 100_000))
    rig = Rig(replace(POLICY, jobs=JobLimits(live_jobs=limit)))
    for number in range(limit):
        rig.machine.handle(events.JobSubmitted(job(f"job-{number}", workers=1)), rig.now)
    for number in range(limit, most):
        with pytest.raises(errors.Overloaded, match=f"{limit} live jobs"):
            rig.machine.handle(events.JobSubmitted(job(f"job-{number}", workers=1)), rig.now)
    assert len(rig.machine.submitted) == limit


def test_the_reason_to_wait_is_the_same_after_a_restart(rig: Rig) -> None:
    rig.submit(job("b", workers=3))
    rig.submit(job("a", workers=1))
    waiting = "waiting for workers: 1 of 3 (1 is alive, busy with a)"
    assert rig.status("b").reason == waiting
    rig.crash()
    assert rig.status("b").reason == waiting


TestVoyage = Voyage.TestCase
TestVoyage.settings = settings(max_examples=draws(12), stateful_step_count=40, deadline=None)


class VoyageWithCheckpoints(Voyage):
    """The same where jobs are saved, and go back when they lose their shards."""

    policy = replace(KEEPING, smallest_move_bytes=1)


TestVoyageWithCheckpoints = VoyageWithCheckpoints.TestCase
TestVoyageWithCheckpoints.settings = settings(max_examples=draws(12), stateful_step_count=40, deadline=None)


class TestGoingBack:
    """A job whose shards are lost, in a cluster that has a folder of checkpoints."""

    @pytest.fixture
    def rig(self) -> Rig:
        return Rig(KEEPING).servers("s0", "s1").workers("w0", "w1")

    @pytest.fixture
    def running(self, rig: Rig) -> Rig:
        rig.submit(job(epochs=2))
        rig.start("a", "w0", "w1")
        assert rig.state("a") is JobState.RUNNING
        return rig

    def save(self, rig: Rig, step: int = 0) -> None:
        rig.handle(events.CheckpointRequested("a"))
        rig.perform(step=step)

    def test_to_its_newest_checkpoint_and_its_place_in_the_data(self, running: Rig) -> None:
        lease = running.lease("a", "w0")
        running.lease("a", "w0", lease.number)
        done = running.machine.job("a").data().total.done
        assert done > 0
        self.save(running, step=3)
        running.lease("a", "w1")
        running.kill("s1")
        assert running.state("a") is JobState.STARTING
        running.servers("s1")
        running.start("a", "w0", "w1")
        assert running.state("a") is JobState.RUNNING
        assert running.status("a").restarts == 1
        assert running.machine.job("a").data().total.done == done
        assert ("placing", "continues from a/1, step 3") in running.history("a")

    def test_to_its_beginning_if_it_has_no_checkpoint(self, running: Rig) -> None:
        running.kill("s1")
        running.servers("s1").start("a", "w0", "w1")
        assert running.state("a") is JobState.RUNNING
        assert any("the job continues from its beginning" in reason for _, reason in running.history("a"))

    def test_waits_for_the_storage_of_its_checkpoints_as_long_as_that_is_away_and_says_so(self, running: Rig) -> None:
        self.save(running, step=3)
        running.kill("s1")
        running.servers("s1")
        running.away = "503, slow down"
        running.start("a", "w0", "w1")
        told, tries = "waiting for the storage of its checkpoints: 503, slow down", [running.now]
        assert isinstance(running.performed[-1], DropShards), "it holds no memory meanwhile"
        for second in range(200):
            running.pass_time(1)
            if second == 100:
                running.crash()
            done = running.perform()
            assert (running.state("a"), running.status("a").reason) == (JobState.PLACING, told)
            if any(isinstance(effect, CreateShards) for effect in done):
                tries.append(running.now)
        assert [after - before for before, after in pairwise(tries)] == [2, 4, 8, 16, 32, 60, 60]
        assert running.history("a").count(("placing", told)) == 1, "once, not at each try"
        running.away = ""
        running.pass_time(60).start("a", "w0", "w1")
        assert (running.state("a"), running.status("a").reason) == (JobState.RUNNING, "")
        assert ("placing", "continues from a/1, step 3") in running.history("a")
        assert running.status("a").restarts == 1, "it went back once"

    def test_can_be_cancelled_while_the_storage_is_away(self, running: Rig) -> None:
        self.save(running)
        running.away = "503, slow down"
        running.kill("s1")
        running.servers("s1").start("a", "w0", "w1")
        running.handle(events.JobCancelled("a"))
        assert (running.state("a"), running.status("a").reason) == (JobState.CANCELLED, "")
        running.perform()
        running.pass_time(60)
        assert running.pending == []

    def test_to_the_checkpoint_that_it_began_with_though_that_one_s_job_has_gone_on(self, running: Rig) -> None:
        self.save(running, step=3)
        running.handle(events.JobCancelled("a"))
        running.submit(job("b", restore="a", epochs=2))
        running.start("b", "w0", "w1")
        assert running.state("b") is JobState.RUNNING
        running.saved["a", 2] = replace(running.saved["a", 1], number=2, step=9)
        running.crash().kill("s1")
        assert any("from its beginning, a/1" in reason for _, reason in running.history("b"))
        running.servers("s1").start("b", "w0", "w1")
        assert running.state("b") is JobState.RUNNING
        assert running.history("b").count(("placing", "continues from a/1, step 3")) == 2

    def test_waits_for_its_servers_but_not_forever(self, running: Rig) -> None:
        running.kill("s1")
        running.describe("a", "w0")
        assert not any(isinstance(effect, CreateShards) for effect in running.pending)
        assert "waiting for servers" in running.status("a").reason
        running.pass_time(20, "s1")
        assert any(isinstance(effect, CreateShards) for effect in running.pending)

    def test_not_without_end(self, running: Rig) -> None:
        for _ in range(MAX_FAILED_RESTARTS):
            [shards] = [effect for effect in running.performed if isinstance(effect, CreateShards)][-1:]
            finished = events.WorkerFinished(
                "a", "w0", running.lives["w0"], "UNKNOWN_SHARD: gone", running.part("a", "w0"), shards_lost=True
            )
            running.handle(finished)
            running.start("a", "w0", "w1")
            assert running.state("a") is JobState.RUNNING, shards
        running.finish("a", "w0", "UNKNOWN_SHARD: gone", shards_lost=True)
        assert running.state("a") is JobState.FAILED
        assert "without a new checkpoint" in running.status("a").reason

    def test_a_worker_that_finds_no_shards_during_placement_is_replaced(self, running: Rig) -> None:
        running.kill("s0", "s1")
        assert running.state("a") is JobState.STARTING
        running.finish("a", "w0", "NOT_PLACED: not on servers", shards_lost=True)
        assert not running.status("a").state.finished
        assert running.part("a", "w0"), "it has a new part"

    def test_a_number_is_given_once_though_nothing_of_it_is_to_be_seen(self, running: Rig) -> None:
        given = []
        for _ in range(3):
            running.handle(events.CheckpointRequested("a"))
            counts = running.pending.pop()
            running.handle(events.CheckpointsScanned(counts.job, 0, effect=counts.number))
            cut = only(running.pending, TakeCut)
            given.append(cut.checkpoint)
            running.crash()  # the next coordinator knows it, too
            assert running.pending == [cut]
            running.pending.clear()
            running.handle(events.CheckpointFailed(cut.job, "server s1 does not answer", effect=cut.number))
        assert given == [1, 2, 3]

    def test_a_checkpoint_number_is_above_all_in_the_folder(self, running: Rig) -> None:
        running.saved["a", 7] = events.CutTaken(JobRef("a", 1), 7, 0, 0, 0.0, None, state_pb2.ProgressRecord())
        running.handle(events.CheckpointRequested("a"))
        cuts = [effect for effect in running.perform() if isinstance(effect, TakeCut)]
        assert [cut.checkpoint for cut in cuts] == [8]
        assert running.checkpoint("a").number == 8

    def test_a_last_checkpoint_that_finds_no_shards_is_not_the_end(self, running: Rig) -> None:
        for worker in ("w0", "w1"):
            running.finish("a", worker)
        assert running.state("a") is JobState.RUNNING
        while not isinstance(running.pending[0], ScanCheckpoints):
            effect = running.pending.pop(0)
            running.handle(events.EffectDone(effect=effect.number))
        [effect] = running.pending
        running.pending.clear()
        running.handle(events.CheckpointFailed(effect.job, "no such job here", shards_lost=True, effect=effect.number))
        running.start("a", "w0", "w1")
        assert running.state("a") is JobState.RUNNING

    def test_the_last_checkpoint_is_tried_again_before_the_job_ends_without_it(self, running: Rig) -> None:
        for worker in ("w0", "w1"):
            running.finish("a", worker)
        for attempt in range(3):
            while not isinstance(running.pending[0], ScanCheckpoints):
                running.handle(events.EffectDone(effect=running.pending.pop(0).number))
            [effect] = running.pending
            running.pending.clear()
            assert running.state("a") is JobState.RUNNING, f"it gave up after {attempt} attempts"
            running.handle(events.CheckpointFailed(effect.job, "the disk is full", effect=effect.number))
            running.pass_time(21)
        assert running.state("a") is JobState.SUCCEEDED
        assert running.status("a").reason == "its last checkpoint failed: the disk is full"

    def test_sessions_fail_and_say_to_open_another(self, rig: Rig) -> None:
        rig.join(Role.SESSION, "x").submit(session())
        rig.start("s", "x")
        assert rig.state("s") is JobState.RUNNING
        rig.kill("s0", "s1")
        assert rig.state("s") is JobState.FAILED
        assert rig.status("s").reason.endswith(
            "; it has no checkpoint yet, so the work is lost: open the session again"
        )

    def test_of_the_values_that_its_program_gives_only_those_that_were_not_restored_are_sent(self, rig: Rig) -> None:
        """Fine-tuning with arrays, one of which is new."""
        rig.submit(job(workers=1, restore="base/1", partial_restore=True))
        rig.describe("a", "w0", {"w": GIVEN["w"], "head": GIVEN["w"]})
        create = only(rig.pending, CreateShards)
        rig.pending.clear()
        restored = RestoredCheckpoint(create.sources[0], 0, frozenset("w"), None, state_pb2.ProgressRecord())
        rig.handle(events.ShardsCreated(create.job, restored, effect=create.number))
        rig.enter("a", "w0")
        rig.perform()
        assert rig.state("a") is JobState.PLACING, "head has no value yet"
        rig.crash()
        joined = rig.enter("a", "w0")
        assert (joined.assign_values, joined.restored) == (True, {"w"})
        assert not rig.enter("a", "w0", assigned=True).restored
        assert rig.state("a") is JobState.RUNNING

    def test_a_checkpoint_with_all_epochs_done_is_refused(self, running: Rig) -> None:
        self.save(running)
        running.saved["b", 1] = running.saved["a", 1]
        while running.machine.job("a").data().total.done < 200:
            for worker in ("w0", "w1"):
                lease = running.lease("a", worker)
                if isinstance(lease, Lease):
                    running.lease("a", worker, lease.number)
        self.save(running, step=9)
        done = running.saved["a", 2]
        running.saved["done", 1] = done
        running.handle(events.JobCancelled("a"))
        running.perform()
        running.submit(job("c", epochs=2, restore="done/1"))
        running.start("c", "w0", "w1")
        assert running.state("c") is JobState.FAILED
        assert "nothing is left to do: 2 epochs are done in done/1; ask for at least 3" in running.status("c").reason


def test_a_thousand_workers_cost_one_schedule_and_one_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler looks at every worker. That it does so for each one's entry took most of the time to start."""
    rig = Rig().servers("s0").workers(*(f"w{number}" for number in range(100)))
    rig.submit(job(workers=100))
    schedules: list[float] = []
    real = Scheduler.schedule

    def count(scheduler: Scheduler, now: float) -> None:
        schedules.append(now)
        real(scheduler, now)

    monkeypatch.setattr(Scheduler, "schedule", count)
    for number in range(100):
        rig.describe("a", f"w{number}")
    rig.perform(until=AdmitWorker)
    for number in range(100):
        rig.enter("a", f"w{number}")
    admitted = [effect for effect in rig.pending if isinstance(effect, AdmitWorker)]
    assert len(admitted) == 100
    rig.handle(
        events.OutcomesReceived(
            tuple(events.WorkerAdmitted(it.job, it.assignment, 0, effect=it.number) for it in admitted)
        )
    )
    assert rig.state("a") is JobState.RUNNING
    assert len(schedules) <= 5
