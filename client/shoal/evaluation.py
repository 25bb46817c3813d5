"""Evaluation of a program: the metrics of its held-out samples, computed batch by batch."""

from collections.abc import Mapping
from contextlib import closing
from typing import Any

import numpy as np

from shoal import errors
from shoal._system import check_count, check_type
from shoal._wire import NAMES, is_name, number
from shoal._wire.limits import METRICS
from shoal.data._reading.batches import read
from shoal.program import AggregateMetric, Array, Dataset, EvaluatedProgram


class MetricTotals:
    """The metrics of all batches added so far.

    Attributes:
        samples: number of samples in these batches.
    """

    def __init__(self) -> None:
        self.samples = 0
        self._sums: dict[str, float] = {}
        self._aggregates: dict[str, AggregateMetric] = {}

    def add(self, metrics: Mapping[str, float | AggregateMetric], samples: int) -> None:
        """Adds the metrics of one batch.

        Args:
            metrics: what `EvaluatedProgram.evaluate` returned.
            samples: number of samples in the batch.

        Raises:
            ProgramError: `metrics` is not a mapping of numbers, has too many or invalid names, or has other names than
                the batch before.
        """
        returned: object = metrics
        if not isinstance(returned, Mapping) or not 0 < len(returned) <= METRICS:
            raise errors.ProgramError(
                f"evaluate() returned {returned!r:.200}; return from 1 to {METRICS} metrics by name"
            )
        for name in returned:
            if not is_name(name):
                raise errors.ProgramError(f"evaluate() names a metric {name!r:.80}; a name must be {NAMES}")
        known = self._sums.keys() | self._aggregates.keys()
        if self.samples and metrics.keys() != known:
            raise errors.ProgramError(
                f"evaluate() returned {', '.join(sorted(metrics))} for one batch, and {', '.join(sorted(known))} for "
                "another; return the same metrics for all"
            )
        self.samples += samples
        for name, metric in metrics.items():
            if isinstance(metric, AggregateMetric):
                earlier = self._aggregates.get(name)
                self._aggregates[name] = earlier.merged_with(metric) if earlier else metric
            else:
                self._sums[name] = self._sums.get(name, 0.0) + _number(name, metric) * samples

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of all samples by name: means over the samples, and values of aggregate metrics.

        Raises:
            ProgramError: the value of an aggregate metric is not a number.
        """
        means = {name: total / self.samples for name, total in self._sums.items()}
        return means | {name: _number(name, metric.value()) for name, metric in self._aggregates.items()}


def _number(name: str, metric: object) -> float:
    return number(metric, f"evaluate() gives {name!r}", "a number or an AggregateMetric")


def evaluate(program: EvaluatedProgram, params: Mapping[str, Array], *, batch_size: int = 256) -> dict[str, float]:
    """Evaluates a program on its held-out samples, in this process.

    The samples are read as a worker reads them, in blocks if the data set has blocks, but without prefetching.

    Args:
        program: the program.
        params: variables by name, such as `JobHandle.pull` returns.
        batch_size: samples in a batch.

    Returns:
        The metrics of all held-out samples, by name.

    Raises:
        BadRequest: an argument has the wrong type.
        ProgramError: there are no held-out samples, or `evaluate` does not return metrics.
    """
    given: object = program
    if isinstance(given, type) or not callable(getattr(given, "evaluate", None)):
        raise errors.BadRequest(
            f"program is {given!r:.200}; give an object with the methods of EvaluatedProgram, such as Digits()"
        )
    check_type("params", params, Mapping, "a dict of arrays by name, such as handle.pull()")
    batch_size = check_count("batch_size", batch_size, 1)
    totals, plan = MetricTotals(), batches_of(program, batch_size)
    with closing(read(program.held_out, plan)) as batches:
        for numbers, batch in zip(plan, batches, strict=True):
            totals.add(program.evaluate(params, batch), len(numbers))
    return totals.metrics()


def batches_of(program: EvaluatedProgram, batch_size: int) -> list[np.ndarray[Any, Any]]:
    """Returns the numbers of the held-out samples, in order, as one int64 [samples] array for each batch.

    Args:
        program: the program.
        batch_size: samples in a batch.

    Raises:
        ProgramError: there are no held-out samples, or `held_out` is not a data set.
    """
    held_out: object = program.held_out
    if not isinstance(held_out, Dataset):
        raise errors.ProgramError(
            f"held_out is a {type(held_out).__name__} without __len__ and batch(indices); give a data set, as an "
            "attribute or a property"
        )
    samples = len(held_out)
    if not samples:
        raise errors.ProgramError("held_out has no samples; give at least one")
    return [np.arange(start, min(start + batch_size, samples)) for start in range(0, samples, batch_size)]


__all__ = ["MetricTotals", "batches_of", "evaluate"]
