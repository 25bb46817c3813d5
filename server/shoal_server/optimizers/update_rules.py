"""Update rules: optimizers bound to their kernels, and the aggregations of variables without gradients.

A rule has no state. It names its slots, so that an arena can allocate them and a checkpoint can save them by name.
Callers of `apply` pass everything else. `shoal_server.shards.machine.consistency` decides which gradient is applied
when.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from shoal import optim
from shoal._wire import Aggregation
from shoal_server.optimizers import kernels, sums
from shoal_server.optimizers.kernel_threads import share

O = TypeVar("O", bound=optim.Optimizer)  # noqa: E741


@dataclass(frozen=True)
class SettingRanges:
    """Ranges of an arena whose variables have the same settings: see `shoal.optim.VariableSettings`.

    Attributes:
        bounds: int64[n + 1], in elements: range k is [bounds[k], bounds[k + 1]). Starts at 0, never falls.
        decay: float64[n], the weight decay of each range.
        rates: float64[n], the factor of the learning rate of each range. Updates leave a range with the factor 0 alone.
    """

    bounds: npt.NDArray[np.int64]
    decay: npt.NDArray[np.float64]
    rates: npt.NDArray[np.float64]

    @property
    def elements(self) -> int:
        """Number of elements that the ranges cover."""
        return int(self.bounds[-1])


def setting_ranges_for(slices: Sequence[tuple[str, int]], optimizer: optim.Optimizer) -> SettingRanges:
    """Returns the fewest setting ranges for an arena with these slices.

    Args:
        slices: (variable name, elements) in the arena's order, without gaps.
        optimizer: gives the settings of each variable.
    """
    runs = [
        (settings, sum(elements for _, elements in run))
        for settings, run in groupby(slices, key=lambda part: optimizer.settings_of(part[0]))
    ]
    return SettingRanges(
        bounds=np.cumsum([0, *(elements for _, elements in runs)], dtype=np.int64),
        decay=np.array([settings.weight_decay for settings, _ in runs], np.float64),
        rates=np.array([settings.rate for settings, _ in runs], np.float64),
    )


class UpdateRule(ABC):
    """Rule by which a gradient changes an arena.

    Attributes:
        slots: names of the state arrays, each as long as the values and of their dtype. Checkpoints contain these
            names: never reuse one with another meaning.
    """

    slots: tuple[str, ...]

    @abstractmethod
    def initial(self, slot: str, /) -> float:
        """Returns the value of a slot's elements before the first update."""

    @abstractmethod
    def apply(
        self,
        values: np.ndarray,
        gradient: np.ndarray,
        slots: Mapping[str, np.ndarray],
        *,
        version: int,
        lr_scale: float,
        setting_ranges: SettingRanges,
        learning_rate: optim.Schedule | None = None,
    ) -> None:
        """Applies one gradient to one arena, in place: the gradient of a push, or the mean gradient of a step.

        Args:
            values: float32 or float64, flat; changed.
            gradient: of the same dtype and size, finite; not changed.
            slots: at least `self.slots`; changed.
            version: updates applied to this arena before.
            lr_scale: factor for the learning rate (staleness).
            setting_ranges: cover the arena.
            learning_rate: replaces the optimizer's schedule; None keeps it.

        Raises:
            ValueError: dtypes or sizes do not match, or a slot is missing. Nothing was changed.
        """


class _DenseRule(UpdateRule, Generic[O]):
    """Rule that is one kernel call: (values, gradient, slots, setting ranges, claims, scalars).

    Attributes:
        kernel: a function of `kernels`. It takes the optimizer's `possible_slots` in their order; those that are not in
            `slots` are passed as None.
    """

    kernel: ClassVar[Callable[..., None]]

    def __init__(self, optimizer: O) -> None:
        self.optimizer = optimizer
        self.slots = optimizer.slots
        self._schedule = optimizer.schedule  # built once: an optimizer builds and checks it at each access

    def initial(self, slot: str, /) -> float:
        return self.optimizer.initial(slot)

    @abstractmethod
    def scalars(self, rate: float, version: int, /) -> tuple[float | None, ...] | None:
        """Returns the kernel's scalars, in its order, for one update; None if nothing is to be updated."""

    def apply(
        self,
        values: np.ndarray,
        gradient: np.ndarray,
        slots: Mapping[str, np.ndarray],
        *,
        version: int,
        lr_scale: float,
        setting_ranges: SettingRanges,
        learning_rate: optim.Schedule | None = None,
    ) -> None:
        if missing := [name for name in self.slots if name not in slots]:
            raise ValueError(f"slots {', '.join(missing)} are missing; {self.optimizer.name} needs {self.slots}")
        state = [slots[it.name] if it.name in self.slots else None for it in self.optimizer.possible_slots]
        _check_arrays(values, [gradient, *(slot for slot in state if slot is not None)])
        if setting_ranges.elements != values.size:
            raise ValueError(
                f"the setting ranges cover {setting_ranges.elements} elements of an arena of {values.size}"
            )
        scalars = self.scalars((learning_rate or self._schedule).rate(version) * lr_scale, version)
        if scalars is not None:
            kernel_scalars = [None if number is None else values.dtype.type(number) for number in scalars]
            ranges = (setting_ranges.bounds, setting_ranges.decay, setting_ranges.rates)
            arrays = (values, gradient, *state, *ranges)
            share(values.size, lambda claims: self.kernel(*arrays, claims, *kernel_scalars))


def _check_arrays(values: np.ndarray, others: Sequence[np.ndarray]) -> None:
    """Raises ValueError if arrays do not match. Kernels do not check sizes: a mismatch would write out of bounds."""
    for other in others:
        if other.dtype != values.dtype or other.shape != values.shape or values.ndim != 1:
            raise ValueError(
                f"{other.dtype}{other.shape} does not match an arena of {values.dtype}{values.shape}; "
                "arrays must be flat, and all of one dtype and size"
            )


