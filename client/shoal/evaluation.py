"""Evaluating a program: the figures of its held-out samples, batch by batch."""

from collections.abc import Mapping
from contextlib import closing
from typing import Any

import numpy as np

from shoal import errors
from shoal._wire import NAMES, is_name, number
from shoal._wire.limits import METRICS
from shoal.data._reading.batches import read
from shoal.program import AggregateMetric, Array, Dataset, EvaluatedProgram


class Total:
    """The figures of all batches so far."""

    def __init__(self) -> None:
        self.samples = 0
        self._sums: dict[str, float] = {}
        self._measures: dict[str, AggregateMetric] = {}

    def add(self, figures: Mapping[str, float | AggregateMetric], samples: int) -> None:
        """Adds what `EvaluatedProgram.evaluate` returned for a batch of so many samples.

        Raises:
            ProgramError: these are no figures, too many, not named so, or others than of the batch before.
        """
        returned: object = figures
        if not isinstance(returned, Mapping) or not 0 < len(returned) <= METRICS:
            raise errors.ProgramError(
                f"evaluate() returned {returned!r:.200}; return from 1 to {METRICS} figures by name"
            )
        for name in returned:
            if not is_name(name):
                raise errors.ProgramError(f"evaluate() names a figure {name!r:.80}; name it by {NAMES}")
        known = self._sums.keys() | self._measures.keys()
        if self.samples and figures.keys() != known:
            raise errors.ProgramError(
                f"evaluate() returned {', '.join(sorted(figures))} for one batch, and {', '.join(sorted(known))} for "
                "another; return the same figures for all"
            )
        self.samples += samples
        for name, figure in figures.items():
            if isinstance(figure, AggregateMetric):
                earlier = self._measures.get(name)
                self._measures[name] = earlier.joined(figure) if earlier else figure
            else:
                self._sums[name] = self._sums.get(name, 0.0) + _number(name, figure) * samples

    def figures(self) -> dict[str, float]:
        """Of all of them: means by sample, and what the measures come to."""
        means = {name: total / self.samples for name, total in self._sums.items()}
        return means | {name: _number(name, measure.value()) for name, measure in self._measures.items()}


def _number(name: str, figure: object) -> float:
    return number(figure, f"evaluate() gives {name!r}", "a number or a Measure")


def evaluate(program: EvaluatedProgram, params: Mapping[str, Array], *, batch_size: int = 256) -> dict[str, float]:
    """Evaluates a program's held-out samples here, with variables such as `JobHandle.pull` gives.

    They are read as a worker reads them, in blocks if the data set has some, but not ahead.

    Raises:
        ProgramError: there are no samples, or what `evaluate` returns are no figures.
    """
    total, plan = Total(), batches_of(program, batch_size)
    with closing(read(program.held_out, plan)) as batches:
        for numbers, batch in zip(plan, batches, strict=True):
            total.add(program.evaluate(params, batch), len(numbers))
    return total.figures()


def batches_of(program: EvaluatedProgram, batch_size: int) -> list[np.ndarray[Any, Any]]:
    """The numbers of the held-out samples, in order, in batches.

    Raises:
        ProgramError: there are none, or it is no data set.
    """
    held_out: object = program.held_out
    if not isinstance(held_out, Dataset):
        raise errors.ProgramError(
            f"held_out is a {type(held_out).__name__} without __len__ and batch(indices); give a data set, as an "
            "attribute or a property"
        )
    samples = len(held_out)
    if not samples:
        raise errors.ProgramError("held_out has no samples; give one at least")
    return [np.arange(start, min(start + batch_size, samples)) for start in range(0, samples, batch_size)]


__all__ = ["Total", "batches_of", "evaluate"]
