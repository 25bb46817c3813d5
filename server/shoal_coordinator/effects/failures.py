"""Explanations of effects that have failed: what that means for the job, and what an operator can do."""

from collections.abc import Mapping
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
    SplitGroup,
    TakeCut,
    servers_of,
)

# The errors of an effect after which its job restarts. A server that returns one of `SHARDS_LOST` is alive but lacks
# the job's shards; the job restarts after any effect. `Moved`: the server lacks a copy that the coordinator counts on.
# The other two errors mean that the server cannot be reached, or that its heartbeat timeout has expired (`Cancelled`).
# The job then restarts only if it cannot continue without the effect. It can continue without a checkpoint.
AWAY = (*errors.SHARDS_LOST, errors.Moved, errors.Unreachable, errors.Cancelled)


# What could not be done, by kind of effect; formatted with the effect.
_WHAT: Mapping[type, str] = {
    CreateShards: "its shards could not be created",
    AdmitWorker: "worker {0.worker} could not be admitted",
    RemoveWorker: "worker {0.worker} could not be removed",
    SetLearningRate: "its learning rate could not be set",
    DropShards: "its shards could not be dropped",
    AddBackup: "a copy of its shards could not be made on server {0.backup.member}",
    DropBackup: "server {0.server.member} could not be told to continue without a backup",
    DropCopy: "the copy of its shards on server {0.server.member} could not be freed",
    Promote: "the backup on server {0.server.member} could not become the primary",
    SplitGroup: "shards on server {0.server.member} could not become a group of their own",
    ProbeServer: "server {0.server.member} could not be asked for an answer",
    ScanCheckpoints: "its checkpoints could not be listed",
    TakeCut: "the cut of checkpoint {0.checkpoint} could not be taken",
    CommitCheckpoint: "checkpoint {0.cut.number} could not be completed",
}


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


def loses_shards(effect: Effect, error: Exception) -> bool:
    """Returns whether an effect that has failed leaves its job without shards: it restarts, and does not fail.

    A backup that cannot become the primary is as good as lost, whatever the reason is.
    """
    return isinstance(error, AWAY) or isinstance(effect, Promote)


def _what(effect: Effect) -> str:
    return _WHAT[type(effect)].format(effect)


def _advice(effect: Effect, error: Exception) -> str:
    match effect:
        case DropShards() | DropCopy():
            return "nothing, if a server has ended; else restart the server if `shoal status` still shows its bytes"
        case ScanCheckpoints() | TakeCut() | CommitCheckpoint():
            return "training continues. If the next checkpoint fails too, check the checkpoint storage and the servers"
        case CreateShards() if isinstance(error, errors.StorageFailed):
            return "the job waits, and this is tried again; check that the checkpoint storage can be read"
    if loses_shards(effect, error):
        return "the job restarts if it needs this; see `shoal status` for lost servers, and start them again"
    return "the job fails; remove the reason, and submit it again"


__all__ = ["AWAY", "Failure", "failure_of", "loses_shards"]
