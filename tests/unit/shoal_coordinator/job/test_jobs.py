"""A single job: its figures, its events and its waits. `test_cluster_machine` tests jobs together with members."""

import tracemalloc
from collections.abc import Mapping
from typing import Any

import pytest

from shoal import errors, optim
from shoal._limits import catalogue
from shoal._wire import Lease, NoRange
from shoal._wire.placement import Placement
from shoal.checkpoint_policy import CheckpointChoice
from shoal.consistency import Asynchronous
from shoal.events import EvaluationEnded, LogLine, MetricsReported, StateChanged
from shoal.job import Job
from shoal.status import Evaluation, JobState, Progress, SavedCheckpoint, StepTiming, Timings
from shoal.v1 import state_pb2
from shoal.variables import Variable
from shoal_coordinator.cluster import Candidate, assign_shards, plan_shards
from shoal_coordinator.job.event_log import EventLog
from shoal_coordinator.job.machine import JobMachine
from shoal_coordinator.job.progress import ProgressTotals
from shoal_coordinator.job.submission import Submission
from shoal_coordinator.messages import (
    AdmitWorker,
    CheckpointPublished,
    CreateShards,
    JobDescribed,
    JobRef,
    ProgramDescription,
    RestoredCheckpoint,
    SetLearningRate,
    WorkerReported,
)

START = 1_000.0
VARIABLES = {"w": Variable((8, 4))}


def running(workers: int = 1, samples: int = 100, possible: bool = False, **options: Any) -> JobMachine:
    """A job that runs since START; `possible`: with a folder of checkpoints, to which it can go back."""
    spec = Job("m:f", name="a", workers=workers, consistency=Asynchronous(), **options)
    job = JobMachine.begun(Submission(JobRef("a", 1), spec), START - 5, checkpoints=possible)
    names = [f"w{rank}" for rank in range(workers)]
    for number, name in enumerate(names):
        job.add_worker(name, number + 1, number + 1, START - 4)
        job.describe(JobDescribed("a", name, number + 1, ProgramDescription(VARIABLES, samples)), START - 3)
    shards = assign_shards(plan_shards(VARIABLES, 2), [Candidate("s0", "h:1", 0)])
    job.place(Placement("a", 1, VARIABLES, shards), START - 2)
    job.shards_created(START - 1)
    for number, name in enumerate(names):
        job.join(name, False, START)
        job.admitted({number + 1: 0}, START)
    assert job.state is JobState.RUNNING
    return job


def report(worker: str = "w0", **metrics: Any) -> WorkerReported:
    return WorkerReported("a", worker, 1, **metrics)


def test_a_group_that_matches_no_variable_is_refused() -> None:
    spec = Job(
        "m:f", name="a", optimizer=optim.SGD(0.1, groups=[optim.VariableGroup("w", 2), optim.VariableGroup("*bios", 0)])
    )
    job = JobMachine.begun(Submission(JobRef("a", 1), spec), START)
    job.add_worker("w0", 1, 1, START)
    count = Variable((), "int64", trainable=False, aggregation="sum")
    described = JobDescribed("a", "w0", 1, ProgramDescription(VARIABLES | {"a/bios": count}, 9))
    with pytest.raises(errors.InvalidJob, match=r"a group for '\*bios', .* The trainable variables are 'w'$"):
        job.describe(described, START)
    described = JobDescribed("a", "w0", 1, ProgramDescription(VARIABLES | {"bios": Variable((2,))}, 9))
    assert not job.describe(described, START)[0].conflict


@pytest.mark.parametrize(
    ("program", "says"),
    [("m:f", "the program of job a has no variables"), ("", "a session of job a gives no variables")],
)
def test_a_job_without_variables_is_refused(program: str, says: str) -> None:
    job = JobMachine.begun(Submission(JobRef("a", 1), Job(program, name="a")), START)
    job.add_worker("w0", 1, 1, START)
    with pytest.raises(errors.InvalidJob, match=says):
        job.describe(JobDescribed("a", "w0", 1, ProgramDescription({}, 0)), START)


