"""The copies of all lock groups of one job, and the placement that follows from them (no I/O)."""

from collections.abc import Callable, Mapping
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
            by_group = sorted(placement.by_group().items())
            self.groups = {
                group: GroupCopies(group, ServerRef(shards[0].server, shards[0].address)) for group, shards in by_group
            }
            self.sizes = {group: sum(shard.layout.nbytes for shard in shards) for group, shards in by_group}
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
            placed = (
                _placed(shard, self.groups[group])
                for group, shards in self.planned.by_group().items()
                for shard in shards
            )
            self._placement = replace(self.planned, shards=tuple(sorted(placed, key=lambda it: it.layout.shard)))
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
            by_group = self.placement.by_group()
            assert by_group.keys() == self.groups.keys()
            assert all(_placed(it, self.groups[group]) == it for group, shards in by_group.items() for it in shards)


def _placed(shard: ShardPlacement, group: GroupCopies) -> ShardPlacement:
    backup = group.backup or ServerRef("", "")
    (server, address), (other, other_address) = group.primary, backup
    return ShardPlacement(shard.layout, server, address, other, other_address, group.term, group.group)


__all__ = ["CopyTable"]
