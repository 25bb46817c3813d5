"""The coordinator's metrics of its state and of its calls, with a fake clock."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from shoal.checkpoint_policy import CheckpointPolicy
from shoal.status import Role, SavedCheckpoint
from shoal_coordinator.cluster import Cluster
from shoal_coordinator.coordinator import Coordinator
from shoal_coordinator.messages import JobRef, events
from shoal_coordinator.metrics import StateCollector, count_events
from shoal_coordinator.observer import Observer
from support.clusters.cluster_rig import FIXED, KEEPING, START, Rig, job, session

EVERY_100_S = CheckpointPolicy(every_s=100.0)


class FakeCoordinator:
    """What the collector reads."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.unwritten, self.waiting_workers = 3, 7

    @contextmanager
    def reading(self) -> Iterator[tuple[Cluster, float]]:
        yield self.rig.machine, self.rig.now


@pytest.fixture
def rig() -> Rig:
    return Rig(KEEPING).servers("s0").workers("w0", "w1", "w2")


@pytest.fixture
def shown(rig: Rig) -> Callable[..., Any]:
    """A gauge's value."""
    registry = CollectorRegistry()
    registry.register(StateCollector(cast(Coordinator, FakeCoordinator(rig)), lambda: 5, checkpoints=True))
    return lambda name, **labels: registry.get_sample_value(f"shoal_coordinator_{name}", labels)


class TestState:
    def test_wanted_workers_follow_the_jobs(self, rig: Rig, shown: Callable[..., Any]) -> None:
        assert shown("wanted_workers") == 0
        rig.submit(session("notebook", workers=2))
        assert shown("wanted_workers") == 0, "sessions are their users'"
        rig.submit(job("a", workers=2, max_workers=5))
        assert shown("wanted_workers") == 5
        rig.start("a", "w0", "w1")
        assert shown("wanted_workers") == 5
        rig.submit(job("b", workers=4))
        assert shown("wanted_workers") == 9
        rig.finish("a", "w0")
        assert shown("wanted_workers") == 4 + 2, "nobody new joins a job that is nearly through"
        rig.handle(events.JobCancelled("a"))
        assert shown("wanted_workers") == 4

    def test_effects_are_pending_until_they_are_done(self, rig: Rig, shown: Callable[..., Any]) -> None:
        rig.submit(job("a"))
        for worker in ("w0", "w1"):
            rig.describe("a", worker)
        assert shown("pending_effects", effect="CreateShards") == 1
        assert shown("pending_effects", effect="DropShards") == 0
        rig.perform()
        assert shown("pending_effects", effect="CreateShards") == 0

    def test_restarts_are_counted_by_reason_and_stay_counted(self, rig: Rig, shown: Callable[..., Any]) -> None:
        rig.servers("s1")
        assert (shown("restarts_total", reason="lost"), shown("restarts_total", reason="draining")) == (0, 0)
        rig.submit(job("a", epochs=2, **FIXED))
        rig.start("a", "w0", "w1")
        rig.drain("s1")
        rig.perform()
        rig.leave("s1")
        rig.servers("s1").start("a", "w0", "w1")
        assert (shown("restarts_total", reason="lost"), shown("restarts_total", reason="draining")) == (0, 1)
        rig.kill("s1")
        assert (shown("restarts_total", reason="lost"), shown("restarts_total", reason="draining")) == (1, 1)
        rig.handle(events.JobCancelled("a"))
        rig.handle(events.JobDropped("a"))
        assert (shown("restarts_total", reason="lost"), shown("restarts_total", reason="draining")) == (1, 1)

    def test_jobs_that_ended_stay_counted_when_they_are_forgotten(self, rig: Rig, shown: Callable[..., Any]) -> None:
        rig.submit(job("a"))
        rig.start("a", "w0", "w1")
        rig.finish("a", "w0", error="ValueError: no such file")
        rig.finish("a", "w1", error="ValueError: no such file")
        assert (shown("jobs", state="failed"), shown("jobs_ended_total", state="failed")) == (1, 1)
        rig.handle(events.JobDropped("a"))
        assert (shown("jobs", state="failed"), shown("jobs_ended_total", state="failed")) == (0, 1)
        rig.submit(job("a"))
        rig.handle(events.JobCancelled("a"))
        assert [shown("jobs_ended_total", state=each) for each in ("succeeded", "failed", "cancelled")] == [0, 1, 1]

    def test_decisions_that_are_not_written_and_watchers(self, shown: Callable[..., Any]) -> None:
        assert (shown("unwritten_changes"), shown("job_watchers"), shown("waiting_workers")) == (3, 5, 7)

    def test_a_checkpoints_age_is_divided_by_the_jobs_interval(self, rig: Rig, shown: Callable[..., Any]) -> None:
        rig.submit(job("a", checkpoints=EVERY_100_S))
        assert shown("checkpoint_age_ratio") == 0, "it does not run yet"
        rig.start("a", "w0", "w1")
        began = rig.now
        rig.now += 50
        assert shown("checkpoint_age_ratio") == pytest.approx(0.5)
        assert shown("oldest_checkpoint_seconds") == 0
        assert shown("checkpoint_bytes") == 0
        rig.now = began + 250
        assert shown("checkpoint_age_ratio") == pytest.approx(2.5)
        rig.handle(events.CheckpointRequested("a"))
        rig.handle(events.TimePassed())
        rig.perform()
        rig.now += 20
        assert shown("checkpoint_age_ratio") == pytest.approx(0.2)
        assert shown("oldest_checkpoint_seconds") == pytest.approx(20)
        assert shown("checkpoint_bytes") == 100
        rig.handle(events.JobCancelled("a"))
        assert shown("checkpoint_age_ratio") == 0, "nobody waits for one any more"

    def test_jobs_that_save_by_steps_or_not_at_all_have_no_age(self, rig: Rig, shown: Callable[..., Any]) -> None:
        rig.submit(job("a", checkpoints=CheckpointPolicy(every_s=0.0, every_steps=5)))
        rig.start("a", "w0", "w1")
        rig.now += 1e6
        assert shown("checkpoint_age_ratio") == 0

    def test_a_cluster_that_cannot_save_has_no_age(self, rig: Rig) -> None:
        rig.submit(job("a"))
        rig.start("a", "w0", "w1")
        rig.now += 1e6
        registry = CollectorRegistry()
        registry.register(StateCollector(cast(Coordinator, FakeCoordinator(rig)), lambda: 0, checkpoints=False))
        assert registry.get_sample_value("shoal_coordinator_checkpoint_age_ratio") == 0


