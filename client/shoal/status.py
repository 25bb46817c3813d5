"""Status of jobs, members and data of a cluster, as plain values.

The classes for jobs are in this module. It also exports those for members, groups and data, from `shoal._status`.
"""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass

from shoal import errors
from shoal._status.data import DataAccount, DataCount, HeldRange
from shoal._status.groups import GroupStatus, RankStatus
from shoal._status.job_members import JobMember
from shoal._status.members import BrokenReplica, ClusterStatus, MemberStatus, Role, ServerLoad, UndeliveredNorm
from shoal._status.placement import PlacedRows
from shoal._status.rank_times import Bubble, GroupTimings, RankTimes, StageTimes, StragglerRank, ideal_bubble
from shoal._status.restart_points import RestartPoint
from shoal.job import Job
from shoal.timings import Comparison, StepTiming, Straggler, Timings
from shoal.v1 import job_pb2


class JobState(enum.Enum):
    """The state of a job: pending, starting, placing, running, succeeded, failed or cancelled."""

    PENDING = "pending"  # the job waits for workers
    STARTING = "starting"  # the workers load the program, and the variables are not known yet
    PLACING = "placing"  # the servers allocate the shards
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def finished(self) -> bool:
        """Whether the state is final."""
        return self in _FINAL

    @classmethod
    def from_proto(cls, state: "job_pb2.JobState.ValueType") -> "JobState":
        """Returns the state that a message carries."""
        return cls(job_pb2.JobState.Name(state).lower())


_FINAL = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)  # a set would call the slow hash of an enumeration


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a job.

    Attributes:
        steps: accepted pushes of all workers. At a restart, the number goes back to that in the checkpoint.
        samples: samples in the accepted pushes.
        total_samples: samples in all epochs. 0 means that it is not known. If `max_steps` ends the job earlier, it is
            the number of samples until then. That number is an estimate, because batches may be smaller and workers
            join and leave.
        epoch: current pass over the data set, from 0.
        samples_per_s: mean rate over the time in which the job ran and had workers, in samples per second. Work that
            was lost with the shards does not count.
        loss: loss in the latest report of any worker, which is the mean over the worker's pushes since its previous
            report. Workers report about twice a second in a small cluster, and less often in a large one.
        staleness_p50: median staleness of all accepted pushes, in versions.
        staleness_max: largest staleness of all accepted pushes, in versions.
        rejected: pushes that were rejected for NaN or Inf.
        dropped: pushes that arrived after their step had closed.
        earlier_steps: the part of `steps` that comes from the checkpoint of another job, with which this job began.
        lost_steps: accepted pushes that were lost with shards, at all restarts. `steps` does not count them.
        ended: whether the job has ended.
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
    earlier_steps: int = 0
    lost_steps: int = 0
    ended: bool = False

    @property
    def seconds_left(self) -> float | None:
        """Seconds until `total_samples` are done, at the mean rate. 0 after the job has ended, None if not known.

        Early stopping can end the job sooner.
        """
        if self.ended:
            return 0.0
        if not self.total_samples or not 0 < self.samples_per_s < math.inf:
            return None
        return max(0, self.total_samples - self.samples) / self.samples_per_s

    @classmethod
    def from_proto(cls, message: job_pb2.Progress, *, ended: bool = False) -> "Progress":
        """Returns the progress that a message carries.

        Args:
            message: the message.
            ended: whether the job has ended.
        """
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
            earlier_steps=message.earlier_steps,
            lost_steps=message.lost_steps,
            ended=ended,
        )


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A complete checkpoint of a job, which `shoal.Checkpoints` can read.

    Attributes:
        number: its number within the job, from 1.
        step: the step at which a restored job continues; see `Checkpoint`.
        nbytes: size of its files, in bytes.
        time: time of the cut, as Unix time in seconds.
    """

    number: int
    step: int
    nbytes: int
    time: float

    def to_proto(self) -> job_pb2.Checkpoint:
        """Returns the message that carries the checkpoint."""
        return job_pb2.Checkpoint(number=self.number, step=self.step, bytes=self.nbytes, time=self.time)

    @classmethod
    def from_proto(cls, message: job_pb2.Checkpoint) -> "SavedCheckpoint":
        """Returns the checkpoint that a message carries."""
        return cls(message.number, message.step, message.bytes, message.time)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of one run of a program over its held-out samples.

    Attributes:
        number: its number within the job, from 1. There is a gap if a worker is lost during an evaluation.
        step: step of the worker that evaluated.
        values: metrics of the program by name, such as {"accuracy": 0.93}.
        samples: number of held-out samples.
        seconds: duration of the evaluation.
        time: time of the report, as Unix time in seconds.
    """

    number: int
    step: int
    values: Mapping[str, float]
    samples: int = 0
    seconds: float = 0.0
    time: float = 0.0

    def to_proto(self) -> job_pb2.Evaluation:
        """Returns the message that carries the evaluation."""
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
        """Returns the evaluation that a message carries."""
        values = dict(sorted(message.values.items()))
        return cls(message.number, message.step, values, message.samples, message.seconds, message.time)


