"""Effect runner without servers: the queue of each effect, and the checkpoint failures that mean lost shards."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shoal import errors, optim
from shoal._checkpoint.local_storage import LocalStorage
from shoal._wire.placement import Placement
from shoal.job import Job
from shoal.v1 import state_pb2
from shoal_coordinator.effects import checkpoint_commit, checkpoint_cut, shard_effects, worker_effects
from shoal_coordinator.effects.effect_runner import EffectReport, EffectRunner
from shoal_coordinator.effects.failures import failure_of
from shoal_coordinator.effects.storage_reads import StorageReads
from shoal_coordinator.messages import (
    AdmitWorker,
    CheckpointsScanned,
    CommitCheckpoint,
    CreateShards,
    CutTaken,
    DropShards,
    Effect,
    HoldResult,
    JobRef,
    RemoveWorker,
    ScanCheckpoints,
    ServerRef,
    SetLearningRate,
    TakeCut,
    events,
)
from shoal_coordinator.messages.events import CheckpointFailed, WorkerAdmitted

A, B = JobRef("a", 1), JobRef("b", 2)


class FakeHost:
    """Takes outcomes in."""

    def __init__(self) -> None:
        self.outcomes: queue.Queue[EffectReport] = queue.Queue()

    def report(self, outcome: EffectReport) -> None:
        self.outcomes.put(outcome)

    def published(self, event: events.CheckpointPublished) -> bool:
        raise NotImplementedError

    def held(self, event: events.CutHeld) -> HoldResult:
        raise NotImplementedError

    def report_all(self, outcomes: Sequence[EffectReport]) -> None:
        for outcome in outcomes:
            self.report(outcome)

    def wanted(self, effect: int, server: ServerRef) -> bool:
        return True

    def is_live(self, job: JobRef) -> bool:
        return True

    def incarnation(self, server: ServerRef) -> int:
        return 1

    def next(self) -> EffectReport:
        return self.outcomes.get(timeout=30)


class Hanging(LocalStorage):
    """A folder that does not answer until it is told to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.answers = threading.Event()

    def names(self, path: Sequence[str]) -> list[str]:
        assert self.answers.wait(30)
        return super().names(path)


@pytest.fixture
def machine() -> FakeHost:
    return FakeHost()


@pytest.fixture
def folder(tmp_path: Path) -> Hanging:
    return Hanging(tmp_path)


@pytest.fixture
def runner(machine: FakeHost, folder: Hanging) -> Iterator[EffectRunner]:
    runner = EffectRunner(machine, storage=folder)
    yield runner
    folder.answers.set()
    runner.stop()


def admits(job: JobRef, number: int) -> AdmitWorker:
    return AdmitWorker(job, "w0", 1, 0, 3, servers=(), number=number)


PLACEMENT, SPEC = Placement("a", 1, {}, ()), Job("m:f", name="a")


def writes(number: int) -> CommitCheckpoint:
    cut = CutTaken(A, 1, 0, 0, 0.0, None, state_pb2.ProgressRecord())
    return CommitCheckpoint(A, PLACEMENT, SPEC, cut, number=number)


def test_a_storage_that_hangs_does_not_delay_training(runner: EffectRunner, machine: FakeHost, folder: Hanging) -> None:
    """It delays neither the job itself nor another one, however many effects wait for the storage."""
    hanging = [ScanCheckpoints(JobRef(f"job-{number}", number), number=100 + number) for number in range(20)]
    runner.submit([ScanCheckpoints(A, number=1), admits(A, 2), *hanging, admits(B, 3)])
    admitted = {machine.next(), machine.next()}
    assert admitted == {WorkerAdmitted(A, 3, 0, effect=2), WorkerAdmitted(B, 3, 0, effect=3)}
    folder.answers.set()
    counted = [machine.next() for _ in range(21)]
    assert CheckpointsScanned(A, 0, effect=1) in counted


def test_a_scan_of_a_storage_that_hangs_fails_after_its_deadline(machine: FakeHost, folder: Hanging) -> None:
    runner = EffectRunner(machine, storage=folder, saves=StorageReads(0.0))
    try:
        runner.submit([ScanCheckpoints(A, number=1), ScanCheckpoints(A, number=2)])
        first, second = machine.next(), machine.next()
        assert isinstance(first, events.CheckpointFailed)
        assert first.effect == 1
        assert f"the checkpoint storage did not return {folder.url}/a within 0 s; check the storage" in first.reason
        assert isinstance(second, events.CheckpointFailed)
        assert f"an earlier access to {folder.url}/a for job a hangs; check the storage" in second.reason
    finally:
        folder.answers.set()
        runner.stop()


