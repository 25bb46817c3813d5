"""A cluster that is lost and restored: scripted, and as a twin that goes on beside the one that was not lost."""

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import event, settings
from hypothesis.stateful import rule

from shoal import errors
from shoal.checkpoint_policy import NEVER, CheckpointPolicy
from shoal.events import CheckpointEnded, LogLine
from shoal.status import JobState, JobStatus, Progress, Role
from shoal.v1 import job_pb2, state_pb2
from shoal_coordinator.cluster import Cluster, ClusterPolicy
from shoal_coordinator.job import event_log
from shoal_coordinator.messages import (
    AdmitWorker,
    DropShards,
    HoldResult,
    RemoveWorker,
    ScanCheckpoints,
    TakeCheckpointResult,
    events,
)
from shoal_coordinator.persistence.cluster_records import ClusterRecords, restored
from support.clusters.cluster_rig import (
    GIVEN,
    HEARTBEAT_TIMEOUT_S,
    KEEPING,
    POLICY,
    START,
    Rig,
    Voyage,
    job,
    promised,
    session,
)


@pytest.fixture
def rig():
    return Rig().servers("s0", "s1").workers("w0", "w1")


def test_an_empty_store_is_no_cluster():
    assert restored({}, POLICY, START) is None


def test_a_job_goes_on_where_it_was(rig):
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


def test_no_number_is_given_out_twice(rig):
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


def test_what_was_not_done_is_done_again_in_order(rig):
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


def test_how_far_a_removed_worker_had_come_is_asked_once(rig):
    """A server that has released it would say 0, and its last push would count on some servers only."""
    rig.submit(job(workers=1))
    rig.start("a", "w0")
    rig.handle(events.JobCancelled("a"))
    [removed] = rig.pending
    rig.handle(events.WorkerFenced(removed.number, 7))
    assert rig.crash().pending == [replace(removed, committed_steps=7)]


def test_leases_count_from_the_restart(rig):
    rig.submit(job())
    rig.start("a", "w0", "w1")
    rig.now += 3600
    rig.crash()
    rig.pass_time(HEARTBEAT_TIMEOUT_S - 0.1, "s1")
    assert rig.state("a") is JobState.RUNNING
    rig.pass_time(0.2, "s1")
    assert rig.status("a").state is JobState.FAILED
    assert "server s1 is gone" in rig.status("a").reason


def test_members_with_short_leases_get_time_to_come_back(rig):
    found = restored(rig.disk.load(), ClusterPolicy(heartbeat_timeout_s=1.0), rig.now)
    for later in range(4, 49, 4):
        found.handle(events.TimePassed(), rig.now + later / 10)
    assert all(member.alive for member in found.status(rig.now + 4.8).members)
    found.handle(events.TimePassed(), rig.now + 5.2)
    assert not any(member.alive for member in found.status(rig.now + 5.2).members)


def test_jobs_whose_servers_are_gone_end_and_say_why(rig):
    """A coordinator on the store of last week, with nobody there."""
    rig.submit(job("ran"))
    rig.start("ran", "w0", "w1")
    rig.submit(job("waits"))
    rig.now += 7 * 86_400
    rig.crash()
    rig.pass_time(HEARTBEAT_TIMEOUT_S + 1.5, "s0", "s1", "w0", "w1")
    assert "is gone, and with it the only replica" in rig.status("ran").reason
    assert rig.status("waits").reason == "waiting for workers: 0 of 2"
    assert rig.pending == [], "nobody is waited for"


def test_the_dead_stay_dead(rig):
    rig.kill("w1")
    rig.crash()
    with pytest.raises(errors.Fenced):
        rig.beat("w1")
    [dead] = [member for member in rig.machine.status(rig.now).members if not member.alive]
    assert dead.silent_s == pytest.approx(HEARTBEAT_TIMEOUT_S + 1.5)


def test_a_session_has_its_one_part(rig):
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


def test_given_values_are_not_asked_for_again(rig):
    rig.submit(job())
    for worker in ("w0", "w1"):
        rig.describe("a", worker, GIVEN)
    rig.perform()
    assert rig.crash().enter("a", "w0").assign_values
    rig.enter("a", "w0", assigned=True)
    assert not rig.crash().enter("a", "w0").assign_values


def test_a_repeated_submission_is_known(rig):
    first = rig.handle(events.JobSubmitted(job(), "token"))
    rig.crash()
    assert rig.handle(events.JobSubmitted(job(), "token")) == first
    with pytest.raises(errors.JobExists):
        rig.submit(job())


def test_registering_again_is_the_same_life(rig):
    rig.crash()
    for number, name in enumerate(("s0", "s1", "w0", "w1"), start=1):
        registration = rig.machine._members.find(name).registration
        assert registration.process == f"p{number}"
        assert rig.handle(events.RegistrationReceived(registration)).incarnation == rig.lives[name]


