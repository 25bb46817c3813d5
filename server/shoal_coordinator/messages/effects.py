"""What the cluster machine wants done, for `performer` to do.

Those of one job name are to be performed one after the other, in the order in which they were decided. Each may be
performed again, by a coordinator that does not know that it was; the number, unique in the cluster, is set when it is
decided.
"""

from dataclasses import dataclass, field

from shoal._wire import Placement
from shoal.checkpoint_policy import CheckpointChoice
from shoal.job import Job
from shoal.status import Evaluation
from shoal_coordinator.messages.events import CutTaken
from shoal_coordinator.messages.refs import JobRef, ServerRef


@dataclass(frozen=True, slots=True)
class CreateShards:
    """Allocate a job's shards where the placement says, and fill them with the first of the sources that can be read.

    Then `ShardsCreated`, or `RestoreDeferred` if for now nobody can say, for the storage is away.
    """

    job: JobRef
    placement: Placement
    spec: Job
    sources: tuple[CheckpointChoice, ...] = ()  # none: initial values
    number: int = field(default=0, kw_only=True)


@dataclass(frozen=True, slots=True)
class AdmitWorker:
    """Let a worker pull and push, and others wait for it; then `WorkerAdmitted`."""

    job: JobRef
    worker: str
    incarnation: int
    rank: int
    assignment: int
    servers: tuple[ServerRef, ...]
    number: int = field(default=0, kw_only=True)


@dataclass(frozen=True, slots=True)
class RemoveWorker:
    """Fence an incarnation on every server; then release it on every one, at the furthest step that it committed.

    How far that was can be learned once: a server that has released a worker knows it no more. So `WorkerFenced` comes
    in between, and who performs this again begins behind it.
    """

    job: JobRef
    worker: str
    incarnation: int
    servers: tuple[ServerRef, ...]
    committed_steps: int | None = None  # None: it is not known to be fenced on all of them
    number: int = field(default=0, kw_only=True)


@dataclass(frozen=True, slots=True)
class DropShards:
    """Free a job's shards. A failure harms nobody: a server that cannot be reached has lost them anyway."""

    job: JobRef
    servers: tuple[ServerRef, ...]
    number: int = field(default=0, kw_only=True)


@dataclass(frozen=True, slots=True)
class ScanCheckpoints:
    """Look which numbers the folder has under a job's name; then `CheckpointsScanned`.

    In the line of `CommitCheckpoint`: the folder may not answer for minutes, and nobody who trains waits there.
    """

    job: JobRef
    number: int = field(default=0, kw_only=True)


@dataclass(frozen=True, slots=True)
class TakeCut:
    """Have all servers begin to save a job's shards as they are at one moment; then `CutTaken`.

    Its own number, which no other cut has, tells its files from those of another cut that failed under way.
    """

    job: JobRef
    generation: int
    servers: tuple[ServerRef, ...]
    checkpoint: int  # its number
    last: bool = False  # the job is to go back to it, so nothing is committed after it
    number: int = field(default=0, kw_only=True)


@dataclass(frozen=True, slots=True)
class CommitCheckpoint:
    """Wait for a checkpoint's files, and make it whole; then `CheckpointCommitted`. In a line of its own."""

    job: JobRef
    placement: Placement
    spec: Job
    cut: CutTaken
    best: Evaluation | None = None  # the evaluation that it was taken at, the best so far
    keep: tuple[int, ...] = ()  # numbers of others that stay, whatever the policy says
    number: int = field(default=0, kw_only=True)


Effect = CreateShards | AdmitWorker | RemoveWorker | DropShards | ScanCheckpoints | TakeCut | CommitCheckpoint