def test_a_learning_rate_goes_to_the_servers_and_to_later_placements() -> None:
    job, rate = running(possible=True), optim.ConstantLR(0.25)
    [effect] = job.set_learning_rate(rate)
    assert effect == SetLearningRate(job.ref, rate, job.servers)
    job.lose_shards("lost", 0.0, START + 1)
    assert job.set_learning_rate(optim.ConstantLR(0.5)) == [], "no server has the shards"
    job.add_worker("w9", 9, 9, START + 2)
    job.describe(JobDescribed("a", "w9", 9, ProgramDescription(VARIABLES, 100)), START + 2)
    shards = assign_shards(plan_shards(VARIABLES, 2), [Candidate("s0", "h:1", 0)])
    [created] = job.place(Placement("a", 2, VARIABLES, shards), START + 3)
    assert isinstance(created, CreateShards)
    assert created.spec.optimizer == optim.SGD(0.5)
    job.cancel(START + 4)
    with pytest.raises(errors.JobEnded, match="job a is cancelled; only a live job takes a learning rate"):
        job.set_learning_rate(rate)
    with pytest.raises(errors.JobEnded, match="job a is cancelled; only a running job can be saved"):
        job.request_checkpoint(START + 4)


def test_a_learning_rate_of_a_checkpoint_is_told_before_workers_enter() -> None:
    spec, rate = Job("m:f", name="a", restore="b"), optim.ConstantLR(0.25)
    job = JobMachine.begun(Submission(JobRef("a", 1), spec), START, checkpoints=True)
    job.add_worker("w0", 1, 1, START)
    job.describe(JobDescribed("a", "w0", 1, ProgramDescription(VARIABLES, 0)), START)
    job.join("w0", False, START, waits=True)
    shards = assign_shards(plan_shards(VARIABLES, 2), [Candidate("s0", "h:1", 0)])
    job.place(Placement("a", 1, VARIABLES, shards), START)
    totals = state_pb2.ProgressRecord()
    source = CheckpointChoice("b", 1)
    restored = RestoredCheckpoint(source, 7, frozenset(VARIABLES), None, totals, learning_rate=rate)
    told, admitted = job.shards_created(START, restored)
    assert told == SetLearningRate(job.ref, rate, job.servers)
    assert isinstance(admitted, AdmitWorker)


def test_metrics_add_up_over_workers() -> None:
    job = running(workers=2, epochs=3)
    job.report(report(step=4, accepted=4, samples=40, staleness={0: 3, 2: 1}, values={"loss": 2.0}), START + 1)
    job.report(
        report("w1", step=5, accepted=3, rejected=1, dropped=1, samples=30, staleness={7: 3}, values={"loss": 1.5}),
        START + 2,
    )
    progress = job.status(START + 10).progress
    assert (progress.steps, progress.samples, progress.total_samples) == (7, 70, 300)
    assert (progress.rejected, progress.dropped, progress.loss) == (1, 1, 1.5)
    assert (progress.staleness_p50, progress.staleness_max) == (2.0, 7)
    assert progress.samples_per_s == pytest.approx(7.0)
    job.validate()


@pytest.mark.parametrize(
    ("options", "total"),
    [
        ({"max_steps": 4}, 4 * 2 * 10),
        ({"max_steps": 15}, 300),  # the data ends first
        ({"max_steps": 4, "samples": 0}, 0),
    ],
)
def test_how_much_there_is_to_do_ends_with_the_steps_too(options: Mapping[str, Any], total: int) -> None:
    job = running(workers=2, epochs=3, batch_size=10, **options)
    assert job.status(START + 1).progress.total_samples == total


def test_a_repeated_report_counts_once() -> None:
    job = running()
    for _ in range(2):
        job.report(report(step=4, accepted=4, samples=40), START + 1)
    assert job.status(START + 2).progress.steps == 4


def test_reports_are_totals_so_one_whose_answer_was_lost_counts_once() -> None:
    job = running()
    job.report(report(step=4, accepted=4, samples=40, staleness={0: 4}), START + 1)  # its answer was lost
    job.report(report(step=9, accepted=9, samples=90, staleness={0: 5, 1: 4}), START + 2)
    progress = job.status(START + 3).progress
    assert (progress.steps, progress.samples) == (9, 90)
    assert job.timings().staleness == {0: 5, 1: 4}
    metrics = [event for event in job.log.after(0) if isinstance(event, MetricsReported)]
    assert [event.progress.steps for event in metrics] == [4, 9]


