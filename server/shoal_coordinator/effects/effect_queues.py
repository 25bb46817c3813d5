"""The queues of effects: which one an effect waits in, and which effects share their calls to servers (no I/O)."""

from collections import deque

from shoal_coordinator.effects import worker_effects
from shoal_coordinator.messages import (
    AddBackup,
    AdmitWorker,
    CommitCheckpoint,
    DropBackup,
    DropCopy,
    Effect,
    ProbeServer,
    RemoveWorker,
    ScanCheckpoints,
    SplitGroup,
)


def queue_of(effect: Effect) -> tuple[str, str]:
    """Returns the key of the queue that an effect waits in: the name of its job, and what it may wait for long.

    `Promote` is in the same queue as what follows from it: a server must be the primary before it admits or removes
    workers. `DropBackup` is not, because a call that admits a worker may wait for it.
    """
    match effect:
        case ScanCheckpoints() | CommitCheckpoint():
            return effect.job.name, "storage"
        case AddBackup() | SplitGroup():
            return effect.job.name, f"copy of {effect.group}"
        case DropBackup():
            return effect.job.name, f"backup of {effect.group}"
        case DropCopy():
            return effect.job.name, f"free {effect.group} on {effect.server.member}"
        case ProbeServer():
            return effect.job.name, f"probe of {effect.server.member}"
    return effect.job.name, ""


def take_batch(queue: deque[Effect]) -> list[Effect]:
    """Takes the first effect of a queue, with the next ones that can share its calls to servers."""
    batch = [first := queue.popleft()]
    if isinstance(first, AdmitWorker | RemoveWorker):
        while queue and len(batch) < worker_effects.MAX_WORKERS and _share_calls(first, queue[0]):
            batch.append(queue.popleft())
    return batch


def _share_calls(first: AdmitWorker | RemoveWorker, effect: Effect) -> bool:
    return type(effect) is type(first) and effect.job == first.job and effect.servers == first.servers


__all__ = ["queue_of", "take_batch"]