@dataclass(frozen=True, slots=True)
class JobResult:
    """The result of a job that succeeded.

    Attributes:
        job: name of the job.
        progress: its final progress.
        seconds: time from the start of training to the end.
        evaluation: the last evaluation, or None.
        best: the best evaluation, or None.
        reason: why the job ended before all data was done, or why its last checkpoint failed. "" if neither applies.
    """

    job: str
    progress: Progress
    seconds: float
    evaluation: Evaluation | None = None
    best: Evaluation | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The status of a job.

    Attributes:
        job: the submitted specification, with its defaults.
        state: the state of the job.
        reason: why the job failed, with the program's traceback, or why it was cancelled or ended early. For a job
            that has not ended, what it waits for, or how many workers it continues with if it lacks some, and why
            sessions have left or workers were quarantined.
        submitted_at: time of the submission, as Unix time in seconds.
        started_at: time when training started, as Unix time in seconds. 0 before that.
        finished_at: time when the job ended, as Unix time in seconds. 0 before that.
        workers: member ids of the worker group.
        progress: the progress of the job.
        checkpoint: the newest complete checkpoint, or None.
        checkpoint_failure: why the latest attempt at a checkpoint failed, or "".
        restarts: number of restarts from a checkpoint, or from the beginning, because shards were lost.
        restart_point: the checkpoint that it continued from at its latest restart. None if it has not restarted, if it
            restarts now, or if it began again without a checkpoint.
        restore_note: the checkpoint that the job continues from, and how the job differs from it: in variables, data or
            arguments of the optimizer. "" if it does not differ, or began with initial values.
        evaluation: the latest evaluation, or None.
        best: the best evaluation so far, or None.
        members: the workers by rank, with those that have left. Empty in the list of `Client.jobs`.
        copies: number of complete copies that every shard has, up to `job.replicas`. 0 if the shards are not on
            servers, or if `job.replicas` is 1.
        failovers: how often the job continued with the backups of a server that was lost or drained.
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
    members: tuple[JobMember, ...] = ()
    restart_point: RestartPoint | None = None
    restore_note: str = ""
    copies: int = 0
    failovers: int = 0

    @property
    def name(self) -> str:
        """The name of the job."""
        return self.job.name

    def result(self) -> JobResult:
        """Returns the result of a job that has succeeded.

        Raises:
            JobFailed: the job failed. The message has the reason and the program's traceback.
            Cancelled: the job was cancelled.
            JobRunning: the job has not ended.
        """
        match self.state:
            case JobState.SUCCEEDED:
                seconds = self.finished_at - (self.started_at or self.finished_at)
                return JobResult(self.name, self.progress, seconds, self.evaluation, self.best, self.reason)
            case JobState.FAILED:
                raise errors.JobFailed(f"job {self.name} failed: {self.reason}", job=self.name)
            case JobState.CANCELLED:
                why = f": {self.reason}" if self.reason else ""
                raise errors.Cancelled(f"job {self.name} was cancelled{why}", job=self.name)
            case _:
                raise errors.JobRunning(f"job {self.name} is {self.state.value}; wait until it ends", job=self.name)

    @classmethod
    def from_proto(cls, message: job_pb2.JobStatus) -> "JobStatus":
        """Returns the status that a message carries."""
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
            members=tuple(JobMember.from_proto(member) for member in message.members),
            restart_point=(
                RestartPoint.from_proto(message.restart_point) if message.HasField("restart_point") else None
            ),
            restore_note=message.restore_note,
            copies=message.copies,
            failovers=message.failovers,
        )


__all__ = [
    "BrokenReplica",
    "Bubble",
    "ClusterStatus",
    "Comparison",
    "DataAccount",
    "DataCount",
    "Evaluation",
    "GroupStatus",
    "GroupTimings",
    "HeldRange",
    "JobMember",
    "JobResult",
    "JobState",
    "JobStatus",
    "MemberStatus",
    "PlacedRows",
    "Progress",
    "RankStatus",
    "RankTimes",
    "RestartPoint",
    "Role",
    "SavedCheckpoint",
    "ServerLoad",
    "StageTimes",
    "StepTiming",
    "Straggler",
    "StragglerRank",
    "Timings",
    "UndeliveredNorm",
    "ideal_bubble",
]
