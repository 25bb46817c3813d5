"""Workers whose trainers die or hang repeatedly, with a fake clock: the job continues without them."""

from typing import Any

import pytest

from shoal.consistency import Asynchronous, BoundedStaleness, Consistency, Synchronous
from shoal.evaluation_policy import EvaluationPolicy
from shoal.job import Job
from shoal.status import JobState, Role
from shoal_coordinator.cluster.scheduler import Scheduler
from shoal_coordinator.cluster.shards.rebalancer import SETTLED_S
from shoal_coordinator.job import QuarantineReason
from shoal_coordinator.messages import events
from support.clusters.cluster_rig import KEEPING, Rig, session

CRASH = "the trainer was killed by SIGSEGV; this happened 3 times in a row without a push in between"


@pytest.fixture
def rig() -> Rig:
    return Rig(KEEPING).servers("s0").workers("w0", "w1")


def start(rig: Rig, *workers: str, consistency: Consistency | None = None, **options: Any) -> Rig:
    spec = Job("m:f", name="a", workers=len(workers), consistency=consistency or Synchronous(), **options)
    rig.submit(spec)
    return rig.start("a", *workers)


def jump(rig: Rig, seconds: float) -> None:
    """Lets time pass at once; no heartbeat timeout expires meanwhile, as after a pause of the coordinator."""
    rig.now += seconds
    rig.handle(events.TimePassed())


def fail(rig: Rig, worker: str) -> None:
    """What a daemon does whose trainer was killed several times in a row."""
    part = rig.part("a", worker)
    rig.handle(events.WorkerFinished("a", worker, rig.lives[worker], CRASH, part, trainer_failed=True))


