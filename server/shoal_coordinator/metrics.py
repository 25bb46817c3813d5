"""The coordinator's Prometheus metrics.

No label names a job, a member or a client, because the number of these is unbounded.
"""

import time
from collections import Counter as Count
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal._limits import refusals
from shoal.checkpoint_policy import CheckpointPolicy
from shoal.status import JobState, Role
from shoal_coordinator.cluster import CheckpointAge, Cluster
from shoal_coordinator.coordinator import Coordinator
from shoal_coordinator.job import JobCounters, RestartReason
from shoal_coordinator.messages import Effect, events
from shoal_coordinator.observer import Observer

# From a small model on a local disk to a large one in a slow object store.
_CHECKPOINT_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 180.0, 600.0, 1800.0, 3600.0)
_REFUSALS = "Requests, calls and connections refused, by limit. The reference of limits explains each."


def count_events(registry: CollectorRegistry, clock: Callable[[], float] = time.time) -> Observer:
    """Registers the counters of events, effects and writes, and returns the observer that updates them.

    Args:
        registry: The registry of the counters.
        clock: Returns seconds of Unix time.
    """
    died = Counter(
        "shoal_coordinator_members_lost_total",
        "Members declared lost because they sent no heartbeat within the heartbeat timeout.",
        ["role"],
        registry=registry,
    )
    for role in Role:
        died.labels(role.value)
    refused = Counter(
        "shoal_coordinator_rejected_requests_total",
        "Rejected requests by error code.",
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
        "Cluster events handled, by kind: heartbeats, leases of data, reports and others.",
        ["event"],
        registry=registry,
    )
    saved = _count_checkpoint_ends(registry, clock)

    def count(event: events.ClusterEvent[Any]) -> None:
        handled.labels(type(event).__name__).inc()
        saved(event)

    return count


def _count_effects(registry: CollectorRegistry) -> tuple[Callable[[str, bool], None], Callable[[], None]]:
    """Returns callbacks that count finished effects and repeated calls."""
    performed = Counter(
        "shoal_coordinator_effects_total",
        "Effects (calls to parameter servers) by kind and outcome, which is done or failed.",
        ["effect", "outcome"],
        registry=registry,
    )
    retried = Counter(
        "shoal_coordinator_retries_total",
        "Calls to parameter servers that were repeated because the server did not reply.",
        registry=registry,
    )
    return lambda effect, done: performed.labels(effect, "done" if done else "failed").inc(), retried.inc


def _count_writes(registry: CollectorRegistry) -> Callable[[float, int], None]:
    seconds = Histogram(
        "shoal_coordinator_store_write_seconds",
        "Time of one write to the store. Concurrent decisions share a write.",
        registry=registry,
    )
    records = Counter("shoal_coordinator_store_records_total", "Records written to the store.", registry=registry)

    def written(took_s: float, count: int) -> None:
        seconds.observe(took_s)
        records.inc(count)

    return written


def _count_checkpoint_ends(
    registry: CollectorRegistry, clock: Callable[[], float]
) -> Callable[[events.ClusterEvent[Any]], None]:
    outcomes = Counter(
        "shoal_coordinator_checkpoints_total",
        "Attempts at checkpoints by outcome, which is complete or failed.",
        ["outcome"],
        registry=registry,
    )
    seconds = Histogram(
        "shoal_coordinator_checkpoint_seconds",
        "Time from a checkpoint's cut until the checkpoint was complete.",
        buckets=_CHECKPOINT_SECONDS,
        registry=registry,
    )
    for outcome in ("complete", "failed"):
        outcomes.labels(outcome)

    def count(event: events.ClusterEvent[Any]) -> None:
        match event:
            case events.CheckpointCommitted(saved=saved):
                outcomes.labels("complete").inc()
                seconds.observe(max(0.0, clock() - saved.time))
            case events.CheckpointFailed():
                outcomes.labels("failed").inc()

    return count


