"""Learning-rate schedules by Keras' names. Each stands for a schedule of `shoal.optim`, which optimizers also take."""

from collections.abc import Sequence
from typing import Any

from shoal import optim
from shoal.errors import InvalidOptimizer
from shoal_distribute.keras.names import Advising


class LearningRateSchedule(Advising):
    """Learning rate as a function of the number of updates so far.

    Args:
        schedule: the schedule of `shoal.optim` that computes it.

    Attributes:
        schedule: the schedule of `shoal.optim` that computes it.
    """

    def __init__(self, schedule: optim.Schedule) -> None:
        self.schedule = schedule

    def __call__(self, step: Any) -> float:
        return self.schedule.rate(int(step))


class ExponentialDecay(LearningRateSchedule):
    """initial_learning_rate * decay_rate ** (step / decay_steps).

    Args:
        initial_learning_rate: rate of the first update.
        decay_steps: updates in which the rate falls by the factor `decay_rate`.
        decay_rate: the factor, above 0 and at most 1.
        staircase: whether the exponent is rounded down.
    """

    def __init__(
        self, initial_learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False
    ) -> None:
        if staircase:
            super().__init__(optim.StepLR(initial_learning_rate, decay_steps, decay_rate))
        else:
            super().__init__(optim.ExponentialLR(initial_learning_rate, decay_rate ** (1 / decay_steps)))


class PiecewiseConstantDecay(LearningRateSchedule):
    """values[0] up to and including step boundaries[0], then values[1] up to boundaries[1], and so on.

    Args:
        boundaries: steps in ascending order.
        values: rates, one more than there are boundaries.
    """

    def __init__(self, boundaries: Sequence[int], values: Sequence[float]) -> None:
        later = tuple(int(boundary) + 1 for boundary in boundaries)
        super().__init__(optim.PiecewiseLR(values[0], boundaries=later, rates=tuple(values[1:])))


class CosineDecay(LearningRateSchedule):
    """A rate that falls along a cosine to alpha * initial_learning_rate.

    Args:
        initial_learning_rate: rate of the first update.
        decay_steps: updates until the end.
        alpha: last rate as a share of the first.
    """

    def __init__(self, initial_learning_rate: float, decay_steps: int, alpha: float = 0.0) -> None:
        super().__init__(optim.CosineLR(initial_learning_rate, decay_steps, alpha * initial_learning_rate))


class PolynomialDecay(LearningRateSchedule):
    """A rate that changes linearly to end_learning_rate.

    Args:
        initial_learning_rate: rate of the first update.
        decay_steps: updates until the end.
        end_learning_rate: last rate.
        power: must be 1.

    Raises:
        InvalidOptimizer: `power` is another number.
    """

    def __init__(
        self, initial_learning_rate: float, decay_steps: int, end_learning_rate: float = 0.0001, power: float = 1.0
    ) -> None:
        if power != 1:
            raise InvalidOptimizer(f"PolynomialDecay(power={power}) is not supported; power must be 1")
        super().__init__(optim.LinearLR(initial_learning_rate, decay_steps, end_learning_rate))


def rate_of(given: Any) -> float | optim.Schedule:
    """Returns a learning rate as `shoal.optim` takes it: a number or a schedule.

    Args:
        given: a number, a schedule of this module, or one of `shoal.optim`.
    """
    if isinstance(given, LearningRateSchedule):
        return given.schedule
    return given if isinstance(given, optim.Schedule) else float(given)


__all__ = [
    "CosineDecay",
    "ExponentialDecay",
    "LearningRateSchedule",
    "PiecewiseConstantDecay",
    "PolynomialDecay",
    "rate_of",
]
