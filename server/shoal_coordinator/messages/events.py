"""Events of the cluster: the inputs of `Cluster.handle`, each with the type of its reply.

The module `outcomes` defines those about effects.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shoal._wire import Cursor, EvaluationAck, EvaluationClaim, Lease, NoRange, ReportAck
from shoal.job import Job
from shoal.optim import Schedule
from shoal.status import Evaluation, JobStatus, RankTimes, Role, ServerLoad, StepTiming
from shoal_coordinator.messages.cluster_event import ClusterEvent, R
from shoal_coordinator.messages.description import ProgramDescription
from shoal_coordinator.messages.drain_order import DrainOrder
from shoal_coordinator.messages.outcomes import (
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointPublished,
    CheckpointsScanned,
    CutTaken,
    EffectDone,
    EffectFailed,
    EffectOutcome,
    OutcomesReceived,
    RestoreDeferred,
    ShardsCreated,
    WorkerAdmitted,
    WorkerFenced,
)
from shoal_coordinator.messages.refs import JobRef
from shoal_coordinator.messages.registration import Registration
from shoal_coordinator.messages.replies import (
    DescribeResult,
    HeartbeatResult,
    HoldResult,
    JoinResult,
    RegisterResult,
    TakeCheckpointResult,
)


@dataclass(frozen=True, slots=True)
class TimePassed(ClusterEvent[Mapping[str, Role]]):
    """Time has passed without another event. The reply has the role, by id, of each member that has died meanwhile.

    Attributes:
        heartbeat_wait_s: longest time in seconds that a heartbeat or a registration waited for a thread, since the last
            event of this kind.
        refused_heartbeats: number of heartbeats and registrations that were refused since then.
    """

    heartbeat_wait_s: float = 0.0
    refused_heartbeats: int = 0


@dataclass(frozen=True, slots=True)
class RegistrationReceived(ClusterEvent[RegisterResult]):
    """A process asks to become a member."""

    registration: Registration


@dataclass(frozen=True, slots=True)
class HeartbeatReceived(ClusterEvent[HeartbeatResult]):
    """A member sent a heartbeat; a server includes its shards, bytes and load."""

    member: str
    incarnation: int
    shards: int = 0
    bytes: int = 0
    load: ServerLoad | None = None  # None: the member is not a server


@dataclass(frozen=True, slots=True)
class AttendanceChanged(ClusterEvent[None]):
    """A session attends, or its call that says so has ended: its process has died, or has lost its connection."""

    member: str
    incarnation: int
    absent: bool


@dataclass(frozen=True, slots=True)
class MemberLeft(ClusterEvent[None]):
    """A member ends its incarnation; a worker may include its cursor in the range that it holds."""

    member: str
    incarnation: int
    cursor: Cursor | None = None


@dataclass(frozen=True, slots=True)
class DrainRequested(ClusterEvent[tuple[str, ...]]):
    """A server was asked to drain, and serves meanwhile. The reply has the jobs that move off it or are being saved."""

    member: str
    incarnation: int
    left_s: float | None = None  # seconds that the server will still wait; None: not known


@dataclass(frozen=True, slots=True)
class DrainOrdered(ClusterEvent[None]):
    """A user orders that a server drains.

    Attributes:
        member: member id of the server.
        order: how it drains.
        incarnation: the incarnation that has to drain; 0 for the newest one.
    """

    member: str
    order: DrainOrder
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class JobSubmitted(ClusterEvent[JobStatus]):
    """A user submits a job."""

    spec: Job
    token: str = ""  # a repeated token marks a repeat of the same submission
    submitter: str = ""  # who the limits of one submitter's jobs count for; empty if it is not known
    spec_bytes: int = 0  # bytes of the specification in the request
    submitter_role: str = ""  # the access role of the submitter; empty if it is not known


@dataclass(frozen=True, slots=True)
class JobCancelled(ClusterEvent[JobStatus]):
    """A user cancels a job; a job that has ended does not change."""

    job: str
    reason: str = ""  # why, for the job's status


@dataclass(frozen=True, slots=True)
class JobAbandoned(ClusterEvent[JobStatus]):
    """The session that started a job could not enter it. This cancels the job, unless others have a part in it."""

    job: str
    session: str
    reason: str = ""  # why, for the job's status


@dataclass(frozen=True, slots=True)
class JobDropped(ClusterEvent[None]):
    """A user drops an ended job."""

    job: str


@dataclass(frozen=True, slots=True)
class CheckpointRequested(ClusterEvent[TakeCheckpointResult]):
    """A user requests a checkpoint of a running job."""

    job: str


@dataclass(frozen=True, slots=True)
class LearningRateRequested(ClusterEvent[None]):
    """A user sets the learning rate of a live job."""

    job: str
    learning_rate: Schedule


@dataclass(frozen=True, slots=True)
class CutHeld(ClusterEvent[HoldResult]):
    """All servers hold back a job's commits: its ledger and progress are now those of the cut."""

    job: JobRef


