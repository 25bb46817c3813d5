"""The copies of one lock group, as the coordinator has decided them (no I/O)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shoal.v1 import state_pb2
from shoal_coordinator.messages import ServerRef


@dataclass(frozen=True, slots=True)
class GroupCopies:
    """The copies of a lock group. Each method that decides something returns the state with a larger term.

    Attributes:
        group: the smallest index of its shards.
        primary: the server that serves it.
        term: number of the latest decision; 0 before the first one.
        backup: the server with the complete backup; None if there is none.
        growing: the server that gets a backup now; None if none does.
        told: whether the primary knows that it is the primary, and that it has no backup if it has none.
        former: the server that had a copy before the latest decision, and frees it when the primary knows this
            decision; None if there is none.
        shards: its shards, in order.
        split_off: those of its shards that become a group of their own when the primary knows the latest decision.
    """

    group: int
    primary: ServerRef
    term: int = 0
    backup: ServerRef | None = None
    growing: ServerRef | None = None
    told: bool = True
    former: ServerRef | None = None
    shards: tuple[int, ...] = ()
    split_off: tuple[int, ...] = ()

    @property
    def second(self) -> ServerRef | None:
        """The server of the other copy, complete or not; None if there is none."""
        return self.backup or self.growing

    @property
    def servers(self) -> tuple[ServerRef, ...]:
        """The servers that have a copy, or had one before a decision that the primary does not know yet."""
        return tuple(it for it in (self.primary, self.second, self.former) if it)

    def has_copy_on(self, server: str) -> bool:
        """Returns whether a server has a copy, or had one before a decision that the primary does not know yet."""
        return any(it.member == server for it in self.servers)

    @property
    def may_grow(self) -> bool:
        """Whether a backup may be made now."""
        return self.told and self.second is None

    def grow_on(self, server: ServerRef) -> "GroupCopies":
        """Returns the state after the decision to make a backup on a server."""
        assert self.may_grow
        assert server.member != self.primary.member
        return replace(self, term=self.term + 1, growing=server)

    def grown(self) -> "GroupCopies":
        """Returns the state after the backup is complete. The decision was made before, so the term stays."""
        assert self.growing
        return replace(self, backup=self.growing, growing=None)

    def alone(self) -> "GroupCopies":
        """Returns the state after the decision that the primary continues without a backup."""
        return replace(self, term=self.term + 1, backup=None, growing=None, told=False, former=self.second)

    def promoted(self) -> "GroupCopies":
        """Returns the state after the decision that the complete backup becomes the primary."""
        assert self.backup
        after = replace(self, term=self.term + 1, primary=self.backup, backup=None, growing=None)
        return replace(after, told=False, former=self.primary)

    def split(self, split_off: tuple[int, ...]) -> "GroupCopies":
        """Returns the state after the decision that some shards become a group of their own, on the same server."""
        assert self.may_grow
        assert split_off
        assert set(split_off) <= set(self.shards) - {self.group}
        return replace(self, term=self.term + 1, told=False, split_off=split_off)

    def known(self) -> "tuple[GroupCopies, ...]":
        """Returns the state after the primary knows the latest decision, and that of the new group, if there is one."""
        stay = tuple(it for it in self.shards if it not in self.split_off)
        known = replace(self, told=True, former=None, shards=stay, split_off=())
        if not self.split_off:
            return (known,)
        return known, replace(known, group=min(self.split_off), shards=self.split_off)

    def to_proto(self) -> state_pb2.GroupCopiesRecord:
        """Returns the record of this group."""
        return state_pb2.GroupCopiesRecord(
            group=self.group,
            term=self.term,
            primary=server_record(self.primary),
            backup=server_record(self.backup) if self.backup else None,
            growing=server_record(self.growing) if self.growing else None,
            not_told=not self.told,
            former=server_record(self.former) if self.former else None,
            shards=self.shards,
            split_off=self.split_off,
        )

    @classmethod
    def from_proto(cls, record: state_pb2.GroupCopiesRecord, planned: Mapping[int, tuple[int, ...]]) -> "GroupCopies":
        """Returns the group of a record.

        Args:
            record: the record.
            planned: the shards of each group as they were placed. Earlier versions stored no others.
        """
        return cls(
            record.group,
            server_of(record.primary),
            record.term,
            server_of(record.backup) if record.HasField("backup") else None,
            server_of(record.growing) if record.HasField("growing") else None,
            told=not record.not_told,
            former=server_of(record.former) if record.HasField("former") else None,
            shards=tuple(record.shards) or planned[record.group],
            split_off=tuple(record.split_off),
        )

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert not (self.backup and self.growing), "a group has two backups"
        assert self.second is None or self.second.member != self.primary.member, "both copies are on one server"
        assert self.told or self.second is None, "a primary gets a backup before it knows that it is the primary"
        assert not (self.told and self.former), "a copy is not freed"
        assert self.former is None or self.former.member != self.primary.member, "the primary is to be freed"
        assert self.term or (self.second is None and self.told)
        assert self.group == min(self.shards), "a group has not the name of its first shard"
        assert not self.split_off or not (self.told or self.former), "a group splits off shards without a decision"
        assert set(self.split_off) <= set(self.shards) - {self.group}, "a group splits off shards that it does not have"


def server_record(server: ServerRef) -> state_pb2.ServerRecord:
    """Returns the record of a server."""
    return state_pb2.ServerRecord(member=server.member, address=server.address)


def server_of(record: state_pb2.ServerRecord) -> ServerRef:
    """Returns the server of a record."""
    return ServerRef(record.member, record.address)


__all__ = ["GroupCopies", "server_of", "server_record"]
