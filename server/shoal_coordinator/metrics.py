"""What the coordinator tells Prometheus. No label names a job, a member or a client: their number has no bound."""

import time
from collections import Counter as Count
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal.checkpoint_policy import CheckpointPolicy
from shoal.status import ClusterStatus, JobState, JobStatus, Role
from shoal_coordinator.coordinator import Coordinator, Observer
from shoal_coordinator.job import RestartReason
from shoal_coordinator.messages import Effect, events

_LIVE = {True: "alive", False: "dead"}
# From a small model on a local disk to a large one in a slow object store.
_CHECKPOINT_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 180.0, 600.0, 1800.0, 3600.0)


def count_events(registry: CollectorRegistry, clock: Callable[[], float] = time.time) -> Observer:
    """Counters of what passes through the coordinator, and the observer that keeps them.

    Args:
        registry: where they go.
        clock: seconds of Unix time.
    """
    died = Counter(
        "shoal_coordinator_members_lost_total",
        "Members that were declared dead, since they were silent for longer than their lease.",
        ["role"],
        registry=registry,
    )
    for role in Role:
        died.labels(role.value)
    refused = Counter(
        "shoal_coordinator_rejected_requests_total",
        "Requests that were refused, by the code of the error.",
        ["code"],
        registry=registry,
    )
    performed, retried = _count_effects(registry)
    return Observer(
        handled=_count_handled(registry, clock),
        refused=lambda code: refused.labels(code).inc(),
        died=lambda role: died.labels(role.value).inc(),
        performed=performed,
        retried=retried,
        written=_count_writes(registry),
    )


def _count_handled(
    registry: CollectorRegistry, clock: Callable[[], float]
) -> Callable[[events.ClusterEvent[Any]], None]:
    handled = Counter(
        "shoal_coordinator_events_total",
        "Events taken in, by kind: heartbeats, leases of data, reports and all else.",
        ["event"],
        registry=registry,
    )
    saved = _count_checkpoints(registry, clock)

    def count(event: events.ClusterEvent[Any]) -> None:
        handled.labels(type(event).__name__).inc()
        saved(event)

    return count


def _count_effects(registry: CollectorRegistry) -> tuple[Callable[[str, bool], None], Callable[[], None]]:
    """Counts effects that were performed, and calls that were repeated."""
    performed = Counter(
        "shoal_coordinator_effects_total",
        "Calls to parameter servers by kind, with the outcome done or failed.",
        ["effect", "outcome"],
        registry=registry,
    )
    retried = Counter(
        "shoal_coordinator_retries_total",
        "Calls to parameter servers that were repeated, since nobody answered.",
        registry=registry,
    )
    return lambda effect, done: performed.labels(effect, "done" if done else "failed").inc(), retried.inc


def _count_writes(registry: CollectorRegistry) -> Callable[[float, int], None]:
    seconds = Histogram(
        "shoal_coordinator_store_write_seconds",
        "Time that the store took to make decisions durable, several at once where they wait for each other.",
        registry=registry,
    )
    records = Counter("shoal_coordinator_store_records_total", "Records that the store was given.", registry=registry)

    def written(took_s: float, count: int) -> None:
        seconds.observe(took_s)
        records.inc(count)

    return written


def _count_checkpoints(
    registry: CollectorRegistry, clock: Callable[[], float]
) -> Callable[[events.ClusterEvent[Any]], None]:
    outcomes = Counter(
        "shoal_coordinator_checkpoints_total",
        "Checkpoints that were written, and attempts that failed.",
        ["outcome"],
        registry=registry,
    )
    seconds = Histogram(
        "shoal_coordinator_checkpoint_seconds",
        "Time from a checkpoint's cut until it was whole.",
        buckets=_CHECKPOINT_SECONDS,
        registry=registry,
    )
    for outcome in ("written", "failed"):
        outcomes.labels(outcome)

    def count(event: events.ClusterEvent[Any]) -> None:
        match event:
            case events.CheckpointCommitted(saved=saved):
                outcomes.labels("written").inc()
                seconds.observe(max(0.0, clock() - saved.time))
            case events.CheckpointFailed():
                outcomes.labels("failed").inc()

    return count


