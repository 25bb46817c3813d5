"""Cluster that is restored from its store: scripted cases, and random ones in which a restored twin runs beside it."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from shoal import errors, optim
from shoal._checkpoint.catalogue import Catalogue
from shoal._checkpoint.local_storage import LocalStorage
from shoal._wire.limits import MAX_LEAD
from shoal.checkpoint_policy import NEVER, CheckpointPolicy
from shoal.evaluation_policy import EvaluationPolicy
from shoal.events import CheckpointEnded, LogLine
from shoal.status import JobState, JobStatus, Progress, Role, StepTiming
from shoal.v1 import job_pb2, state_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal_coordinator.cluster import Cluster, ClusterPolicy
from shoal_coordinator.effects import checkpoint_commit
from shoal_coordinator.effects.server_calls import ServerCalls
from shoal_coordinator.job import event_log
from shoal_coordinator.messages import (
    AdmitWorker,
    CommitCheckpoint,
    CreateShards,
    DropShards,
    HoldResult,
    RemoveWorker,
    ScanCheckpoints,
    SetLearningRate,
    TakeCheckpointResult,
    TakeCut,
    events,
)
from shoal_coordinator.persistence.cluster_records import ClusterRecords, restored
from support.clusters.cluster_rig import (
    FIXED,
    GIVEN,
    HEARTBEAT_TIMEOUT_S,
    KEEPING,
    POLICY,
    START,
    Rig,
    Voyage,
    job,
    only,
    promised,
    session,
)
from support.run_lengths import draws


@pytest.fixture
def rig() -> Rig:
    return Rig().servers("s0", "s1").workers("w0", "w1")


def test_an_empty_store_is_no_cluster() -> None:
    assert restored({}, POLICY, START) is None


def test_a_job_goes_on_where_it_was(rig: Rig) -> None:
    rig.submit(job(epochs=2))
    rig.start("a", "w0", "w1")
    held, done = rig.lease("a", "w1"), rig.lease("a", "w0")
    rig.lease("a", "w0", done.number)
    before = rig.status("a")
    assignments = rig.beat("w0", "w1")
    rig.crash()
    assert rig.status("a") == before
    assert rig.beat("w0", "w1") == assignments, "nobody starts again"
    assert rig.machine.status(rig.now).cluster == "reef"
    assert rig.lease("a", "w1") == held
    assert rig.lease("a", "w0").number > held.number
    assert rig.machine.job("a").placed.generation == rig.machine.generation == 1


def test_no_number_is_given_out_twice(rig: Rig) -> None:
    rig.submit(job())
    rig.start("a", "w0", "w1")
    [assignment] = rig.beat("w0")
    rig.handle(events.JobCancelled("a"))
    rig.perform()
    rig.handle(events.JobDropped("a"))
    numbers = [effect.number for effect in rig.perform()]
    rig.leave("w1")
    last = rig.lives["w1"]
    rig.crash().workers("w1")
    assert rig.lives["w1"] > last
    rig.submit(job())
    assert rig.beat("w0")[0].number > assignment.number
    rig.start("a", "w0", "w1")
    assert rig.machine.job("a").placed.generation == 2
    assert min(effect.number for effect in rig.performed[-3:]) > max(numbers)


def test_pending_effects_are_repeated_in_order_after_a_restart(rig: Rig) -> None:
    rig.submit(job(workers=1))
    rig.describe("a", "w0")
    [created] = rig.pending
    rig.crash()
    assert rig.pending == [created]
    rig.perform()
    rig.enter("a", "w0")
    rig.handle(events.JobCancelled("a"))
    rig.handle(events.JobDropped("a"))
    left = list(rig.pending)
    assert [type(effect) for effect in left] == [AdmitWorker, RemoveWorker, DropShards]
    rig.crash()
    assert rig.pending == left
    rig.perform()
    assert rig.crash().pending == []
    assert [key for key in rig.disk.load() if not key.startswith("member/")] == ["cluster"], "nothing is left of it"


def test_how_far_a_removed_worker_had_come_is_asked_once(rig: Rig) -> None:
    """A server that has released it would say 0, and its last push would count on some servers only."""
    rig.submit(job(workers=1))
    rig.start("a", "w0")
    rig.handle(events.JobCancelled("a"))
    [removed] = rig.pending
    rig.handle(events.WorkerFenced(removed.number, 7))
    assert isinstance(removed, RemoveWorker)
    assert rig.crash().pending == [replace(removed, committed_steps=7)]


def test_leases_count_from_the_restart(rig: Rig) -> None:
    rig.submit(job())
    rig.start("a", "w0", "w1")
    rig.now += 3600
    rig.crash()
    rig.pass_time(HEARTBEAT_TIMEOUT_S - 0.1, "s1")
    assert rig.state("a") is JobState.RUNNING
    rig.pass_time(0.2, "s1")
    assert rig.status("a").state is JobState.FAILED
    assert "server s1 is lost" in rig.status("a").reason


def test_members_with_short_leases_get_time_to_come_back(rig: Rig) -> None:
    found = restored(rig.disk.load(), ClusterPolicy(heartbeat_timeout_s=1.0), rig.now)
    assert found
    for later in range(4, 49, 4):
        found.handle(events.TimePassed(), rig.now + later / 10)
    assert all(member.alive for member in found.status(rig.now + 4.8).members)
    found.handle(events.TimePassed(), rig.now + 5.2)
    assert not any(member.alive for member in found.status(rig.now + 5.2).members)


def test_jobs_whose_servers_are_gone_end_and_say_why(rig: Rig) -> None:
    """A coordinator on the store of last week, with nobody there."""
    rig.submit(job("ran"))
    rig.start("ran", "w0", "w1")
    rig.submit(job("waits"))
    rig.now += 7 * 86_400
    rig.crash()
    rig.pass_time(HEARTBEAT_TIMEOUT_S + 1.5, "s0", "s1", "w0", "w1")
    assert "is lost, and with it the last copy" in rig.status("ran").reason
    assert rig.status("waits").reason == "waiting for workers: 0 of 2"
    assert rig.pending == [], "nobody is waited for"


def test_the_dead_stay_dead(rig: Rig) -> None:
    rig.kill("w1")
    rig.crash()
    with pytest.raises(errors.Fenced):
        rig.beat("w1")
    [dead] = [member for member in rig.machine.status(rig.now).members if not member.alive]
    assert dead.silent_s == pytest.approx(HEARTBEAT_TIMEOUT_S + 1.5)


def test_a_session_has_its_one_part(rig: Rig) -> None:
    rig.join(Role.SESSION, "x")
    rig.submit(session())
    rig.start("s", "x", samples=0)
    rig.crash()
    assert rig.enter("s", "x").ready
    rig.finish("s", "x")
    rig.submit(session("t"))
    rig.crash()
    with pytest.raises(errors.Fenced, match="was already in a job"):
        rig.enter("t", "x")


def test_given_values_are_not_asked_for_again(rig: Rig) -> None:
    rig.submit(job())
    for worker in ("w0", "w1"):
        rig.describe("a", worker, GIVEN)
    rig.perform()
    assert rig.crash().enter("a", "w0").assign_values
    rig.enter("a", "w0", assigned=True)
    assert not rig.crash().enter("a", "w0").assign_values


def test_a_repeated_submission_is_known(rig: Rig) -> None:
    first = rig.handle(events.JobSubmitted(job(), "token"))
    rig.crash()
    assert rig.handle(events.JobSubmitted(job(), "token")) == first
    with pytest.raises(errors.JobExists):
        rig.submit(job())


def test_the_submitter_of_a_job_is_known_and_comes_with_its_assignment(rig: Rig) -> None:
    first = rig.handle(events.JobSubmitted(job(), "token", "alice"))
    for crashed in (False, True):
        if crashed:
            rig.crash()
        assignment = rig.handle(events.HeartbeatReceived("w0", rig.lives["w0"])).assignment
        assert assignment is not None
        assert (assignment.job, assignment.submitter) == ("a", "alice")
        assert rig.handle(events.JobSubmitted(job(), "token", "alice")) == first
        with pytest.raises(errors.JobExists):
            rig.handle(events.JobSubmitted(job(), "token", "bob"))


def test_registering_again_is_the_same_life(rig: Rig) -> None:
    rig.crash()
    for number, name in enumerate(("s0", "s1", "w0", "w1"), start=1):
        member = rig.machine.find_member(name)
        assert member
        registration = member.registration
        assert registration.process == f"p{number}"
        assert rig.handle(events.RegistrationReceived(registration)).incarnation == rig.lives[name]


def test_reports_restore_progress_that_was_not_written(rig: Rig) -> None:
    rig.submit(job())
    rig.start("a", "w0", "w1")
    rig.report("a", "w0", accepted=5, samples=50, staleness={0: 5}, values={"loss": 1.0})
    rig.report("a", "w1", accepted=7, samples=70, staleness={1: 7}, values={"loss": 0.5})
    rig.finish("a", "w0")
    rig.report("a", "w1", accepted=9, samples=90, staleness={1: 9})
    rig.crash()
    progress = rig.status("a").progress
    assert (progress.steps, progress.samples, progress.loss) == (5, 50, 0.5), "those of the worker that has left"
    rig.report("a", "w1", accepted=11, samples=110, staleness={1: 9, 2: 2})
    progress = rig.status("a").progress
    assert (progress.steps, progress.samples) == (16, 160)
    assert rig.machine.job("a").timings().staleness == {0: 5, 1: 9, 2: 2}
    rig.finish("a", "w1")
    assert rig.crash().status("a").progress.steps == 16


def test_a_checkpoint_keeps_the_progress_of_workers_that_do_not_wait_for_the_next_coordinator() -> None:
    rig = Rig(KEEPING).servers("s0", "s1").workers("w0")
    rig.submit(job(workers=1))
    rig.start("a", "w0")
    rig.report("a", "w0", accepted=5, samples=50)
    rig.handle(events.CheckpointRequested("a"))
    rig.perform()
    rig.report("a", "w0", accepted=7, samples=70)
    rig.crash()
    rig.kill("w0")
    progress = rig.status("a").progress
    assert (progress.steps, progress.samples) == (5, 50)


def test_counts_beyond_the_wire_do_no_harm(rig: Rig) -> None:
    rig.submit(job())
    rig.start("a", "w0", "w1")
    for worker in ("w0", "w1"):
        rig.report("a", worker, samples=2**64 - 1, staleness={0: 2**64 - 1})
        rig.finish("a", worker)
    assert rig.crash().status("a").progress.samples == 2**64 - 1


FAR = 2**53 - 1


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("first", [0, 10**12])
def test_a_report_of_a_step_that_no_worker_can_have_reached_is_refused(rig: Rig, first: int, restarts: bool) -> None:
    rig.submit(job(evaluation=EvaluationPolicy(every_steps=10, metric="loss")))
    rig.start("a", "w0", "w1", step=first)  # where the servers admit a worker, as after a restore
    rig.report("a", "w0", step=first + 3, accepted=3)
    if restarts:
        rig.crash()
    before = rig.status("a").progress.steps
    for name in ("step", "accepted", "rejected", "dropped"):
        with pytest.raises(errors.BadRequest, match=f"w0 reports step {FAR} of job a.*the limit is now .*MAX_LEAD"):
            rig.report("a", "w0", **{name: FAR})
    with pytest.raises(errors.BadRequest, match="MAX_LEAD"):
        rig.report("a", "w0", timings=(StepTiming(3, 0.0), StepTiming(FAR, 0.0)))
    with pytest.raises(errors.BadRequest, match="MAX_LEAD"):
        rig.ask("a", "w0", FAR)
    with pytest.raises(errors.BadRequest, match="MAX_LEAD"):
        rig.report("a", "w0", step=first + 3 + MAX_LEAD + 1)
    assert rig.status("a").progress.steps == before
    assert rig.ask("a", "w1", first + 11).number == 1, "evaluations go on"


def test_a_worker_that_trained_for_long_without_the_coordinator_may_report(rig: Rig) -> None:
    rig.submit(job())
    rig.start("a", "w0", "w1")
    rig.report("a", "w0", step=3, accepted=3)
    rig.now += 7 * 86_400.0
    rig.crash()
    steps = 7 * 86_400 * 5_000
    rig.report("a", "w0", step=steps, accepted=steps)
    rig.report("a", "w1", step=steps + 2, accepted=steps)
    assert rig.status("a").progress.steps >= 2 * steps


class TestEvents:
    def test_changes_of_state_survive(self, rig: Rig) -> None:
        rig.submit(job())
        rig.start("a", "w0", "w1")
        rig.report("a", "w0", log=("a line",))
        rig.handle(events.JobCancelled("a"))
        history = rig.history("a")
        rig.crash()
        assert rig.history("a") == history
        assert rig.machine.job("a").log.ended
        assert not any(isinstance(found, LogLine) for found in rig.machine.job("a").log.after(0))

    @pytest.mark.parametrize("fails", [False, True])
    def test_the_outcome_of_a_requested_checkpoint_survives(self, rig: Rig, fails: bool) -> None:
        """Its end is decided, and the coordinator dies before it has told anybody."""
        rig.policy = KEEPING
        rig.crash().submit(job(checkpoints=NEVER))
        rig.start("a", "w0", "w1")
        attempt = rig.handle(events.CheckpointRequested("a"))
        if fails:
            cut = rig.pending.pop()
            rig.handle(events.CheckpointFailed(cut.job, "the disk is full", effect=cut.number))
        rig.perform()
        told = rig.machine.job("a").log.after(attempt.after)
        rig.crash()
        assert rig.machine.job("a").log.after(attempt.after) == told
        [ended] = told
        assert isinstance(ended, CheckpointEnded)
        assert (ended.attempt, ended.saved, ended.failure) == (
            attempt.number,
            rig.status("a").checkpoint,
            "the disk is full" if fails else "",
        )

    def test_a_learning_rate_and_its_effect_survive(self, rig: Rig) -> None:
        rig.submit(job())
        rig.start("a", "w0", "w1")
        rig.handle(events.LearningRateRequested("a", optim.CosineLR(0.5, 10)))
        [effect] = rig.pending
        rig.crash()
        assert rig.pending == [effect]
        assert isinstance(effect, SetLearningRate)
        assert effect.learning_rate == optim.CosineLR(0.5, 10)

    def test_no_number_comes_twice(self, rig: Rig) -> None:
        rig.submit(job())
        rig.start("a", "w0", "w1")
        for _ in range(3):
            rig.report("a", "w0", log=("a line",) * 1_000)
            seen = rig.machine.job("a").log.last
            rig.crash()
            rig.report("a", "w0", log=("another",))
            [fresh] = rig.machine.job("a").log.after(seen)
            assert isinstance(fresh, LogLine)
            assert fresh.text == "another"
            assert seen < fresh.sequence <= seen + event_log.NUMBERS_AHEAD + 1

    def test_numbers_are_set_aside_ahead_of_time(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(event_log, "NUMBERS_AHEAD", 10)
        rig.submit(job())
        rig.start("a", "w0", "w1")
        written = []
        for _ in range(40):
            rig.report("a", "w0", log=("a line",))
            written.append(state_pb2.JobRecord.FromString(rig.disk.load()["job/1/state"]).reserved_sequence)
            assert written[-1] >= rig.machine.job("a").log.last
        assert len(set(written)) == 5, "not at each line"

    def test_dropped_events_leave_the_store(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        rig.submit(job())
        log = rig.machine.job("a").log
        log.max_events = 5
        for _ in range(6):
            rig.handle(events.EffectDone(effect=0))
            rig.machine.job("a").wait_for("one thing", rig.now)
            rig.machine.job("a").wait_for("another", rig.now)
        rig.write()
        kept = [key for key in rig.disk.load() if key.startswith("job/1/event/")]
        assert sorted(int(key.rpartition("/")[2]) for key in kept) == [event.sequence for event in log.after(0)]
        assert len(kept) == 5


def test_polling_writes_nothing(rig: Rig) -> None:
    rig.submit(job(workers=2))
    rig.start("a", "w0", "w1", samples=32)
    rig.lease("a", "w0")
    for poll in (
        lambda: rig.machine.handle(events.TimePassed(), rig.now),
        lambda: rig.lease("a", "w1"),
        lambda: rig.lease("a", "w0"),
        lambda: rig.enter("a", "w0"),
        lambda: rig.report("a", "w0", accepted=3, values={"loss": 1.0}, log=("x",)),
        lambda: rig.machine.status(rig.now),
    ):
        before = rig.disk.load()
        poll()
        assert not rig.machine.changed
        assert rig.disk.load() == before


@pytest.mark.parametrize(
    ("key", "record", "said"),
    [
        ("job/1/spec", b"", "no name"),
        ("job/1/spec", b"\xff\xff", "job/1/spec is invalid"),
        ("job/1/state", state_pb2.JobRecord().SerializeToString(), "contradict"),
        ("job/1/nothing", b"", "no record 'nothing'"),
        ("job/one/spec", b"", "job/one/spec is invalid"),
        ("member/w0", b"", "member/w0 is invalid"),
        ("effect/9", b"", "effect/9 is invalid"),
        ("what/9", b"", "kind is unknown"),
        ("job/1/plan", state_pb2.PlanRecord(samples=3).SerializeToString(), "contradict"),
        ("job/1/ledger", state_pb2.LedgerRecord(samples=3, epochs=1).SerializeToString(), "contradict"),
        ("job/1/event/1", job_pb2.Event(sequence=1).SerializeToString(), "event/1 is invalid"),
    ],
)
def test_invalid_records_are_refused(rig: Rig, key: str, record: bytes, said: str) -> None:
    rig.submit(job())
    rig.start("a", "w0", "w1")
    with pytest.raises(errors.StoreUnreadable, match=said):
        restored({**rig.disk.load(), key: record}, POLICY, rig.now)


def test_records_without_their_cluster(rig: Rig) -> None:
    records = rig.disk.load()
    del records["cluster"]
    with pytest.raises(errors.StoreUnreadable, match="cluster's own record"):
        restored(records, POLICY, START)


class TestTheOnlyCheckpoint:
    """With `keep_last=1`, each checkpoint replaces the one before. A server may die at any moment of this."""

    @pytest.fixture
    def catalogue(self, tmp_path: Path) -> Catalogue:
        return Catalogue(LocalStorage(tmp_path))

    @pytest.fixture
    def rig(self, catalogue: Catalogue) -> Rig:
        rig = Rig(KEEPING).servers("s0", "s1").workers("w0", "w1")
        rig.submit(job(checkpoints=CheckpointPolicy(every_s=0, keep_last=1)))
        rig.start("a", "w0", "w1")
        rig.handle(self.commit(rig, catalogue))
        assert catalogue.numbers("a") == [1]
        return rig

    def commit(self, rig: Rig, catalogue: Catalogue, published: Any = None) -> Any:
        """Writes a checkpoint to a real folder; returns the outcome, which the coordinator has not received yet."""
        rig.handle(events.CheckpointRequested("a"))
        rig.perform(until=CommitCheckpoint)
        effect = rig.pending.pop(0)
        assert isinstance(effect, CommitCheckpoint)

        class Servers:
            def call(self, *_: Any, **__: Any) -> pb.CollectFilesReply:
                return pb.CollectFilesReply(done=True)

            def check_wanted(self, _: Any) -> None:
                pass

        return checkpoint_commit.commit(effect, cast(ServerCalls, Servers()), catalogue, published or rig.handle)

    def sources(self, rig: Rig) -> list[int]:
        """The checkpoints that the job restarts from."""
        rig.servers("s1")
        for worker in ("w0", "w1"):
            rig.describe("a", worker)
        rig.perform(until=CreateShards)
        effect = rig.pending[0]
        assert isinstance(effect, CreateShards)
        return [source.number for source in effect.sources]

    def test_is_found_if_a_server_dies_before_the_outcome_arrives(self, rig: Rig, catalogue: Catalogue) -> None:
        outcome = self.commit(rig, catalogue)
        rig.kill("s1")
        rig.handle(outcome)
        assert self.sources(rig) == catalogue.numbers("a") == [2]
        newest = rig.machine.job("a").newest_checkpoint
        assert newest is not None
        assert newest.number == 2

    def test_is_found_if_a_server_dies_before_the_manifest_is_known(self, rig: Rig, catalogue: Catalogue) -> None:
        def published(event: events.CheckpointPublished) -> Any:
            rig.kill("s1")
            return rig.handle(event)

        rig.handle(self.commit(rig, catalogue, published))
        assert self.sources(rig) == [1]
        assert catalogue.numbers("a") == [1, 2], "both are there; the next one replaces both"

    def test_is_found_by_the_next_coordinator(self, rig: Rig, catalogue: Catalogue) -> None:
        self.commit(rig, catalogue)
        rig.crash()
        rig.kill("s1")
        assert self.sources(rig)[0] in catalogue.numbers("a")

    def test_whose_older_ones_were_being_removed_satisfies_who_waits_for_it(
        self, rig: Rig, catalogue: Catalogue
    ) -> None:
        self.commit(rig, catalogue)
        rig.kill("s1")
        log = rig.machine.job("a").log.after(0)
        ends = [(it.attempt, it.failure) for it in log if isinstance(it, CheckpointEnded)]
        assert ends == [(1, ""), (2, "")]


class TestTheClockGoesBack:
    """A machine whose clock was a day ahead is restarted with the right time."""

    DAY_S = 86_400.0

    @pytest.fixture
    def rig(self) -> Rig:
        rig = Rig(KEEPING).servers("s0", "s1").workers("w0", "w1")
        rig.submit(job(checkpoints=CheckpointPolicy(every_s=60), **FIXED))
        rig.start("a", "w0", "w1")
        return rig

    def go_back(self, rig: Rig) -> None:
        rig.now -= self.DAY_S
        rig.crash()

    def test_and_checkpoints_are_taken_as_before(self, rig: Rig) -> None:
        self.go_back(rig)
        rig.pass_time(61)
        assert [type(effect) for effect in rig.pending] == [ScanCheckpoints]

    def test_and_a_checkpoint_that_failed_is_tried_again(self, rig: Rig) -> None:
        rig.handle(events.CheckpointRequested("a"))
        count = rig.pending.pop()
        rig.handle(events.CheckpointFailed(count.job, "the disk is full", effect=count.number))
        self.go_back(rig)
        rig.pass_time(61)
        assert [type(effect) for effect in rig.pending] == [ScanCheckpoints]

    def test_and_no_job_waits_a_day_for_its_servers(self, rig: Rig) -> None:
        rig.kill("s1")
        rig.describe("a", "w0")
        assert rig.status("a").reason == "waiting for servers"
        self.go_back(rig)
        rig.pass_time(15)
        assert rig.machine.job("a").placement is not None

    def test_and_no_job_waits_a_day_for_a_server_that_drained(self, rig: Rig) -> None:
        rig.drain("s1")
        rig.perform()
        rig.leave("s1")
        rig.describe("a", "w0")
        assert "waiting for server s1 to restart" in rig.status("a").reason
        self.go_back(rig)
        rig.pass_time(700)
        assert rig.machine.job("a").placement is not None

    def test_and_no_job_waits_a_day_for_its_storage(self, rig: Rig) -> None:
        rig.handle(events.CheckpointRequested("a"))
        rig.perform()
        rig.away = "503"
        rig.kill("s1")
        rig.servers("s1").describe("a", "w0")
        rig.perform()
        assert "503" in rig.status("a").reason
        rig.away = ""
        self.go_back(rig)
        rig.pass_time(61)
        rig.describe("a", "w0")
        rig.perform()
        assert rig.machine.job("a").created

    def test_and_no_time_in_a_status_is_still_to_come(self, rig: Rig) -> None:
        rig.handle(events.CheckpointRequested("a"))
        rig.perform()
        rig.leave("w1")
        self.go_back(rig)
        status = rig.status("a")
        assert status.checkpoint is not None
        assert max(status.submitted_at, status.started_at, status.checkpoint.time) <= rig.now
        rig.handle(events.JobCancelled("a"))
        self.go_back(rig)
        assert rig.status("a").finished_at <= rig.now
        assert max(member.last_seen for member in rig.machine.members if not member.alive) <= rig.now


class TestWithoutItsFolder:
    """A coordinator that is started again without the folder of checkpoints that it had."""

    GONE = "this coordinator has no folder of checkpoints"

    @pytest.fixture
    def rig(self) -> Rig:
        rig = Rig(KEEPING).servers("s0", "s1").workers("w0", "w1")
        rig.submit(job(checkpoints=CheckpointPolicy(every_s=0), **FIXED))
        return rig.start("a", "w0", "w1")

    def finish(self, rig: Rig) -> ScanCheckpoints:
        """Has the workers come through; what is left to perform is the last checkpoint."""
        for worker in ("w0", "w1"):
            rig.finish("a", worker)
        while not isinstance(rig.pending[0], ScanCheckpoints):
            rig.handle(events.EffectDone(effect=rig.pending.pop(0).number))
        return only(rig.pending, ScanCheckpoints)

    def lose_folder(self, rig: Rig) -> None:
        rig.policy = POLICY
        rig.crash()

    def checkpoint_ends(self, rig: Rig) -> list[tuple[int, str]]:
        log = rig.machine.job("a").log.after(0)
        return [(event.attempt, event.failure) for event in log if isinstance(event, CheckpointEnded)]

    def test_a_job_goes_on_and_takes_no_checkpoints(self, rig: Rig) -> None:
        rig.handle(events.CheckpointRequested("a"))
        rig.perform()
        assert rig.checkpoint("a").number == 1
        self.lose_folder(rig)
        assert rig.state("a") is JobState.RUNNING
        assert rig.checkpoint("a").number == 1, "that there is one is still true"
        rig.pass_time(300)
        assert rig.pending == []
        with pytest.raises(errors.StorageFailed, match=r"^this cluster has no checkpoint storage: start its coord"):
            rig.handle(events.CheckpointRequested("a"))
        rig.kill("s1")
        assert rig.state("a") is JobState.FAILED, "it cannot go back"
        assert "submit the job again" in rig.status("a").reason

    @pytest.mark.parametrize("counted", [False, True])
    def test_a_checkpoint_in_progress_fails_and_its_caller_gets_the_reason(self, rig: Rig, counted: bool) -> None:
        rig.handle(events.CheckpointRequested("a"))
        if counted:
            count = rig.pending.pop()
            rig.handle(events.CheckpointsScanned(count.job, 0, effect=count.number))
        [effect] = rig.pending
        self.lose_folder(rig)
        assert rig.pending == [effect], "it is tried, and fails"
        rig.pending.clear()
        rig.handle(events.CheckpointFailed(effect.job, self.GONE, effect=effect.number))
        assert (rig.state("a"), rig.status("a").checkpoint_failure) == (JobState.RUNNING, self.GONE)
        assert self.checkpoint_ends(rig) == [(1, self.GONE)]

    def test_a_job_that_was_closing_ends(self, rig: Rig) -> None:
        cut = self.finish(rig)
        self.lose_folder(rig)
        rig.handle(events.CheckpointFailed(cut.job, self.GONE, effect=cut.number))
        assert rig.state("a") is JobState.SUCCEEDED
        assert rig.status("a").reason == f"its last checkpoint failed: {self.GONE}"

    def test_a_job_that_would_have_tried_its_last_checkpoint_again_ends(self, rig: Rig) -> None:
        cut = self.finish(rig)
        rig.handle(events.CheckpointFailed(cut.job, "the disk is full", effect=cut.number))
        assert rig.state("a") is JobState.RUNNING
        self.lose_folder(rig)
        assert rig.state("a") is JobState.SUCCEEDED
        assert rig.status("a").reason == "its last checkpoint failed: the disk is full"

    def find_folder(self, rig: Rig) -> None:
        rig.policy = KEEPING
        rig.crash()

    @pytest.mark.parametrize("running", [True, False])
    def test_with_its_folder_again_it_is_saved_for_a_server_that_began_to_drain_without(
        self, rig: Rig, running: bool
    ) -> None:
        if not running:
            rig.submit(job("b", workers=1))
            rig.workers("w2").describe("b", "w2")
        self.lose_folder(rig)
        rig.drain("s1")
        self.find_folder(rig)
        rig.perform(until=TakeCut)
        assert isinstance(rig.pending[0], TakeCut)
        assert rig.pending[0].last
        rig.perform(step=3)
        assert rig.drain("s1") == ()

    def test_with_its_folder_again_it_restarts_from_its_checkpoint(self, rig: Rig) -> None:
        rig.handle(events.CheckpointRequested("a"))
        rig.perform(step=3)
        self.lose_folder(rig)
        self.find_folder(rig)
        assert rig.checkpoint("a").number == 1
        rig.kill("s1")
        rig.servers("s1").start("a", "w0", "w1")
        assert ("placing", "continues from a/1, step 3") in rig.history("a")
        assert rig.state("a") is JobState.RUNNING

    def test_with_its_folder_again_a_checkpoint_in_progress_ends_by_itself(self, rig: Rig) -> None:
        """And is not taken for what was asked for since."""
        assert rig.handle(events.CheckpointRequested("a")).number == 1
        [cut] = rig.pending
        self.lose_folder(rig)
        self.find_folder(rig)
        assert rig.handle(events.CheckpointRequested("a")).number == 2
        assert rig.pending == [cut], "one at a time"
        rig.perform()
        assert self.checkpoint_ends(rig) == [(1, ""), (2, "")]
        assert rig.checkpoint("a").number == 2


class Twins(Voyage):
    """At drawn moments a twin is restored beside the cluster; from then on both are told the same and say the same."""

    class TwinRig(Rig):
        twin: Cluster | None = None

        def handle(self, event: Any) -> Any:
            if self.twin is None:
                return super().handle(event)
            try:
                answer: Any = self.twin.handle(event, self.now)
            except errors.ShoalError as error:
                answer = (type(error), error.message)
            pending = len(self.pending)
            try:
                ours = super().handle(event)
            except errors.ShoalError as error:
                # Which jobs were forgotten is not stored, so the twin says less of them.
                refusal = (type(error), answer[1] if isinstance(error, errors.UnknownJob) else error.message)
                assert answer == refusal
                raise
            assert comparable(answer[0]) == comparable(ours)
            assert answer[1] == self.pending[pending:]
            assert timeless(ClusterRecords(self.twin).all()) == timeless(ClusterRecords(self.machine).all())
            return ours

    new_rig = TwinRig
    policy = KEEPING

    @rule()
    def fork(self) -> None:
        rig = self.rig
        assert isinstance(rig, self.TwinRig)
        rig.twin = None
        if any(member.stays_with for member in rig.machine.members):
            return  # not stored: the next coordinator tries again to move these jobs off a draining server
        # The leases of the twin begin now; so must the others'.
        rig.handle(events.TimePassed())
        rig.beat(*[member.member for member in rig.machine.status(rig.now).members if member.alive])
        rig.twin = restored(rig.disk.load(), rig.policy, rig.now)
        assert rig.twin
        assert timeless(ClusterRecords(rig.twin).all()) == timeless(ClusterRecords(rig.machine).all())
        event("forked")

    @rule(
        policy=st.sampled_from([KEEPING, POLICY, replace(KEEPING, keep_finished=0), replace(POLICY, server_return_s=0)])
    )
    def crash(self, policy: ClusterPolicy) -> None:
        """Restarts with any policy: none refuses what was stored under another one."""
        assert isinstance(self.rig, self.TwinRig)
        if policy == self.rig.policy:
            self.rig.twin = None
            super().crash()
        else:
            self.rig.twin, self.rig.policy = None, policy
            self.rig.crash()


def comparable(answer: Any) -> Any:
    """An answer without what may be behind in a cluster that was restored."""
    match answer:
        case JobStatus():
            return replace(answer, progress=Progress())
        case TakeCheckpointResult():
            return answer.number
        case HoldResult():
            return answer.ledger, answer.ranks
    return answer


def timeless(records: Mapping[str, bytes]) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Records without what differs by design: the numbers of events, and how far jobs have come."""
    found = promised(records)
    histories = defaultdict(list)
    for key in sorted(key for key in found if "/event/" in key):
        change = job_pb2.Event.FromString(found.pop(key))
        number = change.sequence
        change.ClearField("sequence")
        histories[key.partition("/event/")[0]].append((number, change.SerializeToString()))
    for key in [key for key in found if key.endswith("/state")]:
        state = state_pb2.JobRecord.FromString(found[key])
        state.reserved_sequence = 0
        found[key] = state
    for key in [key for key in found if key.endswith("/checkpoints")]:
        checkpoints = state_pb2.CheckpointsRecord.FromString(found[key])
        checkpoints.began_step = 0
        found[key] = checkpoints
    return found, {key: [change[1:] for change in sorted(changes)] for key, changes in histories.items()}


TestTwins = Twins.TestCase
TestTwins.settings = settings(max_examples=draws(8), stateful_step_count=40, deadline=None)