def test_reports_make_up_for_what_was_not_written(rig):
    rig.submit(job())
    rig.start("a", "w0", "w1")
    rig.report("a", "w0", accepted=5, samples=50, staleness={0: 5}, values={"loss": 1.0})
    rig.report("a", "w1", accepted=7, samples=70, staleness={1: 7}, values={"loss": 0.5})
    rig.finish("a", "w0")
    rig.report("a", "w1", accepted=9, samples=90, staleness={1: 9})
    rig.crash()
    progress = rig.status("a").progress
    assert (progress.steps, progress.samples, progress.loss) == (12, 120, 0.5), "as it was when one went"
    rig.report("a", "w1", accepted=11, samples=110, staleness={1: 9, 2: 2})
    progress = rig.status("a").progress
    assert (progress.steps, progress.samples) == (16, 160)
    assert rig.machine.job("a").timings().staleness == {0: 5, 1: 9, 2: 2}
    rig.finish("a", "w1")
    assert rig.crash().status("a").progress.steps == 16


def test_counts_beyond_the_wire_do_no_harm(rig):
    rig.submit(job())
    rig.start("a", "w0", "w1")
    for worker in ("w0", "w1"):
        rig.report("a", worker, accepted=2**64 - 1, staleness={0: 2**64 - 1})
        rig.finish("a", worker)
    assert rig.crash().status("a").progress.steps == 2**64 - 1


class TestEvents:
    def test_changes_of_state_survive(self, rig):
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
    def test_so_does_what_became_of_a_checkpoint_that_was_asked_for(self, rig, fails):
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
        assert (ended.attempt, ended.saved, ended.failure) == (
            attempt.number,
            rig.status("a").checkpoint,
            "the disk is full" if fails else "",
        )

    def test_no_number_comes_twice(self, rig):
        rig.submit(job())
        rig.start("a", "w0", "w1")
        for _ in range(3):
            rig.report("a", "w0", log=("a line",) * 1_000)
            seen = rig.machine.job("a").log.last
            rig.crash()
            rig.report("a", "w0", log=("another",))
            [fresh] = rig.machine.job("a").log.after(seen)
            assert fresh.text == "another"
            assert seen < fresh.sequence <= seen + event_log.NUMBERS_AHEAD + 1

    def test_numbers_are_set_aside_ahead_of_time(self, rig, monkeypatch):
        monkeypatch.setattr(event_log, "NUMBERS_AHEAD", 10)
        rig.submit(job())
        rig.start("a", "w0", "w1")
        written = []
        for _ in range(40):
            rig.report("a", "w0", log=("a line",))
            written.append(state_pb2.JobRecord.FromString(rig.disk.load()["job/1/state"]).numbered)
            assert written[-1] >= rig.machine.job("a").log.last
        assert len(set(written)) == 5, "not at each line"

    def test_what_is_forgotten_leaves_the_store(self, rig, monkeypatch):
        rig.submit(job())
        log = rig.machine.job("a").log
        log._max_events = 5
        for _ in range(6):
            rig.handle(events.EffectDone(effect=0))
            rig.machine.job("a").wait_for("one thing", rig.now)
            rig.machine.job("a").wait_for("another", rig.now)
        rig.write()
        kept = [key for key in rig.disk.load() if key.startswith("job/1/event/")]
        assert sorted(int(key.rpartition("/")[2]) for key in kept) == [event.sequence for event in log.after(0)]
        assert len(kept) == 5


def test_polling_writes_nothing(rig):
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
def test_records_that_make_no_sense(rig, key, record, said):
    rig.submit(job())
    rig.start("a", "w0", "w1")
    with pytest.raises(errors.StoreUnreadable, match=said):
        restored({**rig.disk.load(), key: record}, POLICY, rig.now)


def test_records_without_their_cluster(rig):
    records = rig.disk.load()
    del records["cluster"]
    with pytest.raises(errors.StoreUnreadable, match="cluster's own record"):
        restored(records, POLICY, START)