class TestCounts:
    @pytest.fixture
    def registry(self) -> CollectorRegistry:
        return CollectorRegistry()

    @pytest.fixture
    def observer(self, registry: CollectorRegistry) -> Observer:
        return count_events(registry, clock=lambda: START + 40)

    def test_a_checkpoint_lasts_from_its_cut_until_it_is_complete(
        self, registry: CollectorRegistry, observer: Observer
    ) -> None:
        observer.handled(events.CheckpointCommitted(JobRef("a", 1), SavedCheckpoint(1, 5, 100, START)))
        observer.handled(events.CheckpointFailed(JobRef("a", 1), "no room"))
        sample = registry.get_sample_value
        assert sample("shoal_coordinator_checkpoint_seconds_count") == 1
        assert sample("shoal_coordinator_checkpoint_seconds_sum") == 40
        assert sample("shoal_coordinator_checkpoints_total", {"outcome": "complete"}) == 1
        assert sample("shoal_coordinator_checkpoints_total", {"outcome": "failed"}) == 1
        assert sample("shoal_coordinator_events_total", {"event": "CheckpointCommitted"}) == 1

    def test_deaths_and_repeated_calls(self, registry: CollectorRegistry, observer: Observer) -> None:
        sample = registry.get_sample_value
        assert sample("shoal_coordinator_members_lost_total", {"role": "server"}) == 0
        observer.died(Role.SERVER)
        observer.retried()
        assert sample("shoal_coordinator_members_lost_total", {"role": "server"}) == 1
        assert sample("shoal_coordinator_members_lost_total", {"role": "worker"}) == 0
        assert sample("shoal_coordinator_retries_total") == 1
