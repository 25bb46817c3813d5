"""The lock groups of one job with their copies, and the placement that follows from them (no I/O)."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from shoal._wire import Placement, ShardPlacement
from shoal.v1 import state_pb2
from shoal_coordinator.job.copies.group_copies import GroupCopies, server_of, server_record
from shoal_coordinator.messages import JobRecordKind, ServerRef, servers_of


class CopyTable:
    """The lock groups of a job's placement.

    Args:
        changed: called with the name of a record that has changed.

    Attributes:
        planned: the placement as the scheduler planned it; None if the shards are not placed.
        groups: the lock groups by number, in order. Only methods of this class change them.
    """

    def __init__(self, changed: Callable[[str], None] = lambda _: None) -> None:
        self._changed = changed
        self.planned: Placement | None = None
        self.groups: Mapping[int, GroupCopies] = {}
        self._replicated = False
        self._bytes: list[int] = []  # wire bytes of each shard
        self._placement: Placement | None = None  # see `placement`; None if it is not known
        self._sizes: Mapping[int, int] | None = None  # see `sizes`; None if they are not known
        self._holders: frozenset[ServerRef] = frozenset()

    def begin(self, placement: Placement | None, *, replicated: bool) -> None:
        """Replaces the placement. Its groups have no backups yet.

        Args:
            placement: the new placement; None if the shards are dropped or lost.
            replicated: whether the job wants several copies of each shard.
        """
        had_record = self._has_record
        self.planned = self._placement = placement
        self._replicated, self._sizes = replicated, None
        self.groups, self._holders = {}, frozenset(servers_of(placement)) if placement else frozenset()
        if placement:
            self._bytes = [shard.layout.nbytes for shard in placement.shards]
            self.groups = {
                group: GroupCopies(group, ServerRef(shards[0].server, shards[0].address), shards=_numbers(shards))
                for group, shards in sorted(placement.by_group().items())
            }
        if had_record or self._has_record:
            self._changed(JobRecordKind.COPIES)

    def put(self, *groups: GroupCopies) -> None:
        """Replaces some groups by their next states, or adds them."""
        self.groups = dict(sorted({**self.groups, **{it.group: it for it in groups}}.items()))
        self._holders |= {server for it in groups for server in it.others}
        self._placement = self._sizes = None
        self._changed(JobRecordKind.COPIES)

    @property
    def sizes(self) -> Mapping[int, int]:
        """The wire bytes of each group."""
        if self._sizes is None:
            self._sizes = {it.group: sum(self.shard_bytes(it).values()) for it in self.groups.values()}
        return self._sizes

    def shard_bytes(self, group: GroupCopies) -> dict[int, int]:
        """Returns the wire bytes of each shard of a group."""
        return {shard: self._bytes[shard] for shard in group.shards}

    @property
    def placement(self) -> Placement | None:
        """The planned placement with the present servers, backups and terms; None if the shards are not placed."""
        if self._placement is None and self.planned:  # made when it is read: one event may change many groups
            planned = self.planned.shards
            placed = {it: _placed(planned[it], group) for group in self.groups.values() for it in group.shards}
            self._placement = replace(self.planned, shards=tuple(placed[it.layout.shard] for it in planned))
        return self._placement

    @property
    def _has_record(self) -> bool:
        return bool(self.groups) and (self._replicated or any(it.term for it in self.groups.values()))

    @property
    def holders(self) -> tuple[ServerRef, ...]:
        """The servers that have, or may have, something of the shards, in order."""
        return tuple(sorted(self._holders))

    @property
    def complete(self) -> bool:
        """Whether each group has a complete backup."""
        return all(it.backup for it in self.groups.values())

    def to_proto(self) -> state_pb2.CopiesRecord | None:
        """Returns the record; None if it would say nothing that the planned placement does not say."""
        if self.planned is None or not self._has_record:
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
        planned = {group: it.shards for group, it in self.groups.items()}
        self.groups = {it.group: GroupCopies.from_proto(it, planned) for it in record.groups}
        self._holders = frozenset(map(server_of, record.holders))
        self._placement = self._sizes = None

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        for group in self.groups.values():
            group.validate()
            assert {group.primary, *group.others} <= self._holders, "a copy is on an unknown server"
        if self.groups:
            assert self.placement
            by_group = self.placement.by_group()
            by_shard = {shard: group for group in self.groups.values() for shard in group.shards}
            assert by_group.keys() == self.groups.keys()
            assert all(_numbers(shards) == self.groups[group].shards for group, shards in by_group.items())
            present = self.placement.shards if self.planned is not self.placement else ()
            assert all(_placed(it, by_shard[it.layout.shard]) == it for it in present)


def _numbers(shards: Iterable[ShardPlacement]) -> tuple[int, ...]:
    return tuple(it.layout.shard for it in shards)


def _placed(shard: ShardPlacement, group: GroupCopies) -> ShardPlacement:
    backup = group.backup or ServerRef("", "")
    (server, address), (other, other_address) = group.primary, backup
    return ShardPlacement(shard.layout, server, address, other, other_address, group.term, group.group)


__all__ = ["CopyTable"]
