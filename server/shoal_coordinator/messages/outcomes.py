"""Outcomes of effects: events of the cluster by which the effect runner tells what it has done."""

from dataclasses import dataclass, field

from shoal.status import SavedCheckpoint
from shoal.v1 import state_pb2
from shoal_coordinator.messages.cluster_event import ClusterEvent
from shoal_coordinator.messages.refs import JobRef
from shoal_coordinator.messages.replies import RestoredCheckpoint


@dataclass(frozen=True, slots=True)
class EffectOutcome(ClusterEvent[None]):
    """The outcome of an effect, which is then complete. `effect` is the number of the effect."""

    effect: int = field(default=0, kw_only=True)


@dataclass(frozen=True, slots=True)
class ShardsCreated(EffectOutcome):
    """All servers hold the job's shards, with initial or restored values."""

    job: JobRef
    restored: RestoredCheckpoint | None = None


@dataclass(frozen=True, slots=True)
class WorkerAdmitted(EffectOutcome):
    """All servers have admitted a worker, which starts at `step`."""

    job: JobRef
    assignment: int
    step: int


@dataclass(frozen=True, slots=True)
class EffectFailed(EffectOutcome):
    """An effect that the job depends on has failed; `shards_lost` means that the job's shards are gone."""

    job: JobRef
    reason: str
    shards_lost: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointsScanned(EffectOutcome):
    """The checkpoint storage was scanned. The numbers under the job's name go up to `largest`."""

    job: JobRef
    largest: int  # 0: none exists


@dataclass(frozen=True, slots=True)
class RestoreDeferred(EffectOutcome):
    """The job's shards are not filled, because the checkpoint storage cannot be read now."""

    job: JobRef
    reason: str


@dataclass(frozen=True, slots=True)
class CutTaken(EffectOutcome):
    """All servers are writing their shards as of the cut; the rest of the checkpoint is in this event."""

    job: JobRef
    number: int  # the checkpoint's number
    step: int
    version: int
    time: float  # seconds of Unix time
    data: state_pb2.LedgerRecord | None
    progress_totals: state_pb2.ProgressRecord
    held_by: int = 0  # the cut that holds back commits until the job restarts from it; 0: none


@dataclass(frozen=True, slots=True)
class CheckpointCommitted(EffectOutcome):
    """A checkpoint is complete, and the older ones that it replaces are removed."""

    job: JobRef
    saved: SavedCheckpoint
    removed: tuple[int, ...] = ()
    best: int = 0  # number of the best evaluation so far, if the cut was taken at it; 0: none
    last: bool = False  # the job restarts from it now


@dataclass(frozen=True, slots=True)
class CheckpointFailed(EffectOutcome):
    """A checkpoint attempt has failed. The job continues, unless `shards_lost` says that its shards are gone."""

    job: JobRef
    reason: str
    shards_lost: bool = False


@dataclass(frozen=True, slots=True)
class EffectDone(EffectOutcome):
    """An effect has completed, and no job needs to know."""


@dataclass(frozen=True, slots=True)
class OutcomesReceived(ClusterEvent[None]):
    """Outcomes of effects of one job that shared their calls to servers, in the order of the effects."""

    outcomes: "tuple[EffectOutcome | WorkerFenced, ...]"


@dataclass(frozen=True, slots=True)
class CheckpointPublished(ClusterEvent[bool]):
    """A checkpoint's manifest is written. The effect continues: it removes older ones only if the reply is True.

    The reply is False if the effect was abandoned, because the job restarts without this checkpoint.
    """

    effect: int
    job: JobRef
    saved: SavedCheckpoint
    best: int = 0  # as in `CheckpointCommitted`


@dataclass(frozen=True, slots=True)
class WorkerFenced(ClusterEvent[None]):
    """All servers have fenced a worker. The effect continues; `committed_steps` is the largest count on any server."""

    effect: int
    committed_steps: int


__all__ = [
    "CheckpointCommitted",
    "CheckpointFailed",
    "CheckpointPublished",
    "CheckpointsScanned",
    "CutTaken",
    "EffectDone",
    "EffectFailed",
    "EffectOutcome",
    "OutcomesReceived",
    "RestoreDeferred",
    "ShardsCreated",
    "WorkerAdmitted",
    "WorkerFenced",
]
