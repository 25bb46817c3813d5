"""Variables of the scenarios, of all dtypes and aggregations, and values for them.

Values and gradients are small whole numbers and rates are powers of 2, so any processor computes the same bits.
"""

from collections.abc import Mapping

import numpy as np

from shoal import optim
from shoal.initializers import Constant
from shoal.partitioners import FixedShards
from shoal.variables import Variable

MIXED = {
    "kernel": Variable((6, 4), initializer=Constant(2.0), partitioner=FixedShards(2)),
    "bias": Variable((4,)),
    "wide": Variable((3,), dtype="float64"),
    "half": Variable((5,), dtype="bfloat16"),
    "mean": Variable((4,), trainable=False, aggregation="mean"),
    "count": Variable((), dtype="int64", trainable=False, aggregation="sum"),
    "last": Variable((2,), trainable=False, aggregation="last"),
}
TRAINED = ("kernel", "bias", "wide", "half")
MOMENTUM = optim.Momentum(0.5, momentum=0.5)


def whole_numbers(names: Mapping[str, Variable] | tuple[str, ...], first: int = 1) -> dict[str, np.ndarray]:
    """Returns an array for each of these variables of `MIXED`, with numbers that every dtype holds."""
    arrays = {}
    for place, name in enumerate(names):
        variable = MIXED[name]
        size = int(np.prod(variable.shape, dtype=int))
        numbers = (np.arange(size) + first + place) % 16
        arrays[name] = numbers.reshape(variable.shape).astype(variable.dtype)
    return arrays


def updates(first: int) -> dict[str, np.ndarray]:
    """Returns a push's values for the variables that no optimizer changes."""
    return whole_numbers(("mean", "count", "last"), first)


GIVEN = {"kernel": whole_numbers(MIXED)["kernel"]}
"""Initial values that the program brings."""
