"""Learning-rate schedules."""

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any, ClassVar

from shoal.errors import InvalidOptimizer
from shoal.optim._specifications import (
    AtLeastOne,
    Count,
    Factor,
    Flag,
    Fraction,
    NonNegative,
    PositiveCount,
    Specification,
    checked_list,
)
from shoal.v1 import job_pb2

_MAX_PIECES = 1_000


@dataclass(frozen=True)
class Schedule(Specification, ABC):
    """A learning rate as a function of the version v, the number of updates that the shard has applied so far.

    With `warmup_steps` w > 0, the rate first rises linearly (Goyal et al., 2017, arXiv:1706.02677):
    rate(v) = learning_rate * (v + 1) / w for v < w. After that, the schedule is computed with v - w.

    Args:
        learning_rate: initial rate of the schedule, >= 0.
        warmup_steps: number of updates of the warm-up, >= 0.

    Raises:
        InvalidOptimizer: a number is out of range or not finite.
    """

    kind: ClassVar[str] = "schedule"
    registry: ClassVar[dict[str, type[Any]]] = {}
    separate_fields: ClassVar[frozenset[str]] = frozenset({"warmup_steps"})

    learning_rate: NonNegative
    warmup_steps: Count = field(default=0, kw_only=True)

    def rate(self, version: int) -> float:
        """Returns the learning rate of the update from `version` to `version` + 1."""
        if version < self.warmup_steps:
            return self.learning_rate * (version + 1) / self.warmup_steps
        return self._after_warmup(version - self.warmup_steps)

    @abstractmethod
    def _after_warmup(self, version: int, /) -> float:
        """Returns the rate at `version`, counted from the end of the warm-up."""

    def to_proto(self) -> job_pb2.Schedule:
        """Returns the message that carries this schedule."""
        lists = {name: getattr(self, name) for name in self.separate_fields - Schedule.separate_fields}
        return job_pb2.Schedule(name=self.name, parameters=self.numbers(), warmup_steps=self.warmup_steps, **lists)

    @staticmethod
    def from_proto(message: job_pb2.Schedule) -> "Schedule":
        """Returns the schedule that a message carries.

        Raises:
            InvalidOptimizer: the name or a number is unknown, missing or out of range.
        """
        given = {"boundaries": tuple(message.boundaries), "rates": tuple(message.rates)}
        lists = {name: values for name, values in given.items() if values}
        return Schedule.decoded(message.name, message.parameters, warmup_steps=message.warmup_steps, **lists)


@dataclass(frozen=True)
class ConstantLR(Schedule, name="constant"):
    """A constant learning rate: rate(v) = learning_rate.

    Args:
        learning_rate: 0 or more.
        warmup_steps: see `Schedule`.
    """

    def _after_warmup(self, _version: int, /) -> float:
        return self.learning_rate


