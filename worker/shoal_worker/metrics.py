"""Prometheus metrics of a worker: sums of what its trainers report."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from shoal._rpc import RETRY_TARGETS, Retries, RetryTarget
from shoal_worker.messages import BUCKETS_S, PHASES, Durations, TrainerReport

_COUNTERS = {
    "steps": "Pushes that servers accepted.",
    "samples": "Samples in accepted pushes.",
    "rejected": "Pushes rejected because of NaN or Inf.",
    "dropped": "Pushes that arrived after their step had closed.",
    "trainer_crashes": "Trainers that crashed, or whose incarnation was fenced.",
    "log_lines_dropped": "Lines of programs' output dropped because the queue to the coordinator was full.",
}
_PHASES = {
    "pull": "Time of one pull, including the wait for its step.",
    "read": "Time that the worker waited for one batch. If nothing is read ahead, this is the time to read it.",
    "compute": "Time of one batch: computation, and copies to the device and to the host.",
    "push": "Time of one push.",
    "wait": "Time of one pass of the training loop in which the worker has no batch: it waits for the barrier, asks "
    "for a lease, and is idle if it gets none.",
    "evaluate": "Time of one evaluation, or of the call that asks whether to evaluate.",
}


class WorkerMetrics(Collector):
    """Counters and histograms over all trainers of this daemon.

    It is a collector because trainers report buckets with counts, which prometheus-client's histograms do not accept.

    Args:
        registry: the registry to register with.
        device: display name of the device.
        retries: retries of the daemon's own calls.
    """

    def __init__(self, registry: CollectorRegistry, device: str, retries: Retries | None = None) -> None:
        self._lines_waiting = 0
        self._own_retries = retries or Retries()
        self._lock = threading.Lock()  # guards the five attributes below
        self._trainers = 0
        self._retries: Counter[RetryTarget] = Counter()
        self._counts: Counter[str] = Counter()
        self._durations = {phase: Durations() for phase in PHASES}
        self._memory: Mapping[str, int] = {}  # of the trainer's last report; empty without a trainer, and on a CPU
        self._device = device
        registry.register(self)

    def add(self, trainer_report: TrainerReport) -> None:
        """Adds a trainer's report."""
        report = trainer_report.report
        with self._lock:
            self._counts["steps"] += report.accepted
            self._counts["samples"] += report.samples
            self._counts["rejected"] += report.rejected
            self._counts["dropped"] += report.dropped
            for phase, durations in trainer_report.durations.items():
                self._durations[phase].add(durations)
            self._memory = trainer_report.device_memory or self._memory
            self._retries.update(trainer_report.retries)

    def trainer_started(self) -> None:
        """Counts a trainer that has started."""
        with self._lock:
            self._trainers += 1

    def trainer_ended(self) -> None:
        """Counts a trainer that has ended; its device memory is free."""
        with self._lock:
            self._trainers -= 1
            self._memory = {}

    def set_lines_waiting(self, lines: int) -> None:
        """Sets the number of lines of output that wait to be sent."""
        self._lines_waiting = lines

    def count(self, what: str, amount: int = 1) -> None:
        """Adds `amount` to the counter `shoal_worker_{what}_total`."""
        with self._lock:
            self._counts[what] += amount

    def collect(self) -> Iterator[Metric]:
        """Returns the metrics of a scrape."""
        yield InfoMetricFamily("shoal_worker_device", "Device that programs compute on.", {"device": self._device})
        with self._lock:
            self._retries.update(self._own_retries.take())
            retries, trainers = dict(self._retries), self._trainers
            counts = dict(self._counts)
            memory = dict(self._memory)
            durations = {phase: (list(d.counts), d.total_s) for phase, d in self._durations.items()}
        yield GaugeMetricFamily("shoal_worker_trainers", "Running trainers: 1 while the worker has a job.", trainers)
        held = GaugeMetricFamily(
            "shoal_worker_device_memory_bytes",
            "GPU memory: used by the trainer's arrays, in CuPy's pool, and the pool's limit (0 means none).",
            labels=["kind"],
        )
        for kind, nbytes in memory.items():
            held.add_metric([kind], nbytes)
        yield held
        repeated = CounterMetricFamily(
            "shoal_worker_retries",
            "Repeated calls to the coordinator or to servers that did not answer.",
            labels=["called"],
        )
        for called in RETRY_TARGETS:
            repeated.add_metric([called], retries.get(called, 0))
        yield repeated
        yield GaugeMetricFamily(
            "shoal_worker_log_lines_waiting",
            "Lines of programs' output that wait to be sent to the coordinator.",
            self._lines_waiting,
        )
        for what, text in _COUNTERS.items():
            yield CounterMetricFamily(f"shoal_worker_{what}", text, counts.get(what, 0))
        for phase, (in_buckets, total_s) in durations.items():
            yield HistogramMetricFamily(
                f"shoal_worker_{phase}_seconds", _PHASES[phase], buckets=_cumulated(in_buckets), sum_value=total_s
            )


def _cumulated(counts: list[int]) -> list[tuple[str, float]]:
    bounds = [*(f"{bound:g}" for bound in BUCKETS_S), "+Inf"]
    return [(bound, float(sum(counts[: index + 1]))) for index, bound in enumerate(bounds)]
