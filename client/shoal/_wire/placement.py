"""Placement of a job's shards: their lock groups, and the servers that have them.

The coordinator plans it, and clients find servers by it. A placement that is decoded from a message is checked.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from shoal import errors
from shoal._memory.gc_control import delayed_gc
from shoal._wire.layout import ShardLayout, rows_of
from shoal.v1 import tensor_pb2
from shoal.variables import Variable, from_protos


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
        message = self._servers()
        message.layout.CopyFrom(self.layout.to_proto())
        return message

    def to_slim_proto(self) -> tensor_pb2.ShardPlacement:
        """Returns the message without the arenas, for a caller that knows them."""
        message = self._servers()
        message.layout.shard = self.layout.shard
        return message

    @property
    def encoded(self) -> bytes:
        """The serialized message. It is cheap, because the layout is encoded once for all placements that have it."""
        return _framed(1, self.layout.encoded) + self._servers().SerializeToString(deterministic=True)

    def _servers(self) -> tensor_pb2.ShardPlacement:
        return tensor_pb2.ShardPlacement(
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

    @property
    def of_slots(self) -> "Placement":
        """The placement of the slots of the same variables; see `ArenaLayout.of_slots`."""
        variables = {name: it.as_stored() for name, it in self.variables.items()}
        shards = tuple(replace(shard, layout=shard.layout.of_slots) for shard in self.shards)
        return Placement(self.job, self.generation, variables, shards)

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
    def grouping(self) -> tuple[int | None, ...]:
        """Name of the lock group of each shard, in order. It changes within a generation when a group is split."""
        return tuple(shard.group for shard in with_groups(self.shards))

    @cached_property
    def encoded(self) -> bytes:
        """The serialized message. It is encoded once, because with 10,000 variables that takes a tenth of a second.

        It is put together from its parts, in the order of their numbers. So a placement with other servers, but the
        same layouts, is encoded at once.
        """
        head = tensor_pb2.Placement(job=self.job, generation=self.generation)
        variables = self.encoded_variables
        if not variables:
            messages = [variable.to_proto(name) for name, variable in self.variables.items()]
            variables = tensor_pb2.Placement(variables=messages).SerializeToString(deterministic=True)
        shards = b"".join(_framed(4, shard.encoded) for shard in self.shards)
        return head.SerializeToString(deterministic=True) + variables + shards

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
        return self if shards == self.shards else replace(self, shards=shards)

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


def _framed(number: int, message: bytes) -> bytes:
    """Returns a serialized message as the field `number` of another message; see "Encoding" of Protocol Buffers."""
    size, length = len(message), bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return bytes([number << 3 | 2]) + length + message


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


__all__ = ["Placement", "ShardPlacement", "with_groups"]
