"""Effects about the copies of lock groups, and their outcomes."""

from dataclasses import dataclass, field

from shoal_coordinator.messages.outcomes import EffectOutcome
from shoal_coordinator.messages.refs import JobRef, ServerRef


@dataclass(frozen=True, slots=True)
class _CopyEffect:
    """A call to one server about a copy of a lock group.

    Attributes:
        group: the smallest index of its shards.
        term: number of the decision.
        server: the server that is called.
    """

    job: JobRef
    generation: int
    group: int
    term: int
    server: ServerRef
    number: int = field(default=0, kw_only=True)

    @property
    def servers(self) -> tuple[ServerRef, ...]:
        """The server that is called."""
        return (self.server,)


@dataclass(frozen=True, slots=True)
class AddBackup(_CopyEffect):
    """Makes the primary copy its group to the server `backup`. The outcome is `BackupMade` or `BackupFailed`.

    Attributes:
        backup: the server that gets the copy.
        keeps_term: the term in which the primary's other backup was begun, which stays; 0 if there is none.
        as_backup: whether the server that is called is the backup, and makes a copy of its own.
    """

    backup: ServerRef
    keeps_term: int = 0
    as_backup: bool = False


@dataclass(frozen=True, slots=True)
class DropBackup(_CopyEffect):
    """Makes the primary of a lock group continue without a backup, or with one only. The outcome is `GroupTold`.

    Attributes:
        keeps_term: the term in which the backup was begun that stays; 0 if none does.
        as_backup: whether the server that is called is the backup, whose own copy ends.
    """

    keeps_term: int = 0
    as_backup: bool = False


@dataclass(frozen=True, slots=True)
class DropCopy(_CopyEffect):
    """Frees the copy of a lock group on a server that is neither its primary nor its backup any more.

    Calls that wait there are sent to the primary. Copies of this term or a later one stay. The outcome is `EffectDone`.
    """


@dataclass(frozen=True, slots=True)
class Promote(_CopyEffect):
    """Makes the backup of a lock group, which is on `server`, its primary. The outcome is `GroupTold`.

    Attributes:
        keeps_term: the term in which that server has begun a copy, which is its backup then; 0 if there is none.
        split_off: the shards that leave the group by a split which the server may have carried out. If they are a group
            of their own there, it becomes a primary, too.
    """

    keeps_term: int = 0
    split_off: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SplitGroup(_CopyEffect):
    """Makes two lock groups of one, on the server of both. The outcome is `GroupTold`, or `BackupFailed`.

    Attributes:
        shards: the shards that leave the group.
        keeps_term: the term in which the backup was begun that both groups keep; 0 if there is none.
        backup: the server of that backup; None if there is none. If it cannot be kept, the outcome is `BackupFailed`.
    """

    shards: tuple[int, ...]
    keeps_term: int = 0
    backup: ServerRef | None = None


@dataclass(frozen=True, slots=True)
class ProbeServer:
    """Asks a server for an answer, because a backup does not reach it any more. The outcome is `ServerProbed`.

    Attributes:
        incarnation: the server's incarnation.
        asked_at: time of the decision, in seconds of Unix time.
    """

    job: JobRef
    server: ServerRef
    incarnation: int
    asked_at: float
    number: int = field(default=0, kw_only=True)

    @property
    def servers(self) -> tuple[ServerRef, ...]:
        """The server that is called."""
        return (self.server,)


# The decisions about one group. A later one replaces those that are pending.
GroupEffect = AddBackup | DropBackup | Promote | SplitGroup


@dataclass(frozen=True, slots=True)
class BackupMade(EffectOutcome):
    """The copy of a term is complete: answers of the primary wait for it from now on."""

    job: JobRef
    group: int
    term: int


@dataclass(frozen=True, slots=True)
class BackupFailed(EffectOutcome):
    """A copy of a group failed; the primary may or may not have begun it."""

    job: JobRef
    group: int
    term: int
    reason: str


@dataclass(frozen=True, slots=True)
class GroupTold(EffectOutcome):
    """The server that had to know the decision with this term knows it."""

    job: JobRef
    group: int
    term: int


@dataclass(frozen=True, slots=True)
class ServerProbed(EffectOutcome):
    """A server was asked for an answer. Empty `silence` means that it answered."""

    server: ServerRef
    incarnation: int
    asked_at: float
    silence: str = ""


__all__ = [
    "AddBackup",
    "BackupFailed",
    "BackupMade",
    "DropBackup",
    "DropCopy",
    "GroupEffect",
    "GroupTold",
    "ProbeServer",
    "Promote",
    "ServerProbed",
    "SplitGroup",
]
