"""Running sums: what a slab keeps of a step's contributions, which are added one by one in order of rank.

Each class implements one aggregation. The result depends on the contributions, their weights and their order, but not
on when each of them was added. This module has no locks and no policy.
"""

import math
from typing import Protocol

import numpy as np

from shoal._wire import Aggregation
from shoal_server.optimizers import kernels, sums, update_rules


class RunningSum(Protocol):
    """A sum of flat arrays that have the dtype and the size of a slab's values."""

    def add(self, array: np.ndarray, weight: float, expected: int) -> None:
        """Adds an array.

        Args:
            array: the array; the sum may overwrite and keep it.
            weight: weight of the array in a mean, > 0.
            expected: number of arrays that the sum will have, as far as known.
        """

    def take(self, values: np.ndarray) -> np.ndarray | None:
        """Ends the sum and returns its result.

        Args:
            values: the slab's values.

        Returns:
            The mean, or None if the sum has changed the values itself.
        """


class RunningMean:
    """The weighted mean of gradients, in the memory of the first one.

    Each array is multiplied by two factors before it is added: its weight divided by the first weight, and a power of
    two that leaves room for all arrays. For equal weights the first factor is 1, so sums of small integers stay exact.
    The mean of finite numbers is finite, and no weight overflows. The power of two changes no bit of the result, unless
    the result is below 1e-38 times the number of arrays.
    """

    def __init__(self) -> None:
        self._total: np.ndarray | None = None  # sum of array * weight / first weight / 2 ** (_unit + _bits)
        self._first = (0.0, 0)  # the first weight: mantissa and exponent
        self._unit = 0  # no weight is larger than the first one times 2 ** _unit
        self._bits = 0  # the sum has room for 2 ** _bits arrays
        self._weights = 0.0  # sum of weight / first weight / 2 ** _unit
        self._count = 0

    def add(self, array: np.ndarray, weight: float, expected: int) -> None:
        mantissa, exponent = math.frexp(weight)  # separate, because quotients of weights can be out of range
        self._count += 1
        if self._total is None:
            self._total, self._first, self._weights = array, (mantissa, exponent), 1.0
            return
        ratio, exponent = mantissa / self._first[0], exponent - self._first[1]
        unit = max(self._unit, exponent + (ratio > 1))
        room = expected if self._count == 2 else 0
        bits = max(self._bits, (max(room, self._count) - 1).bit_length())
        shift = unit + bits - self._unit - self._bits
        share = math.ldexp(ratio, exponent - unit - bits)
        if shift and share == math.ldexp(1.0, -shift):  # the first two, if their weights are equal
            kernels.accumulate(self._total, array, share, both=True)
        else:
            if shift:
                kernels.scale(self._total, math.ldexp(1.0, -shift))
            kernels.accumulate(self._total, array, share)
        self._weights = math.ldexp(self._weights, self._unit - unit) + math.ldexp(ratio, exponent - unit)
        self._unit, self._bits = unit, bits

    def take(self, values: np.ndarray) -> np.ndarray | None:
        del values
        total = self._total
        if total is None or self._count == 1:
            return total
        # The unit of the weights divides out. Rounded before the power of two, so that this is 1 / n for equal weights.
        factor = math.ldexp(float(total.dtype.type(1.0 / self._weights)), self._bits)
        if factor != 1.0:
            kernels.scale(total, factor)
        return total


class RunningIncrements:
    """The values plus increments, added one by one, in the memory of the first increment.

    The sum stays within the range of the dtype: `shoal_server.optimizers.sums`.

    Args:
        values: the arena's values, which must not change before `take`.
    """

    def __init__(self, values: np.ndarray) -> None:
        self._values = values
        self._total: np.ndarray | None = None
        self._count = 0

    def add(self, array: np.ndarray, weight: float, expected: int) -> None:
        del weight, expected
        self._count += 1
        if self._total is None:
            self._total = array
            return
        if self._count == 2:  # not before, because one increment is added in place
            sums.add(self._values, self._total, into_increment=True)
        sums.add(self._total, array)

    def take(self, values: np.ndarray) -> np.ndarray | None:
        if self._total is not None:
            if self._count == 1:
                sums.add(values, self._total)
            else:
                np.copyto(values, self._total)
        return None


class LatestValues:
    """The last array."""

    def __init__(self) -> None:
        self._latest: np.ndarray | None = None

    def add(self, array: np.ndarray, weight: float, expected: int) -> None:
        del weight, expected
        self._latest = array

    def take(self, values: np.ndarray) -> np.ndarray | None:
        if self._latest is not None:
            np.copyto(values, self._latest)
        return None


class MeanOfValues:
    """The weighted mean of values. It keeps all arrays, because each share depends on the weights of all."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []
        self._shares: list[float] = []

    def add(self, array: np.ndarray, weight: float, expected: int) -> None:
        del expected
        self._arrays.append(array)
        self._shares.append(weight)

    def take(self, values: np.ndarray) -> np.ndarray | None:
        update_rules.aggregate(values, self._arrays, self._shares, Aggregation.MEAN)
        return None


def running_sum(aggregation: Aggregation, values: np.ndarray) -> RunningSum:
    """Returns an empty running sum.

    Args:
        aggregation: aggregation of the arena.
        values: the arena's values.
    """
    match aggregation:
        case Aggregation.TRAINABLE:
            return RunningMean()
        case Aggregation.SUM:
            return RunningIncrements(values)
        case Aggregation.LAST:
            return LatestValues()
        case Aggregation.MEAN:
            return MeanOfValues()


__all__ = ["RunningMean", "RunningSum", "running_sum"]
