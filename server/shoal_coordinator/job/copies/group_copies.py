"""The copies of one lock group, as the coordinator has decided them (no I/O).

A group has a primary and perhaps a backup. A third copy grows while copies move, so that two are complete at each
moment (docs/decisions/0088): the primary makes one that replaces its backup, or the backup makes one that will be its
own backup when it becomes the primary.
"""

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
        growing: the server that gets another copy now; None if none does. If there is a backup, too, this copy replaces
            it or follows it.
        told: whether the server concerned has confirmed the latest decision: the primary, that it is the primary, and
            which backup it has; or the backup, that it has no copy of its own.
        former: the servers that had a copy before the latest decision, or before earlier decisions that were never
            known. They free it when the latest decision is known.
        shards: its shards, in order.
        split_off: those of its shards that become a group of their own when the primary knows the latest decision. If
            there are `former` servers, that decision is about a server which was lost before it told that it had split
            the group. Then the split is decided again after it, without a backup.
        backup_term: the term in which the backup was begun; 0 if there is none.
        behind_backup: whether the backup makes the growing copy, to have a backup of its own when it is the primary.
        grown: whether the growing copy behind the backup is complete.
        promoted: whether the primary may not know yet that it is the primary.
    """

    group: int
    primary: ServerRef
    term: int = 0
    backup: ServerRef | None = None
    growing: ServerRef | None = None
    told: bool = True
    former: tuple[ServerRef, ...] = ()
    shards: tuple[int, ...] = ()
    split_off: tuple[int, ...] = ()
    backup_term: int = 0
    behind_backup: bool = False
    grown: bool = False
    promoted: bool = False

    @property
    def second(self) -> ServerRef | None:
        """The server of the other copy, complete or not; None if there is none."""
        return self.backup or self.growing

    @property
    def others(self) -> tuple[ServerRef, ...]:
        """The servers of the other copies, complete or not."""
        return tuple(it for it in (self.backup, self.growing) if it)

    @property
    def sender(self) -> ServerRef:
        """The server that makes the growing copy, or would make one."""
        return self.backup if self.behind_backup and self.backup else self.primary

    @property
    def is_copied(self) -> bool:
        """Whether a copy is being made now."""
        return self.growing is not None and not self.grown

    @property
    def servers(self) -> tuple[ServerRef, ...]:
        """The servers that have a copy, or had one before a decision that is not known yet."""
        return (self.primary, *self.others, *self.former)

    def has_copy_on(self, server: str) -> bool:
        """Returns whether a server has a copy, or had one before a decision that the primary does not know yet."""
        return any(it.member == server for it in self.servers)

    @property
    def may_grow(self) -> bool:
        """Whether a backup may be made now, because there is none."""
        return self.told and self.second is None

    @property
    def may_move(self) -> bool:
        """Whether a copy may be made that replaces the backup or follows it."""
        return self.told and self.backup is not None and self.growing is None

    def grow_on(self, server: ServerRef, *, behind_backup: bool = False) -> "GroupCopies":
        """Returns the state after the decision to make a copy on a server.

        Args:
            server: the server.
            behind_backup: whether the backup makes it.
        """
        assert self.may_grow or self.may_move
        assert self.backup or not behind_backup
        assert server.member not in {it.member for it in self.servers}
        return replace(self, term=self.term + 1, growing=server, behind_backup=behind_backup)

    def made(self) -> "GroupCopies":
        """Returns the state after the growing copy is complete, if it is the only other one or follows the backup.

        The decision to make it was the latest one, so the term stays.
        """
        assert self.growing
        if self.behind_backup:
            return replace(self, grown=True)
        assert self.backup is None
        return replace(self, backup=self.growing, growing=None, backup_term=self.term)

    def replaced(self) -> "GroupCopies":
        """Returns the state after the decision that the growing copy, which is complete, replaces the backup."""
        assert self.growing
        assert self.backup
        assert not self.behind_backup
        return self._decided(self.primary, self.growing, self.term)

    def kept(self) -> "GroupCopies":
        """Returns the state after the decision that the backup stays, and the growing copy is dropped."""
        assert self.growing
        assert self.backup
        return self._decided(self.primary, self.backup, self.backup_term)

    def alone(self) -> "GroupCopies":
        """Returns the state after the decision that the primary continues without a backup."""
        return self._decided(self.primary)

    def handed_over(self, *, keeps: bool) -> "GroupCopies":
        """Returns the state after the decision that the complete backup becomes the primary.

        Args:
            keeps: whether the copy that it has made, which is complete, is its backup then.
        """
        assert self.backup
        assert self.grown or not keeps
        after = self._decided(self.backup, self.growing, self.term) if keeps else self._decided(self.backup)
        return replace(after, promoted=True)

    def _decided(self, primary: ServerRef, backup: ServerRef | None = None, backup_term: int = 0) -> "GroupCopies":
        """Returns the state after a decision that ends the growth of a copy. All other servers lose theirs."""
        former = tuple(it for it in self.servers if it not in (primary, backup))
        after = replace(self, term=self.term + 1, primary=primary, backup=backup, backup_term=backup_term)
        return replace(after, told=False, former=former, growing=None, behind_backup=False, grown=False)

    def split(self, split_off: tuple[int, ...]) -> "GroupCopies":
        """Returns the state after the decision that some shards become a group of their own, on the same servers."""
        assert self.may_grow or self.may_move
        assert split_off
        assert set(split_off) <= set(self.shards) - {self.group}
        return replace(self, term=self.term + 1, told=False, split_off=split_off)

    def known(self) -> "tuple[GroupCopies, ...]":
        """Returns the state after the latest decision is known, and that of the new group, if there is one.

        If a split has to be decided again, that is done.
        """
        known = replace(self, told=True, former=(), promoted=False, split_off=())
        if not self.split_off:
            return (known,)
        if self.former:
            return (known.split(self.split_off),)
        if self.backup:
            known = replace(known, backup_term=self.term)  # each part has a connection that was begun with the split
        stay = replace(known, shards=tuple(it for it in self.shards if it not in self.split_off))
        return stay, replace(known, group=min(self.split_off), shards=self.split_off)

    @property
    def backup_terms(self) -> frozenset[int]:
        """The terms that name the connections to the backup; two of them while the group is split."""
        if not self.backup:
            return frozenset()
        return frozenset({self.backup_term, self.term} if self.split_off else {self.backup_term})

    def to_proto(self) -> state_pb2.GroupCopiesRecord:
        """Returns the record of this group."""
        return state_pb2.GroupCopiesRecord(
            group=self.group,
            term=self.term,
            primary=server_record(self.primary),
            backup=server_record(self.backup) if self.backup else None,
            growing=server_record(self.growing) if self.growing else None,
            not_told=not self.told,
            former=server_record(self.former[0]) if self.former else None,
            more_former=map(server_record, self.former[1:]),
            shards=self.shards,
            split_off=self.split_off,
            backup_term=self.backup_term if self.backup_term != self.term else 0,
            behind_backup=self.behind_backup,
            grown=self.grown,
            promoted=self.promoted,
        )

    @classmethod
    def from_proto(cls, record: state_pb2.GroupCopiesRecord, planned: Mapping[int, tuple[int, ...]]) -> "GroupCopies":
        """Returns the group of a record.

        Args:
            record: the record.
            planned: the shards of each group as they were placed. Earlier versions stored no others.
        """
        former = [record.former] if record.HasField("former") else []
        return cls(
            record.group,
            server_of(record.primary),
            record.term,
            server_of(record.backup) if record.HasField("backup") else None,
            server_of(record.growing) if record.HasField("growing") else None,
            told=not record.not_told,
            former=tuple(map(server_of, [*former, *record.more_former])),
            shards=tuple(record.shards) or planned[record.group],
            split_off=tuple(record.split_off),
            backup_term=(record.backup_term or record.term) if record.HasField("backup") else 0,
            behind_backup=record.behind_backup,
            grown=record.grown,
            promoted=record.promoted,
        )

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        holders = [it.member for it in (self.primary, *self.others)]
        assert len({*holders}) == len(holders), "two copies are on one server"
        assert self.told or self.growing is None, "a copy is made before its sender knows the decision before"
        assert (self.backup_term > 0) == (self.backup is not None)
        assert self.backup_term < self.term or self.growing is None, "two copies of one term"
        assert self.backup_term <= self.term
        assert not self.behind_backup or (self.backup and self.growing), "a copy without a sender"
        assert not self.grown or self.behind_backup, "a copy is complete, and nothing follows from that"
        assert not self.promoted or not self.told
        assert not (self.told and self.former), "a copy is not freed"
        assert not {it.member for it in self.former} & {*holders}, "a copy is to be freed that is needed"
        assert self.term or (self.second is None and self.told)
        assert self.group == min(self.shards), "a group has not the name of its first shard"
        assert not (self.split_off and self.told), "a group splits off shards without a decision"
        assert not (self.split_off and self.former and self.backup), "a group splits off shards with an unknown backup"
        assert set(self.split_off) <= set(self.shards) - {self.group}, "a group splits off shards that it does not have"


def server_record(server: ServerRef) -> state_pb2.ServerRecord:
    """Returns the record of a server."""
    return state_pb2.ServerRecord(member=server.member, address=server.address)


def server_of(record: state_pb2.ServerRecord) -> ServerRef:
    """Returns the server of a record."""
    return ServerRef(record.member, record.address)


__all__ = ["GroupCopies", "server_of", "server_record"]
