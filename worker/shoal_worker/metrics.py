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

from shoal_worker.messages import BUCKETS_S, PHASES, Durations, Figures

_COUNTERS = {
    "steps": "Pushes that servers accepted.",
    "samples": "Examples in accepted pushes.",
    "rejected": "Pushes refused for NaN or Inf.",
    "dropped": "Pushes that came after their step had closed.",
    "trainer_deaths": "Trainers that were killed, not by this daemon, or refused by servers.",
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
    """

    def __init__(self, registry: CollectorRegistry, device: str) -> None:
        self._lock = threading.Lock()  # guards the three below
        self._counts: Counter[str] = Counter()
        self._durations = {phase: Durations() for phase in PHASES}
        self._memory: Mapping[str, int] = {}  # the trainer's, as it said last; empty without one, and on a CPU
        self._device = device
        registry.register(self)

    def add(self, figures: Figures) -> None:
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

    def trainer_ended(self) -> None:
        """What it held of the device is free again."""
        with self._lock:
            self._memory = {}

    def count(self, what: str, amount: int = 1) -> None:
        """Adds to the counter `shoal_worker_{what}_total`."""
        with self._lock:
            self._counts[what] += amount

    def collect(self) -> Iterator[Metric]:
        """What a scrape gets."""
        yield InfoMetricFamily("shoal_worker_device", "Where programs compute.", {"device": self._device})
        with self._lock:
            counts = dict(self._counts)
            memory = dict(self._memory)
            durations = {phase: (list(d.counts), d.total_s) for phase, d in self._durations.items()}
        held = GaugeMetricFamily(
            "shoal_worker_device_memory_bytes",
            "A GPU's memory: used by the trainer's arrays, in CuPy's pool, and the pool's limit (0: none).",
            labels=["kind"],
        )
        for kind, nbytes in memory.items():
            held.add_metric([kind], nbytes)
        yield held
        for what, text in _COUNTERS.items():
            yield CounterMetricFamily(f"shoal_worker_{what}", text, counts.get(what, 0))
        for phase, (in_buckets, total_s) in durations.items():
            yield HistogramMetricFamily(
                f"shoal_worker_{phase}_seconds", _PHASES[phase], buckets=_cumulated(in_buckets), sum_value=total_s
            )


def _cumulated(counts: list[int]) -> list[tuple[str, float]]:
    bounds = [*(f"{bound:g}" for bound in BUCKETS_S), "+Inf"]
    return [(bound, float(sum(counts[: index + 1]))) for index, bound in enumerate(bounds)]