def test_the_rate_stands_still_when_the_job_has_ended() -> None:
    job = running()
    job.report(report(step=1, accepted=1, samples=100), START + 5)
    job.finish("w0", "", START + 10)
    assert job.state is JobState.SUCCEEDED
    assert job.status(START + 1_000).progress.samples_per_s == pytest.approx(10.0)


def test_time_without_workers_does_not_count_for_the_rate() -> None:
    job = running(samples=1_000)
    job.report(report(step=1, accepted=1, samples=100), START + 10)
    job.lose("w0", START + 10)
    assert job.status(START + 9_000).progress.samples_per_s == pytest.approx(10.0)
    job.add_worker("w1", 2, 2, START + 9_000)
    job.describe(JobDescribed("a", "w1", 2, ProgramDescription(VARIABLES, 1_000)), START + 9_000)
    job.join("w1", False, START + 9_000)
    assert job.status(START + 9_005).progress.samples_per_s == pytest.approx(10.0), "it does not train yet"
    job.admitted({2: 1}, START + 9_005)
    progress = job.status(START + 9_015).progress
    assert progress.samples_per_s == pytest.approx(5.0)
    assert progress.seconds_left == pytest.approx(180.0)


def test_time_that_is_lost_with_the_shards_does_not_count_for_the_rate() -> None:
    job = running(samples=1_000, possible=True)
    job.report(report(step=1, accepted=1, samples=100), START + 10)
    done = progress_at_the_cut(job)
    saved = SavedCheckpoint(1, step=1, nbytes=1, time=START + 10)
    job.checkpoint_published(CheckpointPublished(1, JobRef("a", 1), saved))
    job.lose_shards("s0 is gone", 60.0, START + 5_000)
    assert job.status(START + 5_100).progress.samples_per_s == 0.0
    restored = RestoredCheckpoint(CheckpointChoice("a", 1), 1, frozenset(VARIABLES), None, done, 0)
    restart(job, restored, START + 6_000)
    assert job.status(START + 6_010).progress.samples_per_s == pytest.approx(5.0), "100 samples in 10 s and 10 s"


def test_samples_of_another_job_do_not_count_for_the_rate_after_a_restart_either() -> None:
    """The job lost its shards before it had a checkpoint of its own, so it continues from the other job's again."""
    job = running(samples=1_000, possible=True)
    job.lose_shards("s0 is gone", 60.0, START + 50)
    totals = ProgressTotals()
    totals.add(report(step=5, accepted=5, samples=500))
    restored = RestoredCheckpoint(CheckpointChoice("b", 3), 5, frozenset(VARIABLES), None, totals.to_proto(), 0)
    restart(job, restored, START + 100)
    job.report(WorkerReported("a", "w1", 2, step=6, accepted=1, samples=100), START + 110)
    progress = job.status(START + 110).progress
    assert (progress.samples, progress.earlier_steps) == (600, 5)
    assert progress.samples_per_s == pytest.approx(10.0)


def test_steps_that_are_lost_at_restarts_are_counted_apart() -> None:
    job = running(samples=1_000, possible=True)
    job.report(report(step=6, accepted=6, samples=60), START + 10)
    totals = progress_at_the_cut(job)
    job.report(report(step=10, accepted=10, samples=100), START + 20)
    saved = SavedCheckpoint(1, step=6, nbytes=1, time=START + 10)
    job.checkpoint_published(CheckpointPublished(1, JobRef("a", 1), saved))
    restored = RestoredCheckpoint(CheckpointChoice("a", 1), 6, frozenset(VARIABLES), None, totals, 0)
    for restarts in (1, 2):
        job.lose_shards("s0 is gone", 60.0, START + 50)
        assert (steps(job, START + 51)) == (0, 4 * (restarts - 1) + 10)
        restart(job, restored, START + 60)
        assert steps(job, START + 61) == (6, 4 * restarts)
        job.report(WorkerReported("a", "w1", 2, step=10, accepted=4), START + 70)
        assert steps(job, START + 71) == (10, 4 * restarts)
        job.lose("w1", START + 72)
    assert progress_at_the_cut(job).lost_steps == 0, "a checkpoint is also read by later jobs"


