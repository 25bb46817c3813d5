"""Reduction of the learning rate when a metric stops improving."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from shoal.optim._specifications import Count, Flag, Fraction, NonNegative, Specification
from shoal.v1 import job_pb2

_LEAST_CHANGE = 1e-8  # of a rate, as PyTorch's eps


@dataclass(frozen=True, slots=True)
class PlateauState:
    """What a job remembers for `ReduceOnPlateau`. Checkpoints keep it.

    Attributes:
        best: the best value of the metric; None until an evaluation has a value other than NaN.
        bad: consecutive evaluations without an improvement.
        cooldown: evaluations until `bad` counts again.
    """

    best: float | None = None
    bad: int = 0
    cooldown: int = 0

    def to_proto(self) -> job_pb2.PlateauState:
        """Returns the message that carries this state."""
        return job_pb2.PlateauState(best=self.best, bad=self.bad, cooldown=self.cooldown)

    @classmethod
    def from_proto(cls, message: job_pb2.PlateauState) -> "PlateauState":
        """Returns the state that a message carries."""
        return cls(message.best if message.HasField("best") else None, message.bad, message.cooldown)


@dataclass(frozen=True)
class ReduceOnPlateau(Specification):
    """Reduces a constant learning rate when a metric stops improving, as PyTorch's ReduceLROnPlateau.

        plateau = shoal.optim.ReduceOnPlateau(factor=0.5, patience=3)
        evaluation = shoal.EvaluationPolicy(every_steps=200, metric="loss", reduce_on_plateau=plateau)

    After more than `patience` consecutive evaluations without an improvement, the new rate is
    max(factor * rate, minimum). A change of at most 1e-8 is not made. The evaluation policy says what the metric is,
    and whether smaller or larger values are better. NaN is never an improvement.

    Args:
        factor: factor of the rate, >= 0 and < 1.
        patience: evaluations without an improvement after which the next one reduces the rate, >= 0.
        threshold: least difference from the best value that counts as an improvement, >= 0.
        relative: whether `threshold` is a fraction of the best value (PyTorch's "rel") instead of a difference ("abs").
        cooldown: evaluations after a reduction that do not count for `patience`, >= 0.
        minimum: smallest rate, >= 0.

    Raises:
        InvalidOptimizer: a number is out of range or not finite.
    """

    kind: ClassVar[str] = "reduction"
    registry: ClassVar[dict[str, type[Any]]] = {}
    name: ClassVar[str] = "reduce_on_plateau"
    advice: ClassVar[dict[str, str]] = {
        "mode": "the evaluation policy says whether smaller values are better: shoal.EvaluationPolicy(mode=...)",
        "threshold_mode": "did you mean relative?",
        "min_lr": "did you mean minimum?",
    }

    factor: Fraction = 0.1
    patience: Count = 10
    threshold: NonNegative = 1e-4
    relative: Flag = True
    cooldown: Count = 0
    minimum: NonNegative = 0.0

    def after(self, state: PlateauState, value: float, *, minimizes: bool) -> tuple[PlateauState, bool]:
        """Counts an evaluation.

        Args:
            state: the state before it.
            value: its value of the metric.
            minimizes: whether smaller values are better.

        Returns:
            The state after it, and whether to reduce the rate.
        """
        best, bad, cooldown = state.best, state.bad + 1, state.cooldown
        if not math.isnan(value) and (best is None or self._improves(value, best, minimizes)):
            best, bad = value, 0
        if cooldown:
            bad, cooldown = 0, cooldown - 1
        if bad > self.patience:
            return PlateauState(best, 0, self.cooldown), True
        return PlateauState(best, bad, cooldown), False

    def reduced(self, rate: float) -> float:
        """Returns the rate after a reduction."""
        new = max(rate * self.factor, self.minimum)
        return new if rate - new > _LEAST_CHANGE else rate

    def _improves(self, value: float, best: float, minimizes: bool) -> bool:
        if self.relative:  # PyTorch's formulas: the sign of the best value is not looked at
            return value < best * (1 - self.threshold) if minimizes else value > best * (1 + self.threshold)
        return value < best - self.threshold if minimizes else value > best + self.threshold

    def to_proto(self) -> job_pb2.ReduceOnPlateau:
        """Returns the message that carries this specification."""
        return job_pb2.ReduceOnPlateau(
            factor=self.factor,
            patience=self.patience,
            threshold=self.threshold,
            relative=self.relative,
            cooldown=self.cooldown,
            minimum=self.minimum,
        )

    @classmethod
    def from_proto(cls, message: job_pb2.ReduceOnPlateau) -> "ReduceOnPlateau":
        """Returns the specification that a message carries.

        Raises:
            InvalidOptimizer: a number is out of range.
        """
        return cls(
            message.factor, message.patience, message.threshold, message.relative, message.cooldown, message.minimum
        )


__all__ = ["PlateauState", "ReduceOnPlateau"]