@dataclass(frozen=True)
class StepLR(Schedule, name="step"):
    """A rate that drops at fixed intervals: learning_rate * gamma ** floor(v / step_size), as PyTorch's StepLR.

    Args:
        learning_rate: 0 or more.
        step_size: number of updates between two drops, >= 1.
        gamma: factor of each drop, in (0, 1].
        warmup_steps: see `Schedule`.
    """

    step_size: PositiveCount
    gamma: Factor = 0.1

    def _after_warmup(self, version: int, /) -> float:
        return self.learning_rate * self.gamma ** (version // self.step_size)


@dataclass(frozen=True)
class ExponentialLR(Schedule, name="exponential"):
    """A rate that decays exponentially: learning_rate * gamma ** v, as PyTorch's ExponentialLR.

    Args:
        learning_rate: 0 or more.
        gamma: factor of each update, in (0, 1].
        warmup_steps: see `Schedule`.
    """

    gamma: Factor

    def _after_warmup(self, version: int, /) -> float:
        return self.learning_rate * self.gamma**version


@dataclass(frozen=True)
class CosineLR(Schedule, name="cosine"):
    """A rate that falls along a cosine: SGDR without restarts (Loshchilov and Hutter, ICLR 2017, arXiv:1608.03983).

    rate(v) = minimum + (learning_rate - minimum) * (1 + cos(pi * v / steps)) / 2 for v < steps, and then `minimum`.
    PyTorch's CosineAnnealingLR is equal up to v = steps, and then rises again.

    Args:
        learning_rate: initial rate, not below `minimum`.
        steps: number of updates until the minimum, >= 1, without the warm-up.
        minimum: final rate, >= 0.
        warmup_steps: see `Schedule`.
    """

    advice: ClassVar[dict[str, str]] = {"T_max": "did you mean steps?", "eta_min": "did you mean minimum?"}

    steps: PositiveCount
    minimum: NonNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.minimum > self.learning_rate:
            raise InvalidOptimizer(
                f"cosine: minimum {self.minimum} is above learning_rate {self.learning_rate}; choose a smaller minimum"
            )

    def _after_warmup(self, version: int, /) -> float:
        fallen = min(version / self.steps, 1.0)
        return self.minimum + (self.learning_rate - self.minimum) * (1 + math.cos(math.pi * fallen)) / 2


@dataclass(frozen=True)
class LinearLR(Schedule, name="linear"):
    """A rate that changes linearly: learning_rate + (final - learning_rate) * min(v / steps, 1).

    PyTorch's LinearLR with the factors 1 and final / learning_rate is equal.

    Args:
        learning_rate: initial rate, >= 0.
        steps: number of updates until `final`, >= 1, without the warm-up.
        final: final rate, >= 0. It may be above the initial rate.
        warmup_steps: see `Schedule`.
    """

    steps: PositiveCount
    final: NonNegative = 0.0

    def _after_warmup(self, version: int, /) -> float:
        return _between(self.learning_rate, self.final, min(version / self.steps, 1.0))


@dataclass(frozen=True)
class PiecewiseLR(Schedule, name="piecewise"):
    """A rate that has a given value from each boundary on.

        PiecewiseLR(0.1, boundaries=(1_000, 5_000), rates=(0.01, 0.001))

    rate(v) = learning_rate for v < boundaries[0], and rates[k] for boundaries[k] <= v < boundaries[k + 1].

    Args:
        learning_rate: rate before the first boundary, >= 0.
        boundaries: versions, without the warm-up, from 1 and ascending; 1 to 1,000 of them.
        rates: for each boundary, the rate from there on, >= 0.
        interpolate: whether the rate changes linearly instead: from `learning_rate` at version 0 to each of `rates` at
            its boundary.
        warmup_steps: see `Schedule`.
    """

    separate_fields: ClassVar[frozenset[str]] = Schedule.separate_fields | {"boundaries", "rates"}

    boundaries: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    interpolate: Flag = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "boundaries", checked_list("piecewise: boundaries", self.boundaries, PositiveCount))
        object.__setattr__(self, "rates", checked_list("piecewise: rates", self.rates, NonNegative))
        if not 1 <= len(self.boundaries) == len(self.rates) <= _MAX_PIECES:
            raise InvalidOptimizer(
                f"piecewise: there are {len(self.boundaries)} boundaries and {len(self.rates)} rates; give as many "
                f"rates as boundaries, 1 to {_MAX_PIECES:,}"
            )
        if sorted(set(self.boundaries)) != list(self.boundaries):
            raise InvalidOptimizer(f"piecewise: boundaries are {self.boundaries}; give versions in ascending order")

    def _after_warmup(self, version: int, /) -> float:
        passed = bisect_right(self.boundaries, version)
        start = self.rates[passed - 1] if passed else self.learning_rate
        if not self.interpolate or passed == len(self.boundaries):
            return start
        since = self.boundaries[passed - 1] if passed else 0
        return _between(start, self.rates[passed], (version - since) / (self.boundaries[passed] - since))


@dataclass(frozen=True)
class OneCycleLR(Schedule, name="onecycle"):
    """A rate that rises to a maximum and then falls below its initial value (Smith and Topin, 2017, arXiv:1708.07120).

    From learning_rate / div_factor, the rate rises along a cosine. It reaches `learning_rate` at
    v = rise * steps - 1. It then falls along a cosine to the initial rate divided by final_div_factor, which it has
    from v = steps - 1 on. PyTorch's OneCycleLR is equal; it raises an error after `steps`.

    Args:
        learning_rate: largest rate, >= 0.
        steps: number of updates of the cycle, >= 1, without the warm-up.
        rise: fraction of `steps` in which the rate rises, in [0, 1).
        div_factor: largest rate divided by the initial one, >= 1.
        final_div_factor: initial rate divided by the final one, >= 1.
        linear: whether the rate changes linearly instead of along a cosine.
        warmup_steps: see `Schedule`. A cycle usually needs no warm-up, because it begins with a small rate.
    """

    advice: ClassVar[dict[str, str]] = {"max_lr": "did you mean learning_rate?", "pct_start": "did you mean rise?"}

    steps: PositiveCount
    rise: Fraction = 0.3
    div_factor: AtLeastOne = 25.0
    final_div_factor: AtLeastOne = 1e4
    linear: Flag = False

    def _after_warmup(self, version: int, /) -> float:
        peak, end = self.rise * self.steps - 1, self.steps - 1
        first = self.learning_rate / self.div_factor
        if version <= peak:
            return self._changed(first, self.learning_rate, version / peak if peak > 0 else 1.0)
        start = max(peak, -1.0)
        passed = (version - start) / (end - start) if version < end else 1.0
        return self._changed(self.learning_rate, first / self.final_div_factor, passed)

    def _changed(self, start: float, stop: float, passed: float) -> float:
        """Returns the rate after this fraction of the way from `start` to `stop`."""
        return _between(start, stop, passed if self.linear else (1 - math.cos(math.pi * passed)) / 2)


def _between(start: float, stop: float, passed: float) -> float:
    """Returns the number after this fraction of the way from `start` to `stop`, and exactly `stop` at its end."""
    return stop if passed >= 1 else start + (stop - start) * passed
