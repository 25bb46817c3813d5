"""The copies of one lock group, as the coordinator has decided them (no I/O)."""

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
    """

    group: int
    primary: ServerRef
    term: int = 0
    backup: ServerRef | None = None
    growing: ServerRef | None = None
    told: bool = True
    former: ServerRef | None = None

    @property
    def second(self) -> ServerRef | None:
        """The server of the other copy, complete or not; None if there is none."""
        return self.backup or self.growing

    def has_copy_on(self, server: str) -> bool:
        """Returns whether a server has a copy, or had one before a decision that the primary does not know yet."""
        return any(it.member == server for it in (self.primary, self.second, self.former) if it)

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

    def known(self) -> "GroupCopies":
        """Returns the state after the primary knows the latest decision."""
        return replace(self, told=True, former=None)

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
        )

    @classmethod
    def from_proto(cls, record: state_pb2.GroupCopiesRecord) -> "GroupCopies":
        """Returns the group of a record."""
        return cls(
            record.group,
            server_of(record.primary),
            record.term,
            server_of(record.backup) if record.HasField("backup") else None,
            server_of(record.growing) if record.HasField("growing") else None,
            told=not record.not_told,
            former=server_of(record.former) if record.HasField("former") else None,
        )

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert not (self.backup and self.growing), "a group has two backups"
        assert self.second is None or self.second.member != self.primary.member, "both copies are on one server"
        assert self.told or self.second is None, "a primary gets a backup before it knows that it is the primary"
        assert not (self.told and self.former), "a copy is not freed"
        assert self.former is None or self.former.member != self.primary.member, "the primary is to be freed"
        assert self.term or (self.second is None and self.told)


def server_record(server: ServerRef) -> state_pb2.ServerRecord:
    """Returns the record of a server."""
    return state_pb2.ServerRecord(member=server.member, address=server.address)


def server_of(record: state_pb2.ServerRecord) -> ServerRef:
    """Returns the server of a record."""
    return ServerRef(record.member, record.address)


__all__ = ["GroupCopies", "server_of", "server_record"]
