"""What happens to the cluster, each with the type of its answer: what `Cluster.handle` takes in."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from shoal._wire import Cursor, EvaluationAck, EvaluationClaim, Lease, NoRange, ReportAck
from shoal.job import Job
from shoal.status import Evaluation, JobStatus, Role, SavedCheckpoint, ServerLoad, StepTiming
from shoal.v1 import state_pb2
from shoal.variables import Variable
from shoal_coordinator.messages.refs import JobRef
from shoal_coordinator.messages.registration import Registration
from shoal_coordinator.messages.replies import (
    Assignment,
    DescribeResult,
    HoldResult,
    JoinResult,
    RegisterResult,
    RestoredCheckpoint,
    TakeCheckpointResult,
)

R = TypeVar("R")


class ClusterEvent(Generic[R]):
    """Something that happened."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class TimePassed(ClusterEvent[Mapping[str, Role]]):
    """Nothing else happened for a while. The answer: who was declared dead since the last one, by member id."""


@dataclass(frozen=True, slots=True)
class RegistrationReceived(ClusterEvent[RegisterResult]):
    """A process wants to be a member."""

    registration: Registration


@dataclass(frozen=True, slots=True)
class HeartbeatReceived(ClusterEvent[Assignment | None]):
    """A member is alive; servers say what they hold and do."""

    member: str
    incarnation: int
    shards: int = 0
    bytes: int = 0
    load: ServerLoad | None = None  # None: it is no server


@dataclass(frozen=True, slots=True)
class MemberLeft(ClusterEvent[None]):
    """A member ends its incarnation; a worker may say how far it is in the range of data that it holds."""

    member: str
    incarnation: int
    cursor: Cursor | None = None


@dataclass(frozen=True, slots=True)
class DrainRequested(ClusterEvent[tuple[str, ...]]):
    """A server is told to go, and serves on. The answer: the jobs with shards there that are being saved."""

    member: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class JobSubmitted(ClusterEvent[JobStatus]):
    """A user wants a job to run."""

    spec: Job
    token: str = ""  # the same: a repeat of the same submission


@dataclass(frozen=True, slots=True)
class JobCancelled(ClusterEvent[JobStatus]):
    """A user wants a job to end; one that has ended stays as it is."""

    job: str


@dataclass(frozen=True, slots=True)
class JobDropped(ClusterEvent[None]):
    """A user wants an ended job to be forgotten."""

    job: str


@dataclass(frozen=True, slots=True)
class CheckpointRequested(ClusterEvent[TakeCheckpointResult]):
    """A user wants a checkpoint of a running job."""

    job: str


@dataclass(frozen=True, slots=True)
class CutHeld(ClusterEvent[HoldResult]):
    """All servers hold back the commits of a job: its data and its figures are now those of the cut."""

    job: JobRef


@dataclass(frozen=True, slots=True)
class JobDescribed(ClusterEvent[DescribeResult]):
    """A worker has loaded the program; `samples` are those of one pass."""

    job: str
    worker: str
    incarnation: int
    variables: Mapping[str, Variable]
    samples: int
    assignment: int = 0  # which part in a job of that name it has; 0: a session's


@dataclass(frozen=True, slots=True)
class JoinRequested(ClusterEvent[JoinResult]):
    """A worker wants to enter; `assigned` says that the given initial values are in place."""

    job: str
    worker: str
    incarnation: int
    assigned: bool = False
    assignment: int = 0  # which part in a job of that name it has; 0: a session's


@dataclass(frozen=True, slots=True)
class LeaseRequested(ClusterEvent[Lease | NoRange]):
    """A worker wants a range of data; `done` is one that it has trained on, or 0."""

    job: str
    worker: str
    incarnation: int
    done: int = 0
    assignment: int = 0  # which part in a job of that name it has; 0: a session's


@dataclass(frozen=True, slots=True)
class EvaluationClaimed(ClusterEvent[EvaluationClaim]):
    """A worker has come to a step where an evaluation may be due, or is `through` but for the one at the end."""

    job: str
    worker: str
    incarnation: int
    step: int
    through: bool = False
    assignment: int = 0  # which part in a job of that name it has


@dataclass(frozen=True, slots=True)
class EvaluationReported(ClusterEvent[EvaluationAck]):
    """A worker has evaluated."""

    job: str
    worker: str
    incarnation: int
    result: Evaluation
    assignment: int = 0  # which part in a job of that name it has