class TestWithoutItsFolder:
    """A coordinator that is started again without the folder of checkpoints that it had."""

    GONE = "this coordinator has no folder of checkpoints"

    @pytest.fixture
    def rig(self):
        rig = Rig(KEEPING).servers("s0", "s1").workers("w0", "w1")
        rig.submit(job(checkpoints=CheckpointPolicy(every_s=0)))
        return rig.start("a", "w0", "w1")

    def finish(self, rig):
        """Has the workers come through; what is left to perform is the last checkpoint."""
        for worker in ("w0", "w1"):
            rig.finish("a", worker)
        while not isinstance(rig.pending[0], ScanCheckpoints):
            rig.handle(events.EffectDone(effect=rig.pending.pop(0).number))
        [cut] = rig.pending
        return cut

    def lose_folder(self, rig):
        rig.policy = POLICY
        rig.crash()

    def ends(self, rig):
        log = rig.machine.job("a").log.after(0)
        return [(event.attempt, event.failure) for event in log if isinstance(event, CheckpointEnded)]

    def test_a_job_goes_on_and_takes_no_checkpoints(self, rig):
        rig.handle(events.CheckpointRequested("a"))
        rig.perform()
        assert rig.status("a").checkpoint.number == 1
        self.lose_folder(rig)
        assert rig.state("a") is JobState.RUNNING
        assert rig.status("a").checkpoint.number == 1, "that there is one is still true"
        rig.pass_time(300)
        assert rig.pending == []
        with pytest.raises(errors.StorageFailed, match=r"^this cluster has no checkpoint storage: start its coord"):
            rig.handle(events.CheckpointRequested("a"))
        rig.kill("s1")
        assert rig.state("a") is JobState.FAILED, "it cannot go back"
        assert "submit the job again" in rig.status("a").reason

    @pytest.mark.parametrize("counted", [False, True])
    def test_what_was_under_way_is_given_up_and_who_waits_for_it_is_told(self, rig, counted):
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
        assert self.ends(rig) == [(1, self.GONE)]

    def test_a_job_that_was_closing_ends(self, rig):
        cut = self.finish(rig)
        self.lose_folder(rig)
        rig.handle(events.CheckpointFailed(cut.job, self.GONE, effect=cut.number))
        assert rig.state("a") is JobState.SUCCEEDED
        assert rig.status("a").reason == f"its last checkpoint failed: {self.GONE}"

    def test_a_job_that_would_have_tried_its_last_checkpoint_again_ends(self, rig):
        cut = self.finish(rig)
        rig.handle(events.CheckpointFailed(cut.job, "the disk is full", effect=cut.number))
        assert rig.state("a") is JobState.RUNNING
        self.lose_folder(rig)
        assert rig.state("a") is JobState.SUCCEEDED
        assert rig.status("a").reason == "its last checkpoint failed: the disk is full"

    def find_folder(self, rig):
        rig.policy = KEEPING
        rig.crash()

    def test_with_its_folder_again_it_goes_back_to_what_it_had(self, rig):
        rig.handle(events.CheckpointRequested("a"))
        rig.perform(step=3)
        self.lose_folder(rig)
        self.find_folder(rig)
        assert rig.status("a").checkpoint.number == 1
        rig.kill("s1")
        rig.servers("s1").start("a", "w0", "w1")
        assert ("placing", "continues from a/1, step 3") in rig.history("a")
        assert rig.state("a") is JobState.RUNNING

    def test_with_its_folder_again_what_was_under_way_comes_to_its_own_end(self, rig):
        """And is not taken for what was asked for since."""
        assert rig.handle(events.CheckpointRequested("a")).number == 1
        [cut] = rig.pending
        self.lose_folder(rig)
        self.find_folder(rig)
        assert rig.handle(events.CheckpointRequested("a")).number == 2
        assert rig.pending == [cut], "one at a time"
        rig.perform()
        assert self.ends(rig) == [(1, ""), (2, "")]
        assert rig.status("a").checkpoint.number == 2


class Twins(Voyage):
    """At drawn moments a twin is restored beside the cluster; from then on both are told the same and say the same."""

    class TwinRig(Rig):
        twin: Cluster | None = None

        def handle(self, event):
            if self.twin is None:
                return super().handle(event)
            try:
                answer: object = self.twin.handle(event, self.now)
            except errors.ShoalError as error:
                answer = (type(error), error.message)
            pending = len(self.pending)
            try:
                ours = super().handle(event)
            except errors.ShoalError as error:
                refusal = (type(error), error.message)
                assert answer == refusal
                raise
            assert comparable(answer[0]) == comparable(ours)
            assert answer[1] == self.pending[pending:]
            assert timeless(ClusterRecords(self.twin).all()) == timeless(ClusterRecords(self.machine).all())
            return ours

    new_rig = TwinRig
    policy = KEEPING

    @rule()
    def fork(self):
        rig = self.rig
        rig.twin = None
        # The leases of the twin begin now; so must the others'.
        rig.handle(events.TimePassed())
        rig.beat(*[member.member for member in rig.machine.status(rig.now).members if member.alive])
        rig.twin = restored(rig.disk.load(), rig.policy, rig.now)
        assert timeless(ClusterRecords(rig.twin).all()) == timeless(ClusterRecords(rig.machine).all())
        event("forked")

    @rule()
    def crash(self):
        self.rig.twin = None
        super().crash()


def comparable(answer):
    """An answer without what may be behind in a cluster that was restored."""
    match answer:
        case JobStatus():
            return replace(answer, progress=Progress())
        case TakeCheckpointResult():
            return answer.number
        case HoldResult():
            return answer.ledger, answer.ranks
    return answer


def timeless(records):
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
        state.numbered = 0
        found[key] = state
    return found, {key: [change[1:] for change in sorted(changes)] for key, changes in histories.items()}


TestTwins = Twins.TestCase
TestTwins.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
