"""Effects: what the cluster machine has decided and the effect runner carries out.

The effect runner has several queues for each job name (`effects.effect_queues`). All submissions of a name share them.
The effects of a queue are carried out one after the other, in the order of the decisions. A restarted coordinator may
repeat an effect, so each one is idempotent. `number` is unique in the cluster and is set when the effect is decided.
"""

from dataclasses import dataclass, field

from shoal._wire import Placement
from shoal.checkpoint_policy import CheckpointChoice
from shoal.job import Job
from shoal.optim import PlateauState, Schedule
from shoal.status import Evaluation
from shoal_coordinator.messages.copies import AddBackup, DropBackup, DropCopy, ProbeServer, Promote, SplitGroup
from shoal_coordinator.messages.outcomes import CutTaken
from shoal_coordinator.messages.refs import JobRef, ServerRef


@dataclass(frozen=True, slots=True)
class CreateShards:
    """Allocates a job's shards by its placement, and fills them from the first source that can be read.

    The outcome is `ShardsCreated`, or `RestoreDeferred` if the checkpoint storage is unavailable.
    """

    job: JobRef
    placement: Placement
    spec: Job
    sources: tuple[CheckpointChoice, ...] = ()  # empty: use initial values
    number: int = field(default=0, kw_only=True)


@dataclass(frozen=True, slots=True)
class AdmitWorker:
    """Lets a worker pull and push, and includes it in barriers. The outcome is `WorkerAdmitted`."""

    job: JobRef
    worker: str
    incarnation: int
    rank: int
    assignment: int
    servers: tuple[ServerRef, ...]
    number: int = field(default=0, kw_only=True)


@dataclass(frozen=True, slots=True)
class RemoveWorker:
    """Fences an incarnation on every server, then releases it at the largest step that it committed on any server.

    That step can be read only once, because a server forgets a worker when it releases it. `WorkerFenced` therefore
    records the step in between, and a repeat of the effect starts after it.
    """

    job: JobRef
    worker: str
    incarnation: int
    servers: tuple[ServerRef, ...]
    committed_steps: int | None = None  # None: not known to be fenced on every server
    number: int = field(default=0, kw_only=True)


@dataclass(frozen=True, slots=True)
class SetLearningRate:
    """Sets the learning rate of a job's later updates on its servers."""

    job: JobRef
    learning_rate: Schedule
    servers: tuple[ServerRef, ...]
    number: int = field(default=0, kw_only=True)


@dataclass(frozen=True, slots=True)
class DropShards:
    """Frees a job's shards. A failure is harmless: a server that cannot be reached has lost its shards."""

    job: JobRef
    servers: tuple[ServerRef, ...]
    number: int = field(default=0, kw_only=True)


@dataclass(frozen=True, slots=True)
class ScanCheckpoints:
    """Reads which checkpoint numbers exist under a job's name. The outcome is `CheckpointsScanned`.

    It runs in the same queue as `CommitCheckpoint`: the storage may take minutes to respond, and training does not wait
    for it.
    """

    job: JobRef
    number: int = field(default=0, kw_only=True)


@dataclass(frozen=True, slots=True)
class TakeCut:
    """Makes all servers save a job's shards as of one cut. The outcome is `CutTaken`.

    The effect's own number is unique, and keeps its files apart from those of an earlier cut that failed.
    """

    job: JobRef
    generation: int
    servers: tuple[ServerRef, ...]
    checkpoint: int  # its number in the storage
    last: bool = False  # the job restarts from it, so servers commit no pushes after it
    number: int = field(default=0, kw_only=True)


@dataclass(frozen=True, slots=True)
class CommitCheckpoint:
    """Waits for a checkpoint's files, then writes its manifest. It has a queue of its own.

    The outcome is `CheckpointCommitted` or `CheckpointFailed`.
    """

    job: JobRef
    placement: Placement
    spec: Job
    cut: CutTaken
    best: Evaluation | None = None  # the best evaluation so far, if the cut was taken at it
    keep: tuple[int, ...] = ()  # numbers of checkpoints to retain, whatever the policy says
    learning_rate: Schedule | None = None  # set by a user or a plateau while the job ran
    plateau: PlateauState | None = None  # of the reduction of the learning rate
    submitter: str = ""  # who submitted the job, by the name of a token; empty if that is not known
    keeps_others: bool = False  # whether the checkpoints of other submitters under this name are kept
    number: int = field(default=0, kw_only=True)


Effect = (
    CreateShards
    | AdmitWorker
    | RemoveWorker
    | SetLearningRate
    | DropShards
    | ScanCheckpoints
    | TakeCut
    | CommitCheckpoint
    | AddBackup
    | DropBackup
    | DropCopy
    | SplitGroup
    | Promote
    | ProbeServer
)