class StateCollector(Collector):
    """A collector of gauges that reads the cluster's state at each scrape.

    Args:
        coordinator: The shell.
        watchers: Returns the number of calls that watch jobs.
        checkpoints: Whether the cluster has checkpoint storage.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        watchers: Callable[[], int],
        *,
        checkpoints: bool,
    ) -> None:
        self._coordinator, self._watchers, self._checkpoints = coordinator, watchers, checkpoints

    def collect(self) -> Iterator[Metric]:
        """Yields one family for each metric."""
        unwritten = self._coordinator.unwritten  # before `reading`, which waits until nothing is unwritten
        waiting = self._coordinator.waiting_workers
        with self._coordinator.reading() as (cluster, now):
            members, generation, pending = cluster.listing.member_states(), cluster.generation, cluster.pending_effects
            live, states = cluster.listing.live_checkpoints(), cluster.listing.job_states()
            wanted, hold = cluster.wanted_workers, cluster.members.breaker.hold
            interval_s = cluster.members.heartbeat_interval_s
            restarts, ended = dict(cluster.counters.restarts), dict(cluster.counters.ended)
            counted = [*_failing_workers(cluster.counters), *_copies(cluster)]
        yield _members(members)
        yield _counted("limits_exceeded", _REFUSALS, "limit", refusals("coordinator"))
        yield _effects(pending)
        yield _jobs(states)
        yield from _ends(ended, restarts)
        yield from counted
        for name, text, value in (
            (
                "wanted_workers",
                "Workers that live jobs could use now, at most max_workers each. Session jobs do not count.",
                wanted,
            ),
            (
                "held_members",
                "Silent members that are not declared lost, because the coordinator may have missed their heartbeats.",
                hold.silent if hold else 0,
            ),
            (
                "jobs_with_failed_checkpoint",
                "Live jobs whose latest attempt at a checkpoint failed.",
                sum(bool(job.failure) for job in live),
            ),
            (
                "oldest_checkpoint_seconds",
                "Largest age of the newest checkpoint of a live job. Jobs without a checkpoint do not count.",
                max((now - job.newest.time for job in live if job.newest), default=0.0),
            ),
            (
                "checkpoint_age_ratio",
                "Largest ratio over live jobs: time since the newest checkpoint, or since the job began to run, "
                "divided by the job's interval between checkpoints.",
                _overdue(live, now) if self._checkpoints else 0.0,
            ),
            (
                "checkpoint_bytes",
                "Bytes of the newest checkpoints of live jobs.",
                sum(job.newest.nbytes for job in live if job.newest),
            ),
            (
                "heartbeat_interval_seconds",
                "Current interval between heartbeats or reports of a member. It grows with the number of members.",
                interval_s,
            ),
            ("unwritten_changes", "Decisions that are not yet in the store, and not yet visible.", unwritten),
            ("placement_generation", "Generation of the newest placement.", generation),
            ("job_watchers", "Calls that watch jobs.", self._watchers()),
            ("waiting_workers", "Workers that wait for their entry into a job.", waiting),
        ):
            yield GaugeMetricFamily(f"shoal_coordinator_{name}", text, value)


def _jobs(states: Mapping[JobState, int]) -> Metric:
    family = GaugeMetricFamily("shoal_coordinator_jobs", "Jobs by state.", labels=["state"])
    for state in JobState:
        family.add_metric([state.value], states.get(state, 0))
    return family


def _ends(ended: Mapping[JobState, int], restarts: Mapping[RestartReason, int]) -> Iterator[Metric]:
    yield _counted("jobs_ended", "Ended jobs by their final state.", "state", ended)
    text = "Restarts of jobs from a checkpoint, because shards were lost or a server drained."
    yield _counted("restarts", text, "reason", restarts)


def _failing_workers(counters: JobCounters) -> Iterator[Metric]:
    yield _counted(
        "quarantines",
        "Workers that got no assignment of a job for a while, because their trainers crashed or hung repeatedly.",
        "reason",
        counters.quarantined,
    )
    yield CounterMetricFamily(
        "shoal_coordinator_hung_trainers",
        "Trainers that were restarted because they made no step while other workers waited for them.",
        counters.hung,
    )


def _copies(cluster: Cluster) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "shoal_coordinator_failovers",
        "Losses of servers after which a job continued with the backups of its shards.",
        cluster.counters.failovers,
    )
    yield GaugeMetricFamily(
        "shoal_coordinator_groups_without_backup",
        "Lock groups of live jobs with replicas that have no complete backup. If the server of one is lost, its job "
        "goes back to a checkpoint.",
        cluster.groups_without_backup,
    )


def _counted(name: str, text: str, label: str, counts: Mapping[Any, int]) -> Metric:
    family = CounterMetricFamily(f"shoal_coordinator_{name}", text, labels=[label])
    for what, count in counts.items():
        family.add_metric([what.value if isinstance(what, Enum) else what], count)
    return family


def _overdue(live: Iterable[CheckpointAge], now: float) -> float:
    ages = []
    for job in live:
        every_s = (job.policy or CheckpointPolicy()).every_s
        if every_s and job.started_at:
            ages.append((now - (job.newest.time if job.newest else job.started_at)) / every_s)
    return max(ages, default=0.0)


def _effects(pending: Iterable[Effect]) -> Metric:
    counts = Count(type(effect).__name__ for effect in pending)
    family = GaugeMetricFamily(
        "shoal_coordinator_pending_effects",
        "Pending effects: calls to parameter servers that may not be done yet.",
        labels=["effect"],
    )
    for kind in get_args(Effect):
        family.add_metric([kind.__name__], counts[kind.__name__])
    return family


def _members(counts: Mapping[tuple[Role, str], int]) -> Metric:
    family = GaugeMetricFamily(
        "shoal_coordinator_members",
        "Members that are alive, and those that were lost or left in the last ten minutes.",
        labels=["role", "state"],
    )
    for role in Role:
        for state in ("alive", "left", "lost"):
            family.add_metric([role.value, state], counts.get((role, state), 0))
    return family
