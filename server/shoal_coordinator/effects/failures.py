"""Explanations of effects that have failed: what that means for the job, and what an operator can do."""

from dataclasses import dataclass

from shoal import errors
from shoal_coordinator.messages import (
    AddBackup,
    AdmitWorker,
    CommitCheckpoint,
    CreateShards,
    DropBackup,
    DropCopy,
    DropShards,
    Effect,
    ProbeServer,
    Promote,
    RemoveWorker,
    ScanCheckpoints,
    SetLearningRate,
    TakeCut,
    servers_of,
)

# The errors of an effect after which its job restarts. A server that returns one of `SHARDS_LOST` is alive but lacks
# the job's shards; the job restarts after any effect. `Moved` means that it does not have the copy that it should
# have. The other two errors mean that the server cannot be reached, or
# that its heartbeat timeout has expired (`Cancelled`). The job then restarts only if it cannot continue without the
# effect. It can continue without a checkpoint.
AWAY = (*errors.SHARDS_LOST, errors.Moved, errors.Unreachable, errors.Cancelled)


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed effect.

    Attributes:
        what: what could not be done.
        servers: names of the servers that it was to be done on; empty if it concerns the checkpoint storage.
        advice: what follows, and what to do.
    """

    what: str
    servers: tuple[str, ...]
    advice: str


def failure_of(effect: Effect, error: Exception) -> Failure:
    """Returns what the failure of an effect means."""
    match effect:
        case CreateShards():
            servers = servers_of(effect.placement)
        case ScanCheckpoints() | CommitCheckpoint():
            servers = ()
        case _:
            servers = effect.servers
    return Failure(_what(effect), tuple(it.member for it in servers), _advice(effect, error))


def _what(effect: Effect) -> str:
    match effect:
        case CreateShards():
            return "its shards could not be created"
        case AdmitWorker():
            return f"worker {effect.worker} could not be admitted"
        case RemoveWorker():
            return f"worker {effect.worker} could not be removed"
        case SetLearningRate():
            return "its learning rate could not be set"
        case DropShards():
            return "its shards could not be dropped"
        case AddBackup():
            return f"a copy of its shards could not be made on server {effect.backup.member}"
        case DropBackup():
            return f"server {effect.server.member} could not be told to continue without a backup"
        case DropCopy():
            return f"the copy of its shards on server {effect.server.member} could not be freed"
        case Promote():
            return f"the backup on server {effect.server.member} could not become the primary"
        case ProbeServer():
            return f"server {effect.server.member} could not be asked for an answer"
        case ScanCheckpoints():
            return "its checkpoints could not be listed"
        case TakeCut():
            return f"the cut of checkpoint {effect.checkpoint} could not be taken"
        case CommitCheckpoint():
            return f"checkpoint {effect.cut.number} could not be completed"


def _advice(effect: Effect, error: Exception) -> str:
    match effect:
        case DropShards() | DropCopy():
            return "nothing, if a server has ended; else restart the server if `shoal status` still shows its bytes"
        case ScanCheckpoints() | TakeCut() | CommitCheckpoint():
            return "training continues. If the next checkpoint fails too, check the checkpoint storage and the servers"
        case CreateShards() if isinstance(error, errors.StorageFailed):
            return "the job waits, and this is tried again; check that the checkpoint storage can be read"
    if isinstance(error, AWAY):
        return "the job restarts if it needs this; see `shoal status` for lost servers, and start them again"
    return "the job fails; remove the reason, and submit it again"


__all__ = ["AWAY", "Failure", "failure_of"]
