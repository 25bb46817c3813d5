"""What the cluster says of its jobs and members, as plain values.

Jobs are here; members and the account of data are in `shoal._status`, and are imported from here.
"""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass

from shoal import errors
from shoal._status.data import DataAccount, DataCount, HeldRange
from shoal._status.members import ClusterStatus, MemberStatus, Role, ServerLoad
from shoal.job import Job
from shoal.timings import Comparison, StepTiming, Straggler, Timings
from shoal.v1 import job_pb2


class JobState(enum.Enum):
    """Where a job is in its life."""

    PENDING = "pending"  # waits for workers
    STARTING = "starting"  # workers load the program; its variables are not yet known
    PLACING = "placing"  # servers allocate the shards
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def finished(self) -> bool:
        """No other state follows."""
        return self in {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}

    @classmethod
    def from_proto(cls, state: "job_pb2.JobState.ValueType") -> "JobState":
        """The state that a message carries."""
        return cls(job_pb2.JobState.Name(state).lower())


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job has come.

    Attributes:
        steps: pushes that servers accepted, of all workers.
        samples: samples in them.
        total_samples: samples in all epochs; 0: not known. Of a job with `max_steps`, as many as its `workers` train
            on until then, if that is less: an estimate, for batches may be smaller, and workers come and go.
        epoch: the pass over the data set, from 0.
        samples_per_s: over the time since the job began to run.
        loss: of the latest report.
        staleness_p50: over all accepted pushes, in versions.
        staleness_max: over all accepted pushes, in versions.
        rejected: pushes refused for NaN or Inf.
        dropped: pushes that came after their step had closed.
        ended: whether this is how far the job came in the end.
    """

    steps: int = 0
    samples: int = 0
    total_samples: int = 0
    epoch: int = 0
    samples_per_s: float = 0.0
    loss: float = 0.0
    staleness_p50: float = 0.0
    staleness_max: int = 0
    rejected: int = 0
    dropped: int = 0
    ended: bool = False

    @property
    def seconds_left(self) -> float | None:
        """Seconds until `total_samples` are done, at the rate so far; None: not known, as without data or a rate.

        A job that stops early ends sooner. 0 once it has ended, however it did.
        """
        if self.ended:
            return 0.0
        if not self.total_samples or not 0 < self.samples_per_s < math.inf:
            return None
        return max(0, self.total_samples - self.samples) / self.samples_per_s

    @classmethod
    def from_proto(cls, message: job_pb2.Progress, *, ended: bool = False) -> "Progress":
        """The progress that a message carries; the job's in the end, or on the way."""
        return cls(
            steps=message.steps,
            samples=message.samples,
            total_samples=message.total_samples,
            epoch=message.epoch,
            samples_per_s=message.samples_per_s,
            loss=message.loss,
            staleness_p50=message.staleness_p50,
            staleness_max=message.staleness_max,
            rejected=message.rejected,
            dropped=message.dropped,
            ended=ended,
        )


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A whole checkpoint of a job; `shoal.Checkpoints` reads it.

    Attributes:
        number: counts a job's checkpoints, from 1.
        step: the one to go on with.
        nbytes: of its files.
        time: seconds of Unix time: of the cut.
    """

    number: int
    step: int
    nbytes: int
    time: float

    def to_proto(self) -> job_pb2.Checkpoint:
        """The message that carries it."""
        return job_pb2.Checkpoint(number=self.number, step=self.step, bytes=self.nbytes, time=self.time)

    @classmethod
    def from_proto(cls, message: job_pb2.Checkpoint) -> "SavedCheckpoint":
        """The checkpoint that a message carries."""
        return cls(message.number, message.step, message.bytes, message.time)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The program's held-out samples, seen once by the variables of a step.

    Attributes:
        number: counts the job's, from 1; one whose worker died leaves a gap.
        step: of the worker that evaluated.
        values: what the program makes of the samples: {"accuracy": 0.93}.
        samples: how many there are.
        seconds: how long it took.
        time: seconds of Unix time: when it was reported.
    """

    number: int
    step: int
    values: Mapping[str, float]
    samples: int = 0
    seconds: float = 0.0
    time: float = 0.0

    def to_proto(self) -> job_pb2.Evaluation:
        """The message that carries it."""
        return job_pb2.Evaluation(
            number=self.number,
            step=self.step,
            values=self.values,
            samples=self.samples,
            seconds=self.seconds,
            time=self.time,
        )

    @classmethod
    def from_proto(cls, message: job_pb2.Evaluation) -> "Evaluation":
        """The evaluation that a message carries."""
        values = dict(sorted(message.values.items()))
        return cls(message.number, message.step, values, message.samples, message.seconds, message.time)


