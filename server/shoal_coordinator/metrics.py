"""What the coordinator tells Prometheus. No label names a job, a member or a client: their number has no bound."""

from collections import Counter as Count
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal.status import ClusterStatus, JobState, Role
from shoal_coordinator.coordinator import Coordinator, Observer

_CHECKPOINT_OUTCOMES = {"CheckpointWritten": "written", "CheckpointFailed": "failed"}
_LIVE = {True: "alive", False: "dead"}


def count_events(registry: CollectorRegistry) -> Observer:
    """Counters of what passes through the coordinator, and the observer that keeps them."""
    handled = Counter(
        "shoal_coordinator_events_total",
        "Events taken in, by kind: heartbeats, leases of data, reports and all else.",
        ["event"],
        registry=registry,
    )
    refused = Counter(
        "shoal_coordinator_refusals_total",
        "Requests that were refused, by the code of the error.",
        ["code"],
        registry=registry,
    )
    performed = Counter(
        "shoal_coordinator_effects_total",
        "Calls to parameter servers that were decided on, by kind and by what became of them.",
        ["effect", "outcome"],
        registry=registry,
    )
    writes = Histogram(
        "shoal_coordinator_store_write_seconds",
        "Time that the store took to make decisions durable, several at once where they wait for each other.",
        registry=registry,
    )
    checkpoints = Counter(
        "shoal_coordinator_checkpoints_total", "Checkpoints by what became of them.", ["outcome"], registry=registry
    )
    for outcome in ("written", "failed"):
        checkpoints.labels(outcome)
    records = Counter("shoal_coordinator_store_records_total", "Records that the store was given.", registry=registry)

    def written(seconds: float, count: int) -> None:
        writes.observe(seconds)
        records.inc(count)

    def count(event: str) -> None:
        handled.labels(event).inc()
        if event in _CHECKPOINT_OUTCOMES:
            checkpoints.labels(_CHECKPOINT_OUTCOMES[event]).inc()

    return Observer(
        handled=count,
        refused=lambda code: refused.labels(code).inc(),
        performed=lambda effect, done: performed.labels(effect, "done" if done else "failed").inc(),
        written=written,
    )


class StateCollector(Collector):
    """Gauges of the cluster's state, read when they are asked for.

    Args:
        coordinator: the shell.
        watchers: tells how many calls watch jobs.
    """

    def __init__(self, coordinator: Coordinator, watchers: Callable[[], int]) -> None:
        self._coordinator, self._watchers = coordinator, watchers

    def collect(self) -> Iterator[Metric]:
        """One family a figure."""
        with self._coordinator.reading() as (cluster, now):
            status, found = cluster.status(now), cluster.jobs(now)
        states = Count(job.state for job in found)
        yield _members(status)
        jobs = GaugeMetricFamily("shoal_coordinator_jobs", "Jobs by state.", labels=["state"])
        for state in JobState:
            jobs.add_metric([state.value], states[state])
        yield jobs
        live = [job for job in found if not job.state.finished]
        yield GaugeMetricFamily(
            "shoal_coordinator_jobs_with_failed_checkpoint",
            "Live jobs whose latest attempt at a checkpoint failed: alert on more than 0 for some minutes.",
            sum(bool(job.checkpoint_failure) for job in live),
        )
        yield GaugeMetricFamily(
            "shoal_coordinator_oldest_checkpoint_seconds",
            "Age of the newest checkpoint, of the live job that has the oldest one; jobs without one do not count.",
            max((now - job.checkpoint.time for job in live if job.checkpoint), default=0.0),
        )
        yield GaugeMetricFamily(
            "shoal_coordinator_restarts",
            "How often the jobs that are known went back to a checkpoint because shards were lost.",
            sum(job.restarts for job in found),
        )
        yield GaugeMetricFamily("shoal_coordinator_epoch", "Number of the newest placement.", status.epoch)
        yield GaugeMetricFamily("shoal_coordinator_watchers", "Calls that watch jobs.", self._watchers())


def _members(status: ClusterStatus) -> Metric:
    counts = Count((member.role, member.alive) for member in status.members)
    family = GaugeMetricFamily(
        "shoal_coordinator_members", "Members by role and by whether their lease runs.", labels=["role", "state"]
    )
    for role in Role:
        for alive, state in _LIVE.items():
            family.add_metric([role.value, state], counts[role, alive])
    return family
