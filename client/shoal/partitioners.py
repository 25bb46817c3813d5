"""Partitioners: the rules that cut a variable into slices, so that several servers can share it.

All partitioners cut along the first axis. The sizes of the slices differ by at most one row. The larger slices come
first, as in TensorFlow.
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

# The most slices of a variable: one message of a placement lists them all.
_MAX_SLICES = 16_384


@dataclass(frozen=True)
class Partitioner:
    """The rule that cuts a variable into slices: the base class of all partitioners."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        for parameter, value in self._parameters().items():
            if not isinstance(value, numbers.Integral) or int(value) < 1:
                raise self._invalid(f"{parameter} is {value!r}; it must be an integer above 0")

    def to_proto(self) -> tensor_pb2.Partitioner:
        """Returns the message that carries this partitioner."""
        return tensor_pb2.Partitioner(name=self.name, parameters=self._parameters())

    def slices(self, shape: tuple[int, ...], dtype: np.dtype) -> list[tuple[int, int]]:
        """Cuts a variable.

        Args:
            shape: shape of the variable, all dimensions > 0. A scalar has one row.
            dtype: dtype of the variable.

        Returns:
            Rows [start, stop) of each slice, in order. No slice is empty, and together they contain all rows.

        Raises:
            InvalidVariable: the variable would have too many slices.
        """
        rows = rows_of(shape)
        count = min(rows, self._count(rows, row_elements(shape) * dtype.itemsize))
        if count > _MAX_SLICES:
            raise self._invalid(
                f"it cuts the shape {shape} of {dtype} into {count:,} slices; choose larger slices, at most "
                f"{_MAX_SLICES:,} of them"
            )
        fewest, larger = divmod(rows, count)
        edges = [index * fewest + min(index, larger) for index in range(count + 1)]
        return list(pairwise(edges))

    def _count(self, rows: int, row_bytes: int, /) -> int:
        """Returns the wanted number of slices, >= 1. It may exceed the number of rows."""
        raise NotImplementedError

    def _parameters(self) -> dict[str, Any]:
        """Returns the fields that are not None."""
        given = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {parameter: value for parameter, value in given.items() if value is not None}

    def _invalid(self, what: str) -> errors.InvalidVariable:
        return errors.InvalidVariable(f"partitioner {type(self).__name__}: {what}", partitioner=self.name)


@dataclass(frozen=True)
class FixedShards(Partitioner):
    """Cuts a fixed number of slices, or one per row if there are fewer rows (TensorFlow's `FixedShardsPartitioner`).

    Args:
        count: number of slices, > 0.

    Raises:
        InvalidVariable: count is not an integer above 0.
    """

    count: int
    name: ClassVar[str] = "fixed_shards"

    def _count(self, _rows: int, _row_bytes: int, /) -> int:
        return self.count


@dataclass(frozen=True)
class MinSize(Partitioner):
    """Cuts as many slices as possible with at least `min_bytes` each (TensorFlow's `MinSizePartitioner`).

    Each slice has at least `min_bytes`, unless the whole variable is smaller. TensorFlow rounds the number of slices
    up instead, so its slices may be slightly smaller than `min_bytes`.

    Args:
        min_bytes: smallest size of a slice, in bytes of the variable's dtype, > 0.
        max_slices: largest number of slices, > 0.

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
    """Cuts as few slices as possible with at most `max_bytes` each (TensorFlow's `MaxSizePartitioner`).

    If a single row is larger than `max_bytes`, each slice is one row. `max_slices` has precedence over `max_bytes`.

    Args:
        max_bytes: largest size of a slice, in bytes of the variable's dtype, > 0.
        max_slices: largest number of slices, > 0. None means no limit.

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
    """Returns the partitioner that a message carries, or None if it carries none: the variable is one slice.

    Raises:
        InvalidVariable: the name or a parameter is unknown, or a value is out of range.
    """
    if not message.name:
        return None
    if message.name not in _BY_NAME:
        raise errors.InvalidVariable(
            f"there is no partitioner {message.name!r}; choose one of {', '.join(_BY_NAME)}, or none",
            partitioner=message.name,
        )
    # The message carries doubles. The class rejects fractions, with the name of the parameter.
    parameters = {key: int(value) if value.is_integer() else value for key, value in message.parameters.items()}
    try:
        return _BY_NAME[message.name](**parameters)
    except TypeError as error:
        raise errors.InvalidVariable(
            f"partitioner {message.name!r} does not take the parameters {sorted(message.parameters)}: {error}",
            partitioner=message.name,
        ) from error


__all__ = ["FixedShards", "MaxSize", "MinSize", "Partitioner", "from_proto"]
