"""Learning-rate schedules by Keras' names. Each stands for a schedule of `shoal.optim`, which optimizers also take."""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from shoal import optim
from shoal.errors import InvalidOptimizer
from shoal.v1 import job_pb2
from shoal_distribute.keras.names import Advising


@dataclass(frozen=True)
class FunctionSchedule(optim.Schedule):
    """A schedule that is a function. Servers cannot compute it.

    Args:
        function: returns the rate for the number of updates so far.
    """

    name: ClassVar[str] = "function"  # of messages alone: it is not registered

    function: Callable[[int], Any] = field(kw_only=True)

    def rate(self, version: int) -> float:
        return float(self.function(version))

    def _after_warmup(self, version: int, /) -> float:
        return self.rate(version)

    def to_proto(self) -> job_pb2.Schedule:
        raise InvalidOptimizer(
            "a learning rate that is a function cannot be sent to other processes; use a schedule of shoal.optim"
        )


class LearningRateSchedule(Advising):
    """Learning rate as a function of the number of updates so far.

    A subclass defines `__call__`, which gets this number and returns the rate. The strategies without servers take it.
    """

    @property
    def schedule(self) -> optim.Schedule:
        """The schedule of `shoal.optim` that computes it. That of a subclass of the user calls the subclass."""
        return FunctionSchedule(float(self(0)), function=self)

    @abstractmethod
    def __call__(self, step: Any) -> Any:
        """Returns the rate.

        Args:
            step: number of updates so far.
        """
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make the same schedule again."""
        return self.arguments()


class _Known(LearningRateSchedule):
    """Base class of schedules that `shoal.optim` has, too.

    Args:
        name: its name.
        schedule: the schedule of `shoal.optim`.
    """

    def __init__(self, name: str, schedule: optim.Schedule, /) -> None:
        self.name, self._schedule = name, schedule

    @property
    def schedule(self) -> optim.Schedule:
        return self._schedule

    def __call__(self, step: Any) -> float:
        return self.schedule.rate(int(step))


class ExponentialDecay(_Known):
    """initial_learning_rate * decay_rate ** (step / decay_steps).

    Args:
        initial_learning_rate: rate of the first update.
        decay_steps: updates in which the rate falls by the factor `decay_rate`.
        decay_rate: the factor, above 0 and at most 1.
        staircase: whether the exponent is rounded down.
        name: its name.
    """

    def __init__(
        self,
        initial_learning_rate: float,
        decay_steps: int,
        decay_rate: float,
        staircase: bool = False,
        name: str = "ExponentialDecay",
    ) -> None:
        if staircase:
            super().__init__(name, optim.StepLR(initial_learning_rate, decay_steps, decay_rate))
        else:
            super().__init__(name, optim.ExponentialLR(initial_learning_rate, decay_rate ** (1 / decay_steps)))


class PiecewiseConstantDecay(_Known):
    """values[0] up to and including step boundaries[0], then values[1] up to boundaries[1], and so on.

    Args:
        boundaries: steps in ascending order.
        values: rates, one more than there are boundaries.
        name: its name.
    """

    def __init__(self, boundaries: Sequence[int], values: Sequence[float], name: str = "PiecewiseConstant") -> None:
        later = tuple(int(boundary) + 1 for boundary in boundaries)
        super().__init__(name, optim.PiecewiseLR(values[0], boundaries=later, rates=tuple(values[1:])))


class CosineDecay(_Known):
    """A rate that falls along a cosine to alpha times the highest rate, after a linear rise if there is a warm-up.

    A schedule with a warm-up is a function: only strategies without servers take it. `shoal.optim.CosineLR` has a
    warm-up that servers compute.

    Args:
        initial_learning_rate: rate of the first update.
        decay_steps: updates until the end, without the warm-up.
        alpha: last rate as a share of the highest.
        name: its name.
        warmup_target: rate after the warm-up; None means no warm-up.
        warmup_steps: updates of the warm-up.
    """

    def __init__(
        self,
        initial_learning_rate: float,
        decay_steps: int,
        alpha: float = 0.0,
        name: str = "CosineDecay",
        warmup_target: float | None = None,
        warmup_steps: int = 0,
    ) -> None:
        highest = initial_learning_rate if warmup_target is None else warmup_target
        decay = optim.CosineLR(highest, decay_steps, alpha * highest)
        steps = 0 if warmup_target is None else warmup_steps

        def rate(step: int) -> float:
            if step >= steps:
                return decay.rate(step - steps)
            return initial_learning_rate + (highest - initial_learning_rate) * step / steps

        super().__init__(name, FunctionSchedule(rate(0), function=rate) if steps else decay)


class PolynomialDecay(_Known):
    """A rate that changes to end_learning_rate along a power of the share of the steps that are left.

    With another power than 1, or a cycle, it is a function: only strategies without servers take it.

    Args:
        initial_learning_rate: rate of the first update.
        decay_steps: updates until the end.
        end_learning_rate: last rate.
        power: the power; 1 makes a line.
        cycle: whether the rate begins again after the end, with a decay of two, three and more times the steps.
        name: its name.
    """

    def __init__(
        self,
        initial_learning_rate: float,
        decay_steps: int,
        end_learning_rate: float = 0.0001,
        power: float = 1.0,
        cycle: bool = False,
        name: str = "PolynomialDecay",
    ) -> None:
        def rate(step: int) -> float:
            rounds = max(math.ceil(step / decay_steps), 1) if cycle else 1
            left = max(1 - step / (decay_steps * rounds), 0.0)
            return float((initial_learning_rate - end_learning_rate) * left**power + end_learning_rate)

        linear = optim.LinearLR(initial_learning_rate, decay_steps, end_learning_rate)
        by_function = cycle or power != 1
        super().__init__(name, FunctionSchedule(rate(0), function=rate) if by_function else linear)


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
    "FunctionSchedule",
    "LearningRateSchedule",
    "PiecewiseConstantDecay",
    "PolynomialDecay",
    "rate_of",
]