class TestADyingTrainer:
    def test_costs_its_worker_the_job_and_the_job_goes_on(self, rig: Rig) -> None:
        start(rig, "w0", "w1")
        fail(rig, "w1")
        assert rig.state("a") is JobState.RUNNING
        assert set(rig.machine.job("a").workers) == {"w0"}
        assert f"worker w1 is quarantined for 60 s: {CRASH}" in [reason for _, reason in rig.history("a")]
        assert "quarantined: worker w1 until 13:47:40 UTC" in rig.status("a").reason
        assert rig.machine.counters.quarantined == {"crashed": 1, "hung": 0}

    def test_ends_the_incarnation_and_a_new_one_waits(self, rig: Rig) -> None:
        start(rig, "w0", "w1")
        fail(rig, "w1")
        rig.workers("w1")
        assert rig.beat("w1") == [None]
        jump(rig, 59)
        assert rig.beat("w1") == [None]
        jump(rig, 2)
        assert rig.beat("w1")[0].job == "a"
        assert "quarantined" not in rig.status("a").reason

    def test_is_assigned_once_when_its_quarantine_ends_and_then_nothing_is_scheduled(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        start(rig, "w0", "w1")
        fail(rig, "w1")
        rig.workers("w1")
        jump(rig, SETTLED_S)  # then it is known that the job's shards are even
        scheduled: list[float] = []
        schedule = Scheduler.schedule

        def counted(scheduler: Scheduler, now: float) -> None:
            scheduled.append(now)
            schedule(scheduler, now)

        monkeypatch.setattr(Scheduler, "schedule", counted)
        for seconds in (20 - SETTLED_S, 20, 19):
            jump(rig, seconds)
        assert not scheduled
        jump(rig, 2)
        assert scheduled == [rig.now]
        assert rig.beat("w1")[0].job == "a"
        for _ in range(3):
            jump(rig, 1)
        assert len(scheduled) == 1

    def test_gives_another_worker_its_place(self, rig: Rig) -> None:
        rig.workers("w2")
        start(rig, "w0", "w1")
        fail(rig, "w1")
        assert set(rig.machine.job("a").workers) == {"w0", "w2"}

    def test_is_quarantined_for_longer_each_time_up_to_an_hour(self, rig: Rig) -> None:
        start(rig, "w0", "w1")
        found = []
        for _ in range(8):
            fail(rig, "w1")
            last = [reason for _, reason in rig.history("a") if "quarantined for" in reason][-1]
            seconds = float(last.partition("quarantined for ")[2].split()[0])
            found.append(seconds)
            rig.workers("w1")
            jump(rig, seconds + 1)
        assert found == [60, 120, 240, 480, 960, 1920, 3600, 3600]

    def test_fails_the_job_if_no_other_worker_is_allowed(self, rig: Rig) -> None:
        start(rig, "w0", "w1")
        fail(rig, "w1")
        rig.workers("w1")
        fail(rig, "w0")
        assert rig.state("a") is JobState.FAILED
        assert rig.status("a").reason == f"worker w0 failed: {CRASH}"

    def test_of_the_only_worker_fails_the_job_as_before(self) -> None:
        rig = Rig(KEEPING).servers("s0").workers("w0")
        start(rig, "w0")
        fail(rig, "w0")
        assert rig.state("a") is JobState.FAILED

    def test_before_the_job_runs_makes_it_wait_and_other_jobs_have_the_worker(self, rig: Rig) -> None:
        rig.submit(Job("m:f", name="a", workers=2))
        fail(rig, "w1")
        assert rig.state("a") is JobState.STARTING
        rig.workers("w1")
        rig.submit(Job("m:f", name="b", workers=1))
        assert rig.beat("w1")[0].job == "b"

    def test_stays_quarantined_over_a_restart(self, rig: Rig) -> None:
        start(rig, "w0", "w1")
        fail(rig, "w1")
        rig.workers("w1").crash()
        assert rig.beat("w1") == [None]
        rig.now -= 86_400
        rig.crash()
        jump(rig, 3601)
        assert rig.beat("w1")[0].job == "a", "a clock that goes back does not lengthen it beyond an hour"

    def test_of_a_session_fails_its_job_as_before(self, rig: Rig) -> None:
        rig.submit(session("a", 1))
        rig.join(Role.SESSION, "x").start("a", "x")
        fail(rig, "x")
        assert rig.state("a") is JobState.FAILED


class TestAHungTrainer:
    """w0 and w1 train; w1 makes no step from now on."""

    def step(self, rig: Rig, worker: str, step: int) -> None:
        rig.report("a", worker, step=step, accepted=step)

    def stall(self, rig: Rig, **options: Any) -> Rig:
        start(rig, "w0", "w1", **options)
        for step in (1, 2):
            self.step(rig, "w0", step)
            self.step(rig, "w1", step)
        self.step(rig, "w0", 3)
        return rig

    @pytest.mark.parametrize("mode", [Synchronous(), BoundedStaleness(1)])
    def test_is_restarted_and_the_job_goes_on(self, rig: Rig, mode: Consistency) -> None:
        self.stall(rig, consistency=mode, step_timeout_s=30)
        jump(rig, 29)
        assert set(rig.machine.job("a").workers) == {"w0", "w1"}
        jump(rig, 3)
        assert set(rig.machine.job("a").workers) == {"w0"}
        member = rig.machine.find_member("w1")
        assert member is not None
        assert not member.alive, "its daemon registers again"
        [said] = [reason for _, reason in rig.history("a") if reason.startswith("worker w1 is restarted: it has made")]
        assert said.endswith("s while others wait for it (step_timeout_s: 30 s)")
        assert rig.workers("w1").beat("w1")[0].job == "a"
        assert rig.machine.counters.hung == 1

    def test_is_quarantined_after_three_times(self, rig: Rig) -> None:
        self.stall(rig, step_timeout_s=30)
        for hang in range(3):
            assert "w1" in rig.machine.job("a").workers, hang
            jump(rig, 31)
            rig.workers("w1").perform(step=2)
            if "w1" in rig.machine.job("a").workers:
                rig.describe("a", "w1")
                rig.enter("a", "w1")
                rig.perform(step=2)
        assert rig.machine.counters.quarantined[QuarantineReason.HUNG] == 1
        assert "quarantined: worker w1" in rig.status("a").reason

    def test_is_not_looked_for_where_nobody_waits(self, rig: Rig) -> None:
        self.stall(rig, consistency=Asynchronous(), step_timeout_s=30)
        jump(rig, 120)
        assert set(rig.machine.job("a").workers) == {"w0", "w1"}

    def test_is_not_one_that_all_are(self, rig: Rig) -> None:
        """Nobody waits for anybody: a file system may be slow."""
        self.stall(rig, step_timeout_s=30)
        self.step(rig, "w1", 3)
        jump(rig, 120)
        assert set(rig.machine.job("a").workers) == {"w0", "w1"}

    def test_is_not_one_that_asks_for_data(self, rig: Rig) -> None:
        self.stall(rig, step_timeout_s=30)
        for _ in range(12):
            rig.lease("a", "w1")
            jump(rig, 10)
        assert set(rig.machine.job("a").workers) == {"w0", "w1"}

    def test_is_not_one_that_evaluates(self, rig: Rig) -> None:
        self.stall(rig, step_timeout_s=30, evaluation=EvaluationPolicy(every_steps=2, metric="auc"))
        number = rig.ask("a", "w1", 2).number
        jump(rig, 120)
        assert set(rig.machine.job("a").workers) == {"w0", "w1"}
        rig.evaluate("a", "w1", number, auc=0.5)
        jump(rig, 29)
        assert set(rig.machine.job("a").workers) == {"w0", "w1"}

    def test_is_waited_for_ten_minutes_by_default(self, rig: Rig) -> None:
        self.stall(rig)
        jump(rig, 595)
        assert set(rig.machine.job("a").workers) == {"w0", "w1"}
        jump(rig, 10)
        assert set(rig.machine.job("a").workers) == {"w0"}

    def test_is_not_looked_for_right_after_a_restart_of_the_coordinator(self, rig: Rig) -> None:
        self.stall(rig, step_timeout_s=30)
        rig.now += 3600
        rig.crash()
        jump(rig, 25)
        assert set(rig.machine.job("a").workers) == {"w0", "w1"}
