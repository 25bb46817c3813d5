"""The worker's Prometheus metrics. A trainer measures, in its own process; what it sends up is added up here."""

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
    "rejected": "Pushes refused for NaN or Inf.",
    "dropped": "Pushes that came after their step had closed.",
    "trainer_crashes": "Trainers that were killed, not by this daemon, or refused by servers.",
    "log_lines_dropped": "Lines of programs' output that waited too long to be sent.",
}
_PHASES = {
    "pull": "Time of one pull, the wait for its step included.",
    "read": "Time of one wait for a batch that is not read yet, or of its reading where nothing is read ahead.",
    "compute": "Time of one batch: computing, and copying to the device and the host.",
    "push": "Time of one push.",
    "wait": "Time of one wait for data: barrier, lease and pause.",
    "evaluate": "Time of one evaluation, or of asking whether it is this worker's to do.",
}


class WorkerMetrics(Collector):
    """Counters and histograms over all trainers of this daemon's life.

    Histograms come in buckets, already counted, for which prometheus-client's own have no door; hence a collector.

    Args:
        registry: where to register.
        device: its name.
        retries: of the daemon's own calls.
    """

    def __init__(self, registry: CollectorRegistry, device: str, retries: Retries | None = None) -> None:
        self._lines_waiting = 0
        self._own_retries = retries or Retries()
        self._lock = threading.Lock()  # guards the five below
        self._trainers = 0
        self._retries: Counter[RetryTarget] = Counter()
        self._counts: Counter[str] = Counter()
        self._durations = {phase: Durations() for phase in PHASES}
        self._memory: Mapping[str, int] = {}  # the trainer's, as it said last; empty without one, and on a CPU
        self._device = device
        registry.register(self)

    def add(self, figures: TrainerReport) -> None:
        """Adds what a trainer did."""
        report = figures.report
        with self._lock:
            self._counts["steps"] += report.accepted
            self._counts["samples"] += report.samples
            self._counts["rejected"] += report.rejected
            self._counts["dropped"] += report.dropped
            for phase, durations in figures.durations.items():
                self._durations[phase].add(durations)
            self._memory = figures.device_memory
            self._retries.update(figures.retries)

    def trainer_started(self) -> None:
        """There is one more."""
        with self._lock:
            self._trainers += 1

    def trainer_ended(self) -> None:
        """There is one less, and what it held of the device is free again."""
        with self._lock:
            self._trainers -= 1
            self._memory = {}

    def set_lines_waiting(self, lines: int) -> None:
        """Says how many lines of the program's output the coordinator does not have yet."""
        self._lines_waiting = lines

    def count(self, what: str, amount: int = 1) -> None:
        """Adds to the counter `shoal_worker_{what}_total`."""
        with self._lock:
            self._counts[what] += amount

    def collect(self) -> Iterator[Metric]:
        """What a scrape gets."""
        yield InfoMetricFamily("shoal_worker_device", "Where programs compute.", {"device": self._device})
        with self._lock:
            self._retries.update(self._own_retries.take())
            retries, trainers = dict(self._retries), self._trainers
            counts = dict(self._counts)
            memory = dict(self._memory)
            durations = {phase: (list(d.counts), d.total_s) for phase, d in self._durations.items()}
        yield GaugeMetricFamily("shoal_worker_trainers", "Trainers that run: 1 while the worker has a job.", trainers)
        held = GaugeMetricFamily(
            "shoal_worker_device_memory_bytes",
            "A GPU's memory: used by the trainer's arrays, in CuPy's pool, and the pool's limit (0: none).",
            labels=["kind"],
        )
        for kind, nbytes in memory.items():
            held.add_metric([kind], nbytes)
        yield held
        repeated = CounterMetricFamily(
            "shoal_worker_retries",
            "Calls to the coordinator or to a server that were repeated, since nobody answered.",
            labels=["called"],
        )
        for called in RETRY_TARGETS:
            repeated.add_metric([called], retries.get(called, 0))
        yield repeated
        yield GaugeMetricFamily(
            "shoal_worker_log_lines_waiting",
            "Lines of programs' output that the coordinator does not have yet.",
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