def steps(job: JobMachine, now: float) -> tuple[int, int]:
    progress = job.status(now).progress
    return progress.steps, progress.lost_steps


def progress_at_the_cut(job: JobMachine) -> Any:
    return job.held().progress_totals


def restart(job: JobMachine, restored: RestoredCheckpoint, now: float) -> None:
    """Lets a job that lost its shards continue from a checkpoint, with a new worker."""
    job.add_worker("w1", 2, 2, now)
    job.describe(JobDescribed("a", "w1", 2, ProgramDescription(VARIABLES, 1_000)), now)
    shards = assign_shards(plan_shards(VARIABLES, 2), [Candidate("s0", "h:1", 0)])
    job.place(Placement("a", 2, VARIABLES, shards), now)
    job.shards_created(now, restored)
    job.join("w1", False, now)
    job.admitted({2: restored.step}, now)
    assert job.state is JobState.RUNNING


def test_steps_before_the_checkpoint_of_another_job_are_known() -> None:
    totals = ProgressTotals()
    totals.add(report(step=4, accepted=4, samples=40))
    totals.begin()
    totals.add(report(step=6, accepted=2, samples=20))
    for found in (totals, ProgressTotals.from_proto(totals.to_proto())):
        progress = found.progress(total_samples=0, epoch=0, seconds=2.0)
        assert (progress.steps, progress.earlier_steps, progress.samples_per_s) == (6, 4, 10.0)


def test_events_in_order() -> None:
    job = running()
    job.report(report(step=2, accepted=2, samples=8, values={"loss": 0.5}, log=("hello", "there")), START + 1)
    job.report(report(log=("only a line",)), START + 2)
    job.cancel(START + 3, "enough\x1b[2J of it\nmore")
    assert job.status(START + 3).reason == "enough?[2J of it"
    events = job.log.after(0)
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert [event.time for event in events] == sorted(event.time for event in events)
    states = [event.state.value for event in events if isinstance(event, StateChanged)]
    assert states == ["pending", "starting", "placing", "running", "cancelled"]
    assert [str(event) for event in events if isinstance(event, LogLine)] == [
        "w0: hello",
        "w0: there",
        "w0: only a line",
    ]
    [metrics] = [event for event in events if isinstance(event, MetricsReported)]
    assert (metrics.step, metrics.values, metrics.progress.samples) == (2, {"loss": 0.5}, 8)
    assert job.log.ended


def test_a_reason_to_wait_is_logged_once() -> None:
    job = running()
    before = job.log.last
    for _ in range(3):
        job.wait_for("waiting for workers: 0 of 1", START)
    job.wait_for("", START)
    assert job.log.last == before + 1
    assert job.status(START).reason == ""


def test_an_ended_job_stays_ended() -> None:
    job = running()
    job.fail("first", START + 1)
    assert job.cancel(START + 2) == []
    assert job.fail("second", START + 3) == []
    status = job.status(START + 4)
    assert (status.state, status.reason, status.finished_at) == (JobState.FAILED, "first", START + 1)


def test_data_is_leased_only_while_it_runs() -> None:
    job = JobMachine.begun(Submission(JobRef("a", 1), Job("m:f", name="a")), START)
    job.add_worker("w0", 1, 1, START)
    assert job.lease("w0", 0, START) is NoRange.WAIT


def test_range_size_is_the_jobs_or_a_good_one() -> None:
    for job, size in ((running(batch_size=4, range_size=8), 8), (running(batch_size=4, samples=1000), 124)):
        lease = job.lease("w0", 0, START)
        assert isinstance(lease, Lease)
        assert lease.range.stop == size


