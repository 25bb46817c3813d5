"""The copies of all lock groups of one job, and the placement that follows from them (no I/O)."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from shoal._wire import Placement, ShardPlacement
from shoal.v1 import state_pb2
from shoal_coordinator.job.copies.group_copies import GroupCopies, server_of, server_record
from shoal_coordinator.messages import JobRecordKind, ServerRef, servers_of


class CopyTable:
    """The lock groups of a job's placement. A job with one copy of each shard has none here.

    Args:
        changed: called with the name of a record that has changed.

    Attributes:
        planned: the placement as the scheduler planned it; None if the shards are not placed.
        sizes: the wire bytes of each group.
        groups: the lock groups by number, in order. Only methods of this class change them.
    """

    def __init__(self, changed: Callable[[str], None] = lambda _: None) -> None:
        self._changed = changed
        self.planned: Placement | None = None
        self.sizes: Mapping[int, int] = {}
        self.groups: Mapping[int, GroupCopies] = {}
        self._placement: Placement | None = None  # see `placement`; None if it is not known
        self._holders: frozenset[ServerRef] = frozenset()

    def begin(self, placement: Placement | None, *, replicated: bool) -> None:
        """Replaces the placement. Its groups have no backups yet.

        Args:
            placement: the new placement; None if the shards are dropped or lost.
            replicated: whether the job has several copies of each shard.
        """
        had_groups = bool(self.groups)
        self.planned = self._placement = placement
        self.groups, self.sizes, self._holders = {}, {}, frozenset(servers_of(placement)) if placement else frozenset()
        if placement and replicated:
            primaries = {shard.group: ServerRef(shard.server, shard.address) for shard in placement.shards}
            self.groups = {group: GroupCopies(group, primaries[group]) for group in sorted(primaries)}
            self.sizes = _sizes(placement)
        if had_groups or self.groups:
            self._changed(JobRecordKind.COPIES)

    def put(self, *groups: GroupCopies) -> None:
        """Replaces some groups by their next states."""
        self.groups = {**self.groups, **{it.group: it for it in groups}}
        self._holders |= {it.second for it in groups if it.second}
        self._placement = None
        self._changed(JobRecordKind.COPIES)

    @property
    def placement(self) -> Placement | None:
        """The planned placement with the present servers, backups and terms; None if the shards are not placed."""
        if self._placement is None and self.planned:  # made when it is read: one event may change many groups
            shards = tuple(_placed(shard, self.groups[shard.group]) for shard in self.planned.shards)
            self._placement = replace(self.planned, shards=shards)
        return self._placement

    @property
    def holders(self) -> tuple[ServerRef, ...]:
        """The servers that have, or may have, something of the shards, in order."""
        return tuple(sorted(self._holders))

    @property
    def complete(self) -> bool:
        """Whether each group has a complete backup."""
        return all(it.backup for it in self.groups.values())

    def to_proto(self) -> state_pb2.CopiesRecord | None:
        """Returns the record; None if there are no groups."""
        if self.planned is None or not self.groups:
            return None
        return state_pb2.CopiesRecord(
            generation=self.planned.generation,
            groups=[it.to_proto() for it in self.groups.values()],
            holders=map(server_record, self.holders),
        )

    def restore_from(self, record: state_pb2.CopiesRecord | None) -> None:
        """Restores the groups from a record, if there is one, after `begin` with the planned placement."""
        if record is None:
            return
        if self.planned is None or record.generation != self.planned.generation:
            raise ValueError("the record of the copies is not of the job's placement")
        self.groups = {it.group: GroupCopies.from_proto(it) for it in record.groups}
        self._holders = frozenset(map(server_of, record.holders))
        self._placement = None

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        for group in self.groups.values():
            group.validate()
            assert {group.primary, group.second} <= {*self._holders, None}, "a copy is on an unknown server"
        if self.groups:
            assert self.placement
            assert {it.group for it in self.placement.shards} == self.groups.keys()
            assert all(_agrees(it, self.groups[it.group]) for it in self.placement.shards)


def grouped(shards: Iterable[ShardPlacement]) -> tuple[ShardPlacement, ...]:
    """Returns shards with the numbers of their lock groups: the shards of one server are a group."""
    shards = tuple(shards)
    groups: dict[str, int] = {}
    for shard in shards:
        groups.setdefault(shard.server, shard.layout.shard)
    return tuple(replace(shard, group=groups[shard.server]) for shard in shards)


def _sizes(placement: Placement) -> Mapping[int, int]:
    sizes: Counter[int] = Counter()
    for shard in placement.shards:
        sizes[shard.group] += shard.layout.nbytes
    return sizes


def _placed(shard: ShardPlacement, group: GroupCopies) -> ShardPlacement:
    backup = group.backup or ServerRef("", "")
    (server, address), (other, other_address) = group.primary, backup
    return ShardPlacement(shard.layout, server, address, other, other_address, group.term, shard.group)


def _agrees(shard: ShardPlacement, group: GroupCopies) -> bool:
    return _placed(shard, group) == shard


__all__ = ["CopyTable", "grouped"]