@dataclass(frozen=True, slots=True)
class WorkerReported(ClusterEvent[ReportAck]):
    """What a worker did since it entered; values, log, timings since its last report. Answered: what it is to do."""

    job: str
    worker: str
    incarnation: int
    step: int = 0
    accepted: int = 0
    rejected: int = 0
    dropped: int = 0
    samples: int = 0
    values: Mapping[str, float] = field(default_factory=dict)
    staleness: Mapping[int, int] = field(default_factory=dict)
    log: tuple[str, ...] = ()
    assignment: int = 0  # which part in a job of that name it has; 0: a session's
    timings: tuple[StepTiming, ...] = ()  # by step, each greater than the one before

    def since(self, earlier: "WorkerReported | None") -> "WorkerReported":
        """The same with counts of what came after an earlier one; none is negative, should they come out of order."""
        if earlier is None:
            return self
        return replace(
            self,
            accepted=max(0, self.accepted - earlier.accepted),
            rejected=max(0, self.rejected - earlier.rejected),
            dropped=max(0, self.dropped - earlier.dropped),
            samples=max(0, self.samples - earlier.samples),
            staleness={
                key: count - earlier.staleness.get(key, 0)
                for key, count in self.staleness.items()
                if count > earlier.staleness.get(key, 0)
            },
        )


@dataclass(frozen=True, slots=True)
class WorkerFinished(ClusterEvent[None]):
    """A worker is through with a job; with an error, the job fails, unless that is that its shards are gone: `lost`."""

    job: str
    worker: str
    incarnation: int
    error: str = ""
    assignment: int = 0  # which part in a job of that name it has; 0: a session's
    lost: bool = False


@dataclass(frozen=True, slots=True)
class EffectOutcome(ClusterEvent[None]):
    """What became of an effect, which is then over. The number is the effect's."""

    effect: int = field(default=0, kw_only=True)


@dataclass(frozen=True, slots=True)
class ShardsCreated(EffectOutcome):
    """All servers hold the job's shards, with initial values or what was restored."""

    job: JobRef
    restored: RestoredCheckpoint | None = None


@dataclass(frozen=True, slots=True)
class WorkerAdmitted(EffectOutcome):
    """All servers let a worker in; it begins at `step`."""

    job: JobRef
    assignment: int
    step: int


@dataclass(frozen=True, slots=True)
class EffectFailed(EffectOutcome):
    """Something that the job cannot do without was not done; `lost`: because its shards are not there any more."""

    job: JobRef
    reason: str
    lost: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointsScanned(EffectOutcome):
    """The folder of checkpoints was looked at: what is there under the job's name has numbers up to `largest`."""

    job: JobRef
    largest: int  # 0: nothing is


@dataclass(frozen=True, slots=True)
class RestoreDeferred(EffectOutcome):
    """A job's shards are not filled, for the storage of its checkpoints cannot be read for now."""

    job: JobRef
    reason: str


@dataclass(frozen=True, slots=True)
class CutTaken(EffectOutcome):
    """All servers write their shards as they were at one moment; the rest of the checkpoint is here."""

    job: JobRef
    number: int  # of the checkpoint
    step: int
    version: int
    time: float  # seconds of Unix time
    data: state_pb2.LedgerRecord | None
    progress_totals: state_pb2.TallyRecord
    held_by: int = 0  # the cut that holds back all commits until the job has gone back to it; 0: none does


@dataclass(frozen=True, slots=True)
class CheckpointCommitted(EffectOutcome):
    """A checkpoint is whole; the older ones that it made superfluous were removed."""

    job: JobRef
    saved: SavedCheckpoint
    removed: tuple[int, ...] = ()
    best: int = 0  # the number of the evaluation that it was taken at, the best so far; 0: none
    last: bool = False  # the job goes back to it now


@dataclass(frozen=True, slots=True)
class CheckpointFailed(EffectOutcome):
    """A checkpoint was given up. The job goes on, unless that is because its shards are not there any more: `lost`."""

    job: JobRef
    reason: str
    lost: bool = False


@dataclass(frozen=True, slots=True)
class EffectDone(EffectOutcome):
    """That is all: the job has no need to hear of it."""


@dataclass(frozen=True, slots=True)
class WorkerFenced(ClusterEvent[None]):
    """All servers refuse a worker that is to be removed, which is not over; the most steps that any had committed."""

    effect: int
    committed_steps: int