def test_every_sample_of_every_epoch_is_leased() -> None:
    job = running(workers=2, epochs=2, batch_size=10)
    seen, done, group = [], {"w0": 0, "w1": 0}, {"w0", "w1"}
    while group:
        for worker in sorted(group):
            answer = job.lease(worker, done[worker], START)
            if isinstance(answer, Lease):
                seen.append((answer.range.epoch, answer.range.start))
                done[worker] = answer.number
            elif answer is NoRange.FINISHED:
                group.remove(worker)
    assert seen == [(epoch, start) for epoch in (0, 1) for start in range(0, 100, 10)]
    assert job.status(START).progress.epoch == 1


def test_the_log_forgets_the_oldest() -> None:
    log = EventLog(max_events=3, max_log_bytes=10)
    for text in ("aaaa", "bbbb", "cccc"):
        log.append(LogLine(log.next, START, "w0", text))
        log.validate()
    assert [event.text for event in log.after(0) if isinstance(event, LogLine)] == ["bbbb", "cccc"]
    assert [event.sequence for event in log.after(2)] == [3]
    assert log.after(3) == log.after(99) == []
    for _ in range(4):
        log.append(StateChanged(log.next, START, JobState.RUNNING, ""))
        log.validate()
    assert [event.sequence for event in log.after(0)] == [2, 3, 5, 6, 7]
    assert not log.ended
    log.append(StateChanged(log.next, START, JobState.FAILED, "x"))
    assert log.ended


def test_the_log_takes_a_bounded_number_of_bytes() -> None:
    """The largest reports that a worker may send: 256 metrics with names of 256 bytes."""
    log = EventLog()
    tracemalloc.start()
    try:
        for step in range(400):
            values = {f"{step:>6}{number:>250}": 0.5 for number in range(256)}
            log.append(MetricsReported(log.next, START, "w0", step, values, Progress()))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    log.validate()
    assert held < catalogue.JOB_EVENT_BYTES.default * 1.1
    last = log.after(0)[-1]
    assert isinstance(last, MetricsReported)
    assert last.step == 399


def test_reasons_do_not_fill_the_log_and_the_last_one_stays() -> None:
    removed: list[int] = []
    log = EventLog(removed.append, max_stored_bytes=10_200)
    for state in (JobState.PENDING, JobState.RUNNING, JobState.FAILED):
        log.append(StateChanged(log.next, START, state, "x" * 4_500))
        log.validate()
    assert [event.sequence for event in log.after(0)] == [2, 3]
    assert removed == [1, 2, 3, 1], "the oldest one's record goes"
    other = EventLog(max_stored_bytes=100)
    other.restore([it for it in log.after(0) if isinstance(it, StateChanged)], log.reserved_sequence)
    other.validate()
    assert [event.sequence for event in other.after(0)] == [3]
    assert other.ended


def test_metrics_and_log_lines_do_not_displace_stored_events() -> None:
    records: list[int] = []
    log = EventLog(records.append, max_events=3)
    for number in range(1, 5):
        log.append(EvaluationEnded(log.next, START, "w0", Evaluation(number, 10 * number, {"auc": 0.5}), True))
        for _ in range(5):
            log.append(LogLine(log.next, START, "w0", "a line"))
            log.validate()
    assert [event.sequence for event in log.after(0)] == [7, 13, 19, 22, 23, 24]
    assert [event.sequence for event in log.after(13)] == [19, 22, 23, 24]
    assert list(log.kept) == [7, 13, 19]
    assert records == [1, 7, 13, 19, 1], "the oldest one's record goes"


def test_timings_are_kept_until_the_job_restarts() -> None:
    job = running(workers=2, possible=True)
    job.report(report(timings=(StepTiming(3, START, compute=0.1),), staleness={4: 1}), START + 1)
    job.report(report("w1", timings=(StepTiming(3, START, compute=0.2),)), START + 1)
    job.lose("w1", START + 2)
    assert [(worker, timing.compute) for worker, (timing,) in job.timings().steps.items()] == [("w0", 0.1), ("w1", 0.2)]
    assert job.timings().staleness == {4: 1}
    assert job.timings().last_reported_at == {"w0": START + 1, "w1": START + 1}
    job.validate()
    job.lose_shards("s0 died", 1.0, START + 3)
    assert job.timings() == Timings()
