"""Layout of a job's variables: slices in arenas, and arenas in shards.

The coordinator plans it, servers allocate by it, and clients pack by it. A layout that is decoded from a message is
checked against the variables, so it is safe to compute indices from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shoal import errors
from shoal._numerics import (
    SUPPORTED_DTYPES,
    Aggregation,
    dtype_code,
    dtype_from_code,
    row_elements,
    rows_of,
    storage_dtype,
    wire_dtype,
)
from shoal.v1 import tensor_pb2
from shoal.variables import Variable

# Placeholder for the arena's own dtype, if no wire dtype is given.
_AS_IS = np.dtype(np.void)


class Slice(NamedTuple):
    """Rows [row_start, row_stop) of a variable, `offset` elements from the start of their arena.

    A named tuple, because a job with 10,000 variables has as many slices, and a frozen dataclass takes three times as
    long to make.
    """

    variable: str
    row_start: int
    row_stop: int
    offset: int

    def to_proto(self) -> tensor_pb2.Slice:
        """Returns the message that carries this slice."""
        return tensor_pb2.Slice(
            variable=self.variable, row_start=self.row_start, row_stop=self.row_stop, offset=self.offset
        )


@dataclass(frozen=True)
class ArenaLayout:
    """A flat run of elements of one dtype, changed by one rule; its slices lie in order and without gaps.

    Attributes:
        dtype: dtype of the variables.
        aggregation: aggregation of the variables.
        slices: the slices of the arena, in order.
        elements: number of elements.
        wire_dtype: wire dtype, in both directions: `dtype`, or a half-precision dtype if `dtype` is float32.
    """

    dtype: np.dtype
    aggregation: Aggregation
    slices: tuple[Slice, ...]
    elements: int
    wire_dtype: np.dtype = _AS_IS

    def __post_init__(self) -> None:
        if self.wire_dtype == _AS_IS:
            object.__setattr__(self, "wire_dtype", self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.elements * self.wire_dtype.itemsize

    @property
    def of_slots(self) -> "ArenaLayout":
        """The layout of a slot: the dtype that servers keep, also on the wire. A half would lose small squares."""
        dtype = storage_dtype(self.dtype)
        return replace(self, dtype=dtype, wire_dtype=dtype)

    def to_proto(self) -> tensor_pb2.ArenaLayout:
        """Returns the message that carries this layout."""
        return tensor_pb2.ArenaLayout(
            dtype=dtype_code(self.dtype),
            aggregation=self.aggregation.value,
            slices=[piece.to_proto() for piece in self.slices],
            wire_dtype=tensor_pb2.DTYPE_UNSPECIFIED if self.wire_dtype == self.dtype else dtype_code(self.wire_dtype),
        )

    @classmethod
    def from_proto(cls, message: tensor_pb2.ArenaLayout, variables: Mapping[str, Variable]) -> "ArenaLayout":
        """Returns the layout that a message carries.

        Args:
            message: the message.
            variables: variables of the job, by name.

        Raises:
            BadRequest: the arena is empty, its wire dtype is not allowed, or a slice does not fit. A slice must be of a
                known variable with the arena's dtype and aggregation, have rows of that variable, and start where the
                last one ended.
        """
        try:
            dtype, aggregation = dtype_from_code(message.dtype), Aggregation(message.aggregation)
        except (KeyError, ValueError) as error:
            raise errors.BadRequest("an arena's dtype or aggregation is missing or unknown") from error
        slices, elements = [], 0
        sizes: dict[int, tuple[int, int]] = {}  # rows, and elements in a row, of each variable that fits, by its id
        for piece in message.slices:
            name, start, stop, offset = piece.variable, piece.row_start, piece.row_stop, piece.offset
            variable = variables.get(name)
            size = sizes.get(id(variable))
            if size is None:
                if variable is None or (variable.dtype, variable.aggregation) != (dtype, aggregation):
                    raise errors.BadRequest(
                        f"variable {name!r} lies in an arena of {dtype} and {aggregation.name}, but the job has no "
                        "such variable; send a layout of the job's variables",
                        variable=name,
                    )
                size = sizes[id(variable)] = rows_of(variable.shape), row_elements(variable.shape)
            if not start < stop <= size[0] or offset != elements:
                raise errors.BadRequest(
                    f"rows [{start}, {stop}) of variable {name!r} of shape {variables[name].shape} are placed at "
                    f"element {offset} of their arena, after {elements} others; slices must be rows of their "
                    "variable, in order and without gaps",
                    variable=name,
                )
            slices.append(Slice(name, start, stop, offset))
            elements += (stop - start) * size[1]
        if not slices:
            raise errors.BadRequest("an arena has no slices")
        return cls(dtype, aggregation, tuple(slices), elements, _wire(message, dtype, aggregation))


@dataclass(frozen=True)
class ShardLayout:
    """The arenas of one shard."""

    shard: int
    arenas: tuple[ArenaLayout, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of values on the wire."""
        return sum(arena.nbytes for arena in self.arenas)

    @property
    def of_slots(self) -> "ShardLayout":
        """The layout of the slots of the same arenas; see `ArenaLayout.of_slots`."""
        return replace(self, arenas=tuple(arena.of_slots for arena in self.arenas))

    def to_proto(self) -> tensor_pb2.ShardLayout:
        """Returns the message that carries this layout."""
        return tensor_pb2.ShardLayout(shard=self.shard, arenas=[arena.to_proto() for arena in self.arenas])

    @cached_property
    def encoded(self) -> bytes:
        """The serialized message. Placements that differ only in servers share the layouts, so it is encoded once."""
        return self.to_proto().SerializeToString(deterministic=True)

    @classmethod
    def from_proto(cls, message: tensor_pb2.ShardLayout, variables: Mapping[str, Variable]) -> "ShardLayout":
        """Returns the layout that a message carries; raises BadRequest as `ArenaLayout.from_proto` does."""
        return cls(message.shard, tuple(ArenaLayout.from_proto(arena, variables) for arena in message.arenas))


def _wire(message: tensor_pb2.ArenaLayout, dtype: np.dtype, aggregation: Aggregation) -> np.dtype:
    if message.wire_dtype == tensor_pb2.DTYPE_UNSPECIFIED:
        return dtype
    try:
        wire = dtype_from_code(message.wire_dtype)
    except KeyError as error:
        raise errors.BadRequest("an arena's wire dtype is unknown") from error
    if wire == dtype or wire_dtype(dtype, aggregation, wire) != wire:
        raise errors.BadRequest(
            f"an arena of {dtype} and {aggregation.name} cannot have the wire dtype {wire}; only TRAINABLE float32 "
            "arenas may have one, float16 or bfloat16; leave it out for all others"
        )
    return wire


__all__ = [
    "SUPPORTED_DTYPES",
    "Aggregation",
    "ArenaLayout",
    "ShardLayout",
    "Slice",
    "dtype_code",
    "dtype_from_code",
    "row_elements",
    "rows_of",
    "storage_dtype",
    "wire_dtype",
]
