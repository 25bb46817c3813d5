"""Prometheus metrics of a rank. A training script has no metrics endpoint of its own, so it registers them."""

from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal.status import Bubble, ideal_bubble
from shoal_distribute.collectives import GroupTimings, RankTimes, StageTimes

_PHASES = {
    "local_reduce": "Time in which the replicas of this process joined their gradients.",
    "wait": "Time in which this rank waited until others made the same call, or passed a message.",
    "transfer": "Time of collective calls without the wait: moving and adding data.",
}


class RankMetrics(Collector):
    """The metrics of one rank.

    Args:
        own: returns the times of this rank since its group began.
        group: returns those of all ranks over the last minute.
        sent_bytes: returns the bytes of array data that this rank has sent over connections.
    """

    def __init__(
        self, own: Callable[[], RankTimes], group: Callable[[], GroupTimings], sent_bytes: Callable[[], int]
    ) -> None:
        self._own, self._group, self._sent_bytes = own, group, sent_bytes

    def collect(self) -> Iterator[Metric]:
        """Returns the metrics of a scrape."""
        own, group = self._own(), self._group()
        straggler = group.straggler()
        yield GaugeMetricFamily("shoal_rank_ranks", "Ranks of the group.", len(group.ranks))
        yield GaugeMetricFamily(
            "shoal_rank_straggler",
            "Number of the rank that the others wait for. -1 means none.",
            straggler.rank if straggler else -1,
        )
        yield CounterMetricFamily("shoal_rank_steps", "Steps in which this rank has applied gradients.", own.steps)
        yield CounterMetricFamily("shoal_rank_calls", "Collective calls of this rank.", own.calls)
        yield CounterMetricFamily(
            "shoal_rank_sent_bytes", "Array data that this rank has sent over connections.", self._sent_bytes()
        )
        for phase, text in _PHASES.items():
            yield CounterMetricFamily(f"shoal_rank_{phase}_seconds", text, getattr(own, phase))
        if own.stage:
            yield from _of_stage(own.stage, group.bubble())


def _of_stage(stage: StageTimes, bubble: Bubble | None) -> Iterator[Metric]:
    """Returns the metrics of a rank that computes a stage of a pipeline.

    Args:
        stage: its times since the group began.
        bubble: that of the pipeline over the last minute.
    """
    yield GaugeMetricFamily("shoal_rank_stage", "Number of the pipeline's stage that this rank computes.", stage.stage)
    yield CounterMetricFamily(
        "shoal_rank_stage_seconds",
        "Time of the training steps of this stage, without updates of variables.",
        stage.seconds,
    )
    yield CounterMetricFamily(
        "shoal_rank_stage_wait_seconds", "Time of these steps in which the stage did not compute.", stage.wait
    )
    yield GaugeMetricFamily(
        "shoal_rank_stage_bubble_ratio",
        "Share of these steps in which the stage did not compute.",
        stage.bubble or 0.0,
    )
    yield GaugeMetricFamily(
        "shoal_rank_bubble_ratio",
        "Share of the steps of the last minute in which the stages did not compute, as a mean of the stages.",
        bubble.measured or 0.0 if bubble else 0.0,
    )
    yield GaugeMetricFamily(
        "shoal_rank_ideal_bubble_ratio",
        "Bubble of equal stages: (stages - 1) / (micro-batches + stages - 1).",
        ideal_bubble(stage.stages, stage.micro_batches),
    )


__all__ = ["RankMetrics"]