@dataclass(frozen=True, slots=True)
class JobDescribed(ClusterEvent[DescribeResult]):
    """A worker has loaded the program."""

    job: str
    worker: str
    incarnation: int
    description: ProgramDescription
    assignment: int = 0  # number of the worker's assignment; 0 for a session


@dataclass(frozen=True, slots=True)
class JoinRequested(ClusterEvent[JoinResult]):
    """A worker asks to enter a job; `assigned` means that it has sent the given values.

    If `waits` is set, the servers admit the worker when they hold the shards, without another request.
    """

    job: str
    worker: str
    incarnation: int
    assigned: bool = False
    assignment: int = 0  # number of the worker's assignment; 0 for a session
    waits: bool = False


@dataclass(frozen=True, slots=True)
class LeaseRequested(ClusterEvent[Lease | NoRange]):
    """A worker asks for a range; `done` is the number of a lease that it has completed, or 0."""

    job: str
    worker: str
    incarnation: int
    done: int = 0
    assignment: int = 0  # number of the worker's assignment; 0 for a session
    samples: int = 0  # of a session's data, in one epoch; 0 for a worker


@dataclass(frozen=True, slots=True)
class EvaluationClaimed(ClusterEvent[EvaluationClaim]):
    """A worker has reached a step where an evaluation may be due.

    `finished_training` means that the worker has finished except for the final evaluation.
    """

    job: str
    worker: str
    incarnation: int
    step: int
    finished_training: bool = False
    assignment: int = 0  # number of the worker's assignment


@dataclass(frozen=True, slots=True)
class EvaluationReported(ClusterEvent[EvaluationAck]):
    """A worker reports the result of an evaluation."""

    job: str
    worker: str
    incarnation: int
    result: Evaluation
    assignment: int = 0  # number of the worker's assignment


@dataclass(frozen=True, slots=True)
class WorkerReported(ClusterEvent[ReportAck]):
    """A worker's report: counts since it entered, and values, log lines and timings since its last report.

    The reply tells the worker whether to continue.
    """

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
    assignment: int = 0  # number of the worker's assignment; 0 for a session
    timings: tuple[StepTiming, ...] = ()  # in increasing order of step
    ranks: tuple[RankTimes, ...] = ()  # of the hybrid group that shares a session

    def since(self, earlier: "WorkerReported | None") -> "WorkerReported":
        """Returns this report with the counts since an earlier one.

        No count is negative, even if the reports arrive out of order.
        """
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
    """A worker has finished its part in a job. An error fails the job, unless `shards_lost`: its shards were gone.

    With `trainer_failed`, its trainer was killed or fenced several times in a row: the worker is quarantined.
    With `others_go_on`, a session with an error only leaves if the job has other sessions.
    Without an error, `cursor` is its position in its data: all pushes up to it are applied.
    """

    job: str
    worker: str
    incarnation: int
    error: str = ""
    assignment: int = 0  # number of the worker's assignment; 0 for a session
    shards_lost: bool = False
    trainer_failed: bool = False
    others_go_on: bool = False
    cursor: Cursor | None = None


__all__ = [
    "AttendanceChanged",
    "CheckpointCommitted",
    "CheckpointFailed",
    "CheckpointPublished",
    "CheckpointRequested",
    "CheckpointsScanned",
    "ClusterEvent",
    "CutHeld",
    "CutTaken",
    "DrainOrdered",
    "DrainRequested",
    "EffectDone",
    "EffectFailed",
    "EffectOutcome",
    "EvaluationClaimed",
    "EvaluationReported",
    "HeartbeatReceived",
    "JobAbandoned",
    "JobCancelled",
    "JobDescribed",
    "JobDropped",
    "JobSubmitted",
    "JoinRequested",
    "LearningRateRequested",
    "LeaseRequested",
    "MemberLeft",
    "OutcomesReceived",
    "R",
    "RegistrationReceived",
    "RestoreDeferred",
    "ShardsCreated",
    "TimePassed",
    "WorkerAdmitted",
    "WorkerFenced",
    "WorkerFinished",
    "WorkerReported",
]
