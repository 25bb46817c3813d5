"""Layers for features of tables: columns of numbers, and crosses of two categories."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shoal._numerics.random_streams import GOLDEN, splitmix64
from shoal.program import Array
from shoal_nn.layer import Layer, LayerInput, Pullback, Shape, StatelessLayer, Train, Values, shape_of
from shoal_worker.arrays import namespace_of


@dataclass(frozen=True)
class Column(StatelessLayer):
    """Adds a last axis to floats, [batch, ...] to [batch, ..., 1], so that they can be concatenated."""

    def output_shape(self, shape: Shape) -> Shape:
        return (*shape, 1)

    def _value(self, x: Array, train: Train) -> tuple[Array, Callable[[Array], Array]]:  # noqa: ARG002 - acts the same
        self._require(x.dtype.kind not in "iub", x.shape[1:], f"floats, not {x.dtype}")
        return x[..., None], lambda dy: dy[..., 0]


@dataclass(frozen=True)
class FeatureCross(Layer):
    """Hashed cross of two categories: y = crossed(x[first], x[second], rows), as input of an `Embedding`.

    The input is features by name. There is no dx.

    Args:
        first: name of a feature of integers.
        second: name of another feature of the same shape.
        rows: number of values of y, 1 or more: y is in [0, rows).

    Raises:
        InvalidLayer: rows is 0 or less.
    """

    first: str
    second: str
    rows: int

    def __post_init__(self) -> None:
        self._demand(self.rows > 0, f"rows is {self.rows}; it must be 1 or more")

    def output_shape(self, shape: LayerInput) -> Shape:
        pair = (self.first, self.second)
        given = shape if isinstance(shape, Mapping) else {}
        missing = ", ".join(name for name in pair if name not in given)
        self._require(not missing, shape, f"features by name, {', '.join(pair)}; missing: {missing}")
        first, second = (tuple(shape[name]) for name in pair)
        self._require(first == second, shape, f"{self.first} and {self.second} of the same shape")
        return first

    def apply(self, params: Values, state: Values, x: Array, train: Train) -> tuple[Array, dict[str, Array], Pullback]:  # noqa: ARG002
        shape = shape_of(x)
        self.output_shape(shape)
        pair = (x[self.first], x[self.second])
        kinds = " and ".join(str(each.dtype) for each in pair)
        self._require(all(each.dtype.kind in "iu" for each in pair), shape, f"integers, not {kinds}")
        return crossed(*pair, self.rows), {}, lambda _: ({}, None)


def crossed(a: Array, b: Array, rows: int) -> Array:
    """Hashes pairs of integers to [0, rows): mix(mix(a) + b) mod rows, in 64 bits.

    mix adds 0x9E3779B97F4A7C15 and applies SplitMix64's finalizer (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014). Negative numbers count modulo 2^64. The result is the same on every
    device and will not change, because trained tables depend on it. Different pairs may collide.

    Args:
        a: integers of any shape.
        b: integers of the same shape. The order of a and b matters.
        rows: 1 or more.

    Returns:
        int64, of the shape of a.
    """
    unsigned = namespace_of(a).uint64
    mixed = _mixed(_mixed(a.astype(unsigned)) + b.astype(unsigned))
    return (mixed % unsigned(rows)).astype("int64")


def _mixed(numbers: Array) -> Array:
    return splitmix64(numbers + GOLDEN)


__all__ = ["Column", "FeatureCross", "crossed"]
