"""Layout of a job's variables: slices in arenas, arenas in shards, shards on servers.

The coordinator plans it, servers allocate by it, and clients pack by it. A layout that is decoded from a message is
checked against the variables, so it is safe to compute indices from it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shoal import errors
from shoal._memory.gc_control import delayed_gc
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
from shoal.variables import Variable, from_protos

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

    def to_proto(self) -> tensor_pb2.ShardLayout:
        """Returns the message that carries this layout."""
        return tensor_pb2.ShardLayout(shard=self.shard, arenas=[arena.to_proto() for arena in self.arenas])

    @classmethod
    def from_proto(cls, message: tensor_pb2.ShardLayout, variables: Mapping[str, Variable]) -> "ShardLayout":
        """Returns the layout that a message carries; raises BadRequest as `ArenaLayout.from_proto` does."""
        return cls(message.shard, tuple(ArenaLayout.from_proto(arena, variables) for arena in message.arenas))


@dataclass(frozen=True)
class ShardPlacement:
    """A shard and the servers that hold it.

    Attributes:
        layout: layout of the shard.
        server, address: member id and address of the server that hosts it.
        backup, backup_address: those of the server with the backup of its lock group; empty if none is complete.
        term: number of the coordinator's latest decision about the copies of its lock group.
        group: name of its lock group: the smallest index of the group's shards. None if an earlier version
            has placed it, or before `with_groups`.
    """

    layout: ShardLayout
    server: str
    address: str
    backup: str = ""
    backup_address: str = ""
    term: int = 0
    group: int | None = None

    def to_proto(self) -> tensor_pb2.ShardPlacement:
        """Returns the message that carries this placement."""
        return self._on_servers(self.layout.to_proto())

    def to_slim_proto(self) -> tensor_pb2.ShardPlacement:
        """Returns the message without the arenas, for a caller that knows them."""
        return self._on_servers(tensor_pb2.ShardLayout(shard=self.layout.shard))

    def _on_servers(self, layout: tensor_pb2.ShardLayout) -> tensor_pb2.ShardPlacement:
        return tensor_pb2.ShardPlacement(
            layout=layout,
            server=self.server,
            address=self.address,
            backup=self.backup,
            backup_address=self.backup_address,
            term=self.term,
            group=self.group,
        )

    @classmethod
    def from_proto(cls, message: tensor_pb2.ShardPlacement, variables: Mapping[str, Variable]) -> "ShardPlacement":
        """Returns the placement that a message carries; raises BadRequest as `ArenaLayout.from_proto` does."""
        return cls.of(ShardLayout.from_proto(message.layout, variables), message)

    @classmethod
    def of(cls, layout: ShardLayout, message: tensor_pb2.ShardPlacement) -> "ShardPlacement":
        """Returns the placement of this layout on the servers that a message names."""
        group = message.group if message.HasField("group") else None
        return cls(layout, message.server, message.address, message.backup, message.backup_address, message.term, group)


def with_groups(shards: Iterable[ShardPlacement]) -> tuple[ShardPlacement, ...]:
    """Returns the first placement of a generation, with its lock groups: each has all shards of one server.

    Args:
        shards: the shards, in order. If all have groups, nothing is changed.
    """
    first: dict[str, int] = {}
    return tuple(
        shard if shard.group is not None else replace(shard, group=first.setdefault(shard.address, shard.layout.shard))
        for shard in shards
    )


@dataclass(frozen=True)
class Placement:
    """The server of each shard of a job. Requests that are based on it carry its generation.

    Every row of every variable lies in exactly one slice of one shard. Shards are numbered from 0 and in order.

    Attributes:
        job: name of the job.
        generation: number of the placement; a newer one has a larger number.
        variables: variables of the job, by name.
        shards: the shards, in order.
        encoded_variables: the variables as a serialized message that has nothing else, if they are known in that form.
    """

    job: str
    generation: int
    variables: dict[str, Variable]
    shards: tuple[ShardPlacement, ...]
    encoded_variables: bytes = field(default=b"", repr=False, compare=False)

    def by_server(self) -> dict[str, list[ShardPlacement]]:
        """Returns the shards of each server by its address, in order of their numbers."""
        servers: dict[str, list[ShardPlacement]] = {}
        for shard in self.shards:
            servers.setdefault(shard.address, []).append(shard)
        return servers

    def by_group(self) -> dict[int, list[ShardPlacement]]:
        """Returns the shards of each lock group by its name, in order of their numbers."""
        groups: dict[int, list[ShardPlacement]] = {}
        for shard in with_groups(self.shards):
            assert shard.group is not None
            groups.setdefault(shard.group, []).append(shard)
        return groups

    @cached_property
    def encoded(self) -> bytes:
        """The serialized message. It is encoded once, because with 10,000 variables that takes a tenth of a second."""
        message = tensor_pb2.Placement.FromString(self.encoded_variables)
        message.job, message.generation = self.job, self.generation
        if not self.encoded_variables:
            message.variables.extend(variable.to_proto(name) for name, variable in self.variables.items())
        message.shards.extend(shard.to_proto() for shard in self.shards)
        return message.SerializeToString(deterministic=True)

    @cached_property
    def encoded_servers(self) -> bytes:
        """The serialized message without variables and arenas, for callers that know the generation."""
        shards = [shard.to_slim_proto() for shard in self.shards]
        message = tensor_pb2.Placement(job=self.job, generation=self.generation, shards=shards)
        return message.SerializeToString(deterministic=True)

    def renewed(self, message: tensor_pb2.Placement) -> "Placement":
        """Returns the placement that a message carries. If it has this generation, only its servers are read.

        Raises:
            InvalidVariable, BadRequest: as for `from_proto`.
        """
        if message.generation != self.generation:
            return self.from_proto(message)
        if [shard.layout.shard for shard in message.shards] != [shard.layout.shard for shard in self.shards]:
            raise errors.BadRequest(f"a placement of {self.job} lacks shards of its generation {self.generation}")
        shards = tuple(
            ShardPlacement.of(known.layout, shard) for known, shard in zip(self.shards, message.shards, strict=True)
        )
        _check_groups(with_groups(shards))
        return self if [*map(_copies, shards)] == [*map(_copies, self.shards)] else replace(self, shards=shards)

    def to_proto(self) -> tensor_pb2.Placement:
        """Returns the message that carries this placement; a copy, made from its encoded form."""
        return tensor_pb2.Placement.FromString(self.encoded)

    @classmethod
    def from_proto(cls, message: tensor_pb2.Placement) -> "Placement":
        """Returns the placement that a message carries.

        Raises:
            InvalidVariable: a variable is not valid.
            BadRequest: a layout does not fit the variables, or a row lies nowhere or in two places.
        """
        with delayed_gc():
            variables = from_protos(message.variables)
            shards = tuple(ShardPlacement.from_proto(shard, variables) for shard in message.shards)
            _check_coverage(variables, [shard.layout for shard in shards])
            _check_groups(with_groups(shards))
            return cls(message.job, message.generation, variables, shards)


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


def _check_groups(shards: Sequence[ShardPlacement]) -> None:
    first: dict[int | None, ShardPlacement] = {}
    for shard in shards:
        leader = first.setdefault(shard.group, shard)
        if leader.layout.shard != shard.group or _copies(leader) != _copies(shard):
            raise errors.BadRequest(
                f"shard {shard.layout.shard} is placed in the lock group {shard.group}, whose first shard is "
                f"{leader.layout.shard}; name a group by its first shard, and place all its shards on the same servers"
            )


def _copies(shard: ShardPlacement) -> tuple[str, str, str, str, int]:
    return shard.server, shard.address, shard.backup, shard.backup_address, shard.term


def _check_coverage(variables: Mapping[str, Variable], layouts: Sequence[ShardLayout]) -> None:
    numbers = [layout.shard for layout in layouts]
    if numbers != list(range(len(numbers))):
        raise errors.BadRequest(f"the shards are numbered {numbers}; number them from 0, in order")
    ranges: dict[str, list[tuple[int, int]]] = {}
    whole: set[str] = set()  # most variables lie in one place, so most need no list of ranges
    for layout in layouts:
        for arena in layout.arenas:
            for piece in arena.slices:
                name, start, stop = piece.variable, piece.row_start, piece.row_stop
                if name not in whole and (start, stop) == (0, rows_of(variables[name].shape)):
                    whole.add(name)
                else:
                    ranges.setdefault(name, []).append((start, stop))
    for name, variable in variables.items():
        if name in whole and name not in ranges:
            continue
        placed = ranges.get(name, [])
        if name in whole:
            placed.append((0, rows_of(variable.shape)))
        placed.sort()
        starts, stops = [start for start, _ in placed], [stop for _, stop in placed]
        if [*starts, rows_of(variable.shape)] != [0, *stops]:
            raise errors.BadRequest(
                f"the rows of variable {name!r} of shape {variable.shape} are placed as {placed}; each row must lie "
                "in exactly one place",
                variable=name,
            )


__all__ = [
    "SUPPORTED_DTYPES",
    "Aggregation",
    "ArenaLayout",
    "Placement",
    "ShardLayout",
    "ShardPlacement",
    "Slice",
    "dtype_code",
    "dtype_from_code",
    "row_elements",
    "rows_of",
    "storage_dtype",
    "wire_dtype",
    "with_groups",
]