@dataclass(frozen=True, slots=True)
class JobResult:
    """What a job that succeeded did.

    Attributes:
        job: its name.
        progress: in the end.
        seconds: from its first step's beginning to its end.
        evaluation: the last one; None: there was none.
        best: the best one.
        reason: why it ended before its data was done, or that its last checkpoint failed; empty: neither.
    """

    job: str
    progress: Progress
    seconds: float
    evaluation: Evaluation | None = None
    best: Evaluation | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job as the coordinator sees it.

    Attributes:
        job: what was submitted, defaults filled in.
        state: where it is in its life.
        reason: why it failed, with the program's traceback where there is one, or ended early; before its end, what it
            waits for.
        submitted_at: seconds of Unix time; this and the next two are 0 as long as that has not happened.
        started_at: when it began to run.
        finished_at: when it ended.
        workers: member ids of those that work on it.
        progress: how far it has come.
        checkpoint: the newest whole one; None: there is none.
        checkpoint_failure: why the latest attempt at one failed; empty: it did not.
        restarts: how often it went on from a checkpoint, or from its beginning, because shards were lost.
        evaluation: the latest one; None: there was none.
        best: the best one so far.
    """

    job: Job
    state: JobState
    reason: str = ""
    submitted_at: float = 0.0
    started_at: float = 0.0
    finished_at: float = 0.0
    workers: tuple[str, ...] = ()
    progress: Progress = Progress()
    checkpoint: SavedCheckpoint | None = None
    checkpoint_failure: str = ""
    restarts: int = 0
    evaluation: Evaluation | None = None
    best: Evaluation | None = None

    @property
    def name(self) -> str:
        """The job's name."""
        return self.job.name

    def result(self) -> JobResult:
        """What the job did, once it has succeeded.

        Raises:
            JobFailed: it failed; the message has the reason and the program's traceback.
            Cancelled: it was cancelled.
            JobRunning: it has not ended.
        """
        match self.state:
            case JobState.SUCCEEDED:
                seconds = self.finished_at - (self.started_at or self.finished_at)
                return JobResult(self.name, self.progress, seconds, self.evaluation, self.best, self.reason)
            case JobState.FAILED:
                raise errors.JobFailed(f"job {self.name} failed: {self.reason}", job=self.name)
            case JobState.CANCELLED:
                raise errors.Cancelled(f"job {self.name} was cancelled", job=self.name)
            case _:
                raise errors.JobRunning(f"job {self.name} is {self.state.value}; wait for its end", job=self.name)

    @classmethod
    def from_proto(cls, message: job_pb2.JobStatus) -> "JobStatus":
        """The status that a message carries."""
        state = JobState.from_proto(message.state)
        return cls(
            job=Job.from_proto(message.spec),
            state=state,
            reason=message.reason,
            submitted_at=message.submitted_at,
            started_at=message.started_at,
            finished_at=message.finished_at,
            workers=tuple(message.workers),
            progress=Progress.from_proto(message.progress, ended=state.finished),
            checkpoint=SavedCheckpoint.from_proto(message.checkpoint) if message.HasField("checkpoint") else None,
            checkpoint_failure=message.checkpoint_failure,
            restarts=message.restarts,
            evaluation=Evaluation.from_proto(message.evaluation) if message.HasField("evaluation") else None,
            best=Evaluation.from_proto(message.best) if message.HasField("best") else None,
        )


__all__ = [
    "ClusterStatus",
    "Comparison",
    "DataAccount",
    "DataCount",
    "Evaluation",
    "HeldRange",
    "JobResult",
    "JobState",
    "JobStatus",
    "MemberStatus",
    "Progress",
    "Role",
    "SavedCheckpoint",
    "ServerLoad",
    "StepTiming",
    "Straggler",
    "Timings",
]