def test_a_scan_waits_for_effects_of_an_earlier_job_of_the_name(
    runner: EffectRunner, machine: FakeHost, folder: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose checkpoint may become whole meanwhile."""

    def write(*_: object) -> events.EffectOutcome:
        folder.write(("a", "00000005", "shard"), [b"x"])
        return events.EffectDone(effect=1)

    monkeypatch.setattr(checkpoint_commit, "commit", write)
    folder.answers.set()
    runner.submit([writes(1), ScanCheckpoints(JobRef("a", 2), number=2)])
    assert [machine.next(), machine.next()] == [
        events.EffectDone(effect=1),
        CheckpointsScanned(JobRef("a", 2), 5, effect=2),
    ]


def _named(error: errors.ShoalError) -> str:
    return type(error).__name__


@pytest.mark.parametrize(
    ("error", "shards_lost"),
    [
        (errors.UnknownJob("no such job here"), True),
        (errors.StaleGeneration("it is at generation 7 here"), True),
        (errors.UnknownCheckpoint("not begun here"), False),
        (errors.Unreachable("nobody answers"), False),
        (errors.Cancelled("its lease ran out"), False),
        (errors.StorageFailed("the disk is full"), False),
    ],
    ids=lambda it: _named(it) if isinstance(it, errors.ShoalError) else str(it),
)
def test_after_which_failures_of_a_checkpoint_the_shards_are_lost(
    runner: EffectRunner,
    machine: FakeHost,
    monkeypatch: pytest.MonkeyPatch,
    error: errors.ShoalError,
    shards_lost: bool,
) -> None:
    def fail(*_: object) -> Callable[[], None]:
        raise error

    monkeypatch.setattr(checkpoint_commit, "commit", fail)
    runner.submit([writes(4)])
    assert machine.next() == CheckpointFailed(A, error.message, shards_lost, effect=4)


def test_the_log_says_what_failed_where_and_what_to_do(
    runner: EffectRunner, machine: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def admit(*_: object) -> None:
        raise errors.Unreachable("server-1 at h:1 did not answer")

    monkeypatch.setattr(worker_effects, "admit", admit)
    with capture_logs() as logged:
        runner.submit([AdmitWorker(A, "w0", 1, 0, 3, servers=(ServerRef("server-1", "h:1"),), number=1)])
        machine.next()
    (warned,) = [it for it in logged if it["log_level"] == "warning"]
    assert warned == {
        "event": "worker w0 could not be admitted",
        "log_level": "warning",
        "job": "a",
        "servers": ("server-1",),
        "reason": "server-1 at h:1 did not answer",
        "advice": "the job restarts if it needs this; see `shoal status` for lost servers, and start them again",
    }


def test_each_failed_effect_names_what_failed_and_what_to_do() -> None:
    server = (ServerRef("server-1", "h:1"),)
    cases: list[tuple[Effect, Exception, str, str]] = [
        (DropShards(A, server), errors.Unreachable("away"), "shards could not be dropped", "restart the server"),
        (ScanCheckpoints(A), errors.StorageFailed("full"), "could not be listed", "check the checkpoint storage"),
        (TakeCut(A, 1, server, 7), errors.Unreachable("away"), "the cut of checkpoint 7", "training continues"),
        (
            writes(1),
            errors.StorageFailed("full"),
            "checkpoint 1 could not be completed",
            "check the checkpoint storage",
        ),
        (CreateShards(A, PLACEMENT, SPEC), errors.StorageFailed("no"), "be created", "this is tried again"),
        (CreateShards(A, PLACEMENT, SPEC), errors.Overloaded("full"), "be created", "the job fails"),
        (RemoveWorker(A, "w0", 1, server), ValueError("no"), "worker w0 could not be removed", "the job fails"),
        (SetLearningRate(A, optim.ConstantLR(1.0), server), errors.Unreachable("no"), "learning rate", "restarts if"),
    ]
    for effect, error, what, advice in cases:
        failure = failure_of(effect, error)
        assert what in failure.what
        assert advice in failure.advice


@pytest.mark.parametrize(
    "change",
    [RemoveWorker(A, "w1", 1, (), number=2), SetLearningRate(A, optim.ConstantLR(0.5), (), number=2)],
    ids=lambda change: type(change).__name__,
)
def test_a_cut_is_taken_on_all_servers_before_a_later_change_reaches_any(
    runner: EffectRunner, machine: FakeHost, monkeypatch: pytest.MonkeyPatch, change: Effect
) -> None:
    """A server's commit gate does not hold these changes back: the order of the job's effects keeps the cut whole."""
    saved, seen = threading.Event(), list[str]()

    def take_cut(effect: TakeCut, *_: object) -> CutTaken:
        assert saved.wait(30)
        seen.append("cut")
        return CutTaken(A, 1, 0, 0, 0.0, None, state_pb2.ProgressRecord(), effect=effect.number)

    monkeypatch.setattr(checkpoint_cut, "take_cut", take_cut)
    monkeypatch.setattr(worker_effects, "remove", lambda *_: seen.append("change"))
    monkeypatch.setattr(shard_effects, "set_learning_rate", lambda *_: seen.append("change"))
    runner.submit([TakeCut(A, 1, (), 1, number=1), change, admits(B, 3)])
    assert machine.next() == WorkerAdmitted(B, 3, 0, effect=3), "another job does not wait"
    assert seen == []
    saved.set()
    machine.next(), machine.next()
    assert seen == ["cut", "change"]
