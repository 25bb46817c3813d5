"""Prometheus metrics of the stages of a pipeline. A training script has no metrics endpoint, so it registers them."""

from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal_distribute.pipeline.timings import PipelineTimings


class StageMetrics(Collector):
    """The metrics of the stages of one process.

    Args:
        timings: returns the timings of the model that was trained last.
    """

    def __init__(self, timings: Callable[[], PipelineTimings]) -> None:
        self._timings = timings

    def collect(self) -> Iterator[Metric]:
        """Returns the metrics of a scrape."""
        timings = self._timings()
        yield CounterMetricFamily(
            "shoal_pipeline_steps", "Training steps of the model that was trained last.", timings.steps
        )
        yield CounterMetricFamily("shoal_pipeline_step_seconds", "Duration of these steps.", timings.seconds)
        yield GaugeMetricFamily(
            "shoal_pipeline_bubble_ratio", "Share of these steps in which the stages waited.", timings.bubble
        )
        yield GaugeMetricFamily(
            "shoal_pipeline_ideal_bubble_ratio",
            "Bubble of equal stages: (stages - 1) / (micro-batches + stages - 1).",
            timings.ideal_bubble,
        )
        yield GaugeMetricFamily(
            "shoal_pipeline_slowest_stage",
            "Number of the stage that computed longest. -1 means that there are no steps.",
            timings.slowest.stage if timings.stages else -1,
        )
        compute = CounterMetricFamily(
            "shoal_pipeline_stage_compute_seconds", "Time in which a stage computed.", labels=["stage"]
        )
        wait = CounterMetricFamily(
            "shoal_pipeline_stage_wait_seconds", "Time in which a stage waited for other stages.", labels=["stage"]
        )
        bubble = GaugeMetricFamily(
            "shoal_pipeline_stage_bubble_ratio", "Share of these steps in which a stage waited.", labels=["stage"]
        )
        peak = GaugeMetricFamily(
            "shoal_pipeline_stage_peak_bytes", "The most bytes that a stage has held.", labels=["stage"]
        )
        for stage in timings.stages:
            label = [str(stage.stage)]
            compute.add_metric(label, stage.compute_s)
            wait.add_metric(label, stage.wait_s)
            bubble.add_metric(label, stage.bubble)
            peak.add_metric(label, stage.peak_bytes)
        yield from (compute, wait, bubble, peak)


__all__ = ["StageMetrics"]