class _SGD(_DenseRule[optim.SGD]):
    kernel = staticmethod(kernels.sgd)

    def scalars(self, rate: float, _version: int, /) -> tuple[float | None, ...]:
        return (rate,)


class _Momentum(_DenseRule[optim.Momentum]):
    kernel = staticmethod(kernels.momentum)

    def scalars(self, rate: float, _version: int, /) -> tuple[float | None, ...]:
        spec = self.optimizer
        direct, through = (1.0, spec.momentum) if spec.nesterov else (0.0, 1.0)
        return rate, spec.momentum, direct, through


class _Adagrad(_DenseRule[optim.Adagrad]):
    kernel = staticmethod(kernels.adagrad)

    def scalars(self, rate: float, _version: int, /) -> tuple[float | None, ...]:
        return rate, self.optimizer.eps


class _RMSProp(_DenseRule[optim.RMSProp]):
    kernel = staticmethod(kernels.rmsprop)

    def scalars(self, rate: float, _version: int, /) -> tuple[float | None, ...]:
        spec = self.optimizer
        inner, outer = (spec.eps, 0.0) if spec.eps_under_root else (0.0, spec.eps)
        return rate, spec.alpha, 1 - spec.alpha, inner, outer, spec.momentum


class _Adam(_DenseRule[optim.Adam]):
    kernel = staticmethod(kernels.adam)

    def scalars(self, rate: float, version: int, /) -> tuple[float | None, ...]:
        spec, t = self.optimizer, version + 1
        step = rate / (1 - spec.beta1**t)
        unbias = 1 / math.sqrt(1 - spec.beta2**t)
        eps = spec.eps * unbias if spec.eps_uncorrected else spec.eps
        return step, unbias, spec.beta1, 1 - spec.beta1, spec.beta2, 1 - spec.beta2, eps, *self.decay(rate)

    def decay(self, _rate: float, /) -> tuple[float, float]:
        """Returns the factors of coupled and of decoupled weight decay."""
        return 1.0, 0.0


class _AdamW(_Adam):
    def decay(self, rate: float, /) -> tuple[float, float]:
        return 0.0, rate


class _FTRL(_DenseRule[optim.FTRL]):
    kernel = staticmethod(kernels.ftrl)

    def scalars(self, rate: float, _version: int, /) -> tuple[float | None, ...] | None:
        spec = self.optimizer
        if rate == 0:
            return None  # the equations divide by the rate; in the limit the values do not change
        power = None if spec.learning_rate_power == -0.5 else -spec.learning_rate_power
        return rate, spec.l1, spec.l2, spec.l2_shrinkage, spec.beta, power


_RULES: dict[type[optim.Optimizer], type[_DenseRule[Any]]] = {
    optim.SGD: _SGD,
    optim.Momentum: _Momentum,
    optim.Adagrad: _Adagrad,
    optim.RMSProp: _RMSProp,
    optim.Adam: _Adam,
    optim.AdamW: _AdamW,
    optim.FTRL: _FTRL,
}


def rule_for(optimizer: optim.Optimizer) -> UpdateRule:
    """Returns the rule of an optimizer; raises KeyError for one that `shoal.optim` does not define."""
    return _RULES[type(optimizer)](optimizer)


def aggregate(
    values: np.ndarray, contributions: Sequence[np.ndarray], weights: Sequence[float], aggregation: Aggregation
) -> None:
    """Applies pushes to the values of an arena without gradients, in place.

    Args:
        values: float32, float64 or, for SUM and LAST, int64; flat.
        contributions: in order, of the same dtype and size. If there are none, nothing changes.
        weights: weight of each in a MEAN, >= 0; SUM and LAST ignore them.
        aggregation: MEAN assigns the weighted mean (or nothing if all weights are 0), SUM adds each, within
            the range of the dtype (see `sums`), LAST assigns the last.

    Raises:
        ValueError: dtypes or sizes do not match; MEAN of integers; or TRAINABLE, which needs an `UpdateRule`.
    """
    if len(contributions) != len(weights) or aggregation not in _AGGREGATES:
        raise ValueError(
            f"cannot apply {aggregation} to {len(contributions)} contributions with {len(weights)} weights"
        )
    _check_arrays(values, contributions)
    if contributions:
        _AGGREGATES[aggregation](values, contributions, weights)


def _mean(values: np.ndarray, contributions: Sequence[np.ndarray], weights: Sequence[float]) -> None:
    if not np.issubdtype(values.dtype, np.floating):
        raise ValueError(f"a mean of {values.dtype} is not defined; use SUM or LAST")
    if (total := math.fsum(weights)) == 0:
        return
    # Divides each weight, not the sum: a single contribution is assigned unchanged, and no sum overflows.
    values.fill(0)
    for contribution, weight in zip(contributions, weights, strict=True):
        kernels.accumulate(values, contribution, weight / total)


def _sum(values: np.ndarray, contributions: Sequence[np.ndarray], _weights: Sequence[float]) -> None:
    for contribution in contributions:
        sums.add(values, contribution)


def _last(values: np.ndarray, contributions: Sequence[np.ndarray], _weights: Sequence[float]) -> None:
    np.copyto(values, contributions[-1])


_AGGREGATES: dict[Aggregation, Callable[[np.ndarray, Sequence[np.ndarray], Sequence[float]], None]] = {
    Aggregation.MEAN: _mean,
    Aggregation.SUM: _sum,
    Aggregation.LAST: _last,
}