class StateCollector(Collector):
    """Gauges of the cluster's state, read when they are asked for.

    Args:
        coordinator: the shell.
        watchers: tells how many calls watch jobs.
        checkpoints: whether the cluster has a folder of them.
    """

    def __init__(self, coordinator: Coordinator, watchers: Callable[[], int], *, checkpoints: bool) -> None:
        self._coordinator, self._watchers, self._checkpoints = coordinator, watchers, checkpoints

    def collect(self) -> Iterator[Metric]:
        """One family a figure."""
        unwritten = self._coordinator.unwritten  # before reading, which waits until there are none
        with self._coordinator.reading() as (cluster, now):
            status, found, outstanding = cluster.status(now), cluster.jobs(now), cluster.pending_effects
            wanted = cluster.wanted_workers
            restarts, ended = dict(cluster.counters.restarts), dict(cluster.counters.ended)
        yield _members(status)
        yield _effects(outstanding)
        states = Count(job.state for job in found)
        jobs = GaugeMetricFamily("shoal_coordinator_jobs", "Jobs by state.", labels=["state"])
        for state in JobState:
            jobs.add_metric([state.value], states[state])
        yield jobs
        yield _counted("jobs_ended", "Jobs that ended, by their last state.", "state", ended)
        yield _counted(
            "restarts",
            "How often jobs went back to a checkpoint: their shards were lost, or a server said that it was leaving.",
            "reason",
            restarts,
        )
        live = [job for job in found if not job.state.finished]
        overdue = _overdue(live, now) if self._checkpoints else 0.0
        for name, text, value in (
            (
                "wanted_workers",
                "Workers that live jobs could use now, at most their max_workers; sessions do not count.",
                wanted,
            ),
            (
                "jobs_with_failed_checkpoint",
                "Live jobs whose latest attempt at a checkpoint failed.",
                sum(bool(job.checkpoint_failure) for job in live),
            ),
            (
                "oldest_checkpoint_seconds",
                "Age of the newest checkpoint, of the live job that has the oldest one; jobs without one do not count.",
                max((now - job.checkpoint.time for job in live if job.checkpoint), default=0.0),
            ),
            (
                "checkpoint_age_ratio",
                "Time since the newest checkpoint, or since the job began to run, over the time from one to the next "
                "that it asks for; of the live job that has waited longest.",
                overdue,
            ),
            (
                "checkpoint_bytes",
                "Bytes of the live jobs' newest checkpoints.",
                sum(job.checkpoint.nbytes for job in live if job.checkpoint),
            ),
            ("unwritten_changes", "Decisions that the store does not have yet; nobody has seen them.", unwritten),
            ("placement_generation", "Number of the newest placement.", status.generation),
            ("job_watchers", "Calls that watch jobs.", self._watchers()),
        ):
            yield GaugeMetricFamily(f"shoal_coordinator_{name}", text, value)


def _counted(name: str, text: str, label: str, counts: Mapping[JobState, int] | Mapping[RestartReason, int]) -> Metric:
    family = CounterMetricFamily(f"shoal_coordinator_{name}", text, labels=[label])
    for what, count in counts.items():
        family.add_metric([what.value], count)
    return family


def _overdue(live: Iterable[JobStatus], now: float) -> float:
    ages = []
    for job in live:
        every_s = (job.job.checkpoints or CheckpointPolicy()).every_s
        if every_s and job.started_at:
            ages.append((now - (job.checkpoint.time if job.checkpoint else job.started_at)) / every_s)
    return max(ages, default=0.0)


def _effects(outstanding: Iterable[Effect]) -> Metric:
    counts = Count(type(effect).__name__ for effect in outstanding)
    family = GaugeMetricFamily(
        "shoal_coordinator_pending_effects",
        "Calls to parameter servers that were decided on and are not known to be done.",
        labels=["effect"],
    )
    for kind in get_args(Effect):
        family.add_metric([kind.__name__], counts[kind.__name__])
    return family


def _members(status: ClusterStatus) -> Metric:
    counts = Count((member.role, member.alive) for member in status.members)
    family = GaugeMetricFamily(
        "shoal_coordinator_members",
        "Members that are alive, and those that died or left in the last ten minutes (dead).",
        labels=["role", "state"],
    )
    for role in Role:
        for alive, state in _LIVE.items():
            family.add_metric([role.value, state], counts[role, alive])
    return family
