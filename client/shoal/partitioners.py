"""Partitioners: into how many slices a variable is cut, so that its parts can lie on different servers.

All cut along the first axis, into slices whose rows differ by at most one, the larger ones first, as TensorFlow's do.
"""

import numbers
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from shoal import errors
from shoal._numerics import row_elements, rows_of
from shoal.v1 import tensor_pb2

# A placement names every slice in one message.
_MAX_SLICES = 16_384


@dataclass(frozen=True)
class Partitioner:
    """How a variable is cut. One of the classes below."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        for parameter, value in self._parameters().items():
            if not isinstance(value, numbers.Integral) or int(value) < 1:
                raise self._invalid(f"{parameter} is {value!r}; it must be an integer above 0")

    def to_proto(self) -> tensor_pb2.Partitioner:
        """The message that carries this partitioner."""
        return tensor_pb2.Partitioner(name=self.name, parameters=self._parameters())

    def slices(self, shape: tuple[int, ...], dtype: np.dtype) -> list[tuple[int, int]]:
        """Cuts a variable.

        Args:
            shape: its dimensions, all > 0; a scalar has one row.
            dtype: its type on the wire.

        Returns:
            Rows [start, stop) of each slice, in order; none is empty and together they are all rows.

        Raises:
            InvalidVariable: the slices would be too many.
        """
        rows = rows_of(shape)
        count = min(rows, self._count(rows, row_elements(shape) * dtype.itemsize))
        if count > _MAX_SLICES:
            raise self._invalid(
                f"it cuts the shape {shape} of {dtype} into {count:,} slices; make them larger, for at most "
                f"{_MAX_SLICES:,}"
            )
        fewest, larger = divmod(rows, count)
        edges = [index * fewest + min(index, larger) for index in range(count + 1)]
        return list(pairwise(edges))

    def _count(self, rows: int, row_bytes: int, /) -> int:
        """How many slices there should be, >= 1, if there were rows enough."""
        raise NotImplementedError

    def _parameters(self) -> dict[str, Any]:
        """Fields that are set."""
        given = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {parameter: value for parameter, value in given.items() if value is not None}

    def _invalid(self, what: str) -> errors.InvalidVariable:
        return errors.InvalidVariable(f"partitioner {type(self).__name__}: {what}", partitioner=self.name)


@dataclass(frozen=True)
class FixedShards(Partitioner):
    """So many slices, or one a row where there are fewer rows (TensorFlow's `FixedShardsPartitioner`).

    Args:
        count: slices, > 0.

    Raises:
        InvalidVariable: count is not an integer above 0.
    """

    count: int
    name: ClassVar[str] = "fixed_shards"

    def _count(self, _rows: int, _row_bytes: int, /) -> int:
        return self.count


@dataclass(frozen=True)
class MinSize(Partitioner):
    """As many slices as can have `min_bytes` each (TensorFlow's `MinSizePartitioner`).

    Each slice has `min_bytes` or more, unless the whole variable has less. TensorFlow promises the same but rounds the
    number of slices up, so that its slices may be a little smaller.

    Args:
        min_bytes: of a slice on the wire, > 0.
        max_slices: > 0.

    Raises:
        InvalidVariable: an argument is not an integer above 0.
    """

    min_bytes: int = 256 << 10
    max_slices: int = field(kw_only=True)
    name: ClassVar[str] = "min_size"

    def _count(self, rows: int, row_bytes: int, /) -> int:
        rows_each = -(-self.min_bytes // row_bytes)
        return max(1, min(self.max_slices, rows // rows_each))


@dataclass(frozen=True)
class MaxSize(Partitioner):
    """As few slices as can have `max_bytes` or less each (TensorFlow's `MaxSizePartitioner`).

    A slice is larger where a single row is, or where `max_slices`, which comes first, asks for it.

    Args:
        max_bytes: of a slice on the wire, > 0.
        max_slices: > 0; None: no limit.

    Raises:
        InvalidVariable: an argument is not an integer above 0.
    """

    max_bytes: int
    max_slices: int | None = None
    name: ClassVar[str] = "max_size"

    def _count(self, rows: int, row_bytes: int, /) -> int:
        rows_each = max(1, self.max_bytes // row_bytes)
        return min(self.max_slices or rows, -(-rows // rows_each))


_BY_NAME: dict[str, Callable[..., Partitioner]] = {cls.name: cls for cls in (FixedShards, MinSize, MaxSize)}


def from_proto(message: tensor_pb2.Partitioner) -> Partitioner | None:
    """The partitioner that a message carries; None, which leaves a variable whole, if it names none.

    Raises:
        InvalidVariable: there is none of that name, or not with those parameters.
    """
    if not message.name:
        return None
    if message.name not in _BY_NAME:
        raise errors.InvalidVariable(
            f"there is no partitioner {message.name!r}; choose one of {', '.join(_BY_NAME)}, or none",
            partitioner=message.name,
        )
    # The wire carries doubles; what is not whole is refused by name.
    parameters = {key: int(value) if value.is_integer() else value for key, value in message.parameters.items()}
    try:
        return _BY_NAME[message.name](**parameters)
    except TypeError as error:
        raise errors.InvalidVariable(
            f"partitioner {message.name!r} does not take the parameters {sorted(message.parameters)}: {error}",
            partitioner=message.name,
        ) from error


__all__ = ["FixedShards", "MaxSize", "MinSize", "Partitioner", "from_proto"]
