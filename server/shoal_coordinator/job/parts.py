"""Values that make up a job: its submission, the members of its worker group, and the description of its program."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.initializers import Given
from shoal.job import Job
from shoal.v1 import state_pb2
from shoal.variables import Variable
from shoal_coordinator.messages import JobRef, WorkerReported


@dataclass(frozen=True, slots=True)
class Submission:
    """A job, as its user submitted it.

    Attributes:
        ref: its name and submission number.
        spec: the job specification.
        token: identifies repeats of the same submission.
    """

    ref: JobRef
    spec: Job
    token: str = ""

    def to_proto(self) -> state_pb2.SubmissionRecord:
        """Returns the record of this submission, without its number."""
        return state_pb2.SubmissionRecord(spec=self.spec.to_proto(), token=self.token)

    @classmethod
    def from_proto(cls, number: int, record: state_pb2.SubmissionRecord) -> "Submission":
        """Returns the submission with this number from its record.

        Raises:
            ShoalError, ValueError: the record is invalid.
        """
        spec = Job.from_proto(record.spec)
        return cls(JobRef(spec.name, number), spec, record.token)


class Stage(enum.Enum):
    """How far a worker's entry into a job has come."""

    ASSIGNED = "loads the program"
    ENTERING = "servers admit it"
    ADMITTED = "may pull and push"


@dataclass(slots=True)
class GroupMember:
    """A live worker in a job. Only the job's `WorkerGroup` changes it.

    Attributes:
        worker: id of the worker.
        incarnation: its incarnation.
        rank: in [0, workers), unique within the job.
        assignment: number of its assignment, unique in the cluster.
        stage: how far its entry has come.
        described: whether it has loaded the program, and so has the given values.
        step: the step at which it starts.
        last_report: its last report; stored in the record of the progress totals.
    """

    worker: str
    incarnation: int
    rank: int
    assignment: int
    stage: Stage = Stage.ASSIGNED
    described: bool = False
    step: int = 0
    last_report: WorkerReported | None = None

    def to_proto(self) -> state_pb2.GroupMemberRecord:
        """Returns the record of this member."""
        return state_pb2.GroupMemberRecord(
            worker=self.worker,
            incarnation=self.incarnation,
            rank=self.rank,
            assignment=self.assignment,
            stage=state_pb2.GroupMemberRecord.Stage.Value(self.stage.name),
            described=self.described,
            step=self.step,
        )

    @classmethod
    def from_proto(cls, record: state_pb2.GroupMemberRecord) -> "GroupMember":
        """Returns the member in a record."""
        return cls(
            worker=record.worker,
            incarnation=record.incarnation,
            rank=record.rank,
            assignment=record.assignment,
            stage=Stage[state_pb2.GroupMemberRecord.Stage.Name(record.stage)],
            described=record.described,
            step=record.step,
        )


@dataclass(frozen=True, slots=True)
class ProgramDescription:
    """What a program trains.

    Attributes:
        variables: its variables, by name.
        samples: samples in one epoch; 0 if it has no data set.
    """

    variables: Mapping[str, Variable]
    samples: int

    @property
    def given(self) -> frozenset[str]:
        """The variables whose initial values a worker has to send."""
        return frozenset(name for name, it in self.variables.items() if isinstance(it.initializer, Given))

    def conflict(self, second: "ProgramDescription") -> str:
        """Returns how another description of the same job differs; empty if it does not."""
        if self.samples != second.samples:
            return f"{second.samples} samples instead of {self.samples}"
        for name in sorted(self.variables.keys() | second.variables.keys()):
            here, there = self.variables.get(name), second.variables.get(name)
            if here is None or there is None:
                return f"variable {name!r} is only in one of the two"
            if here != there:
                return f"variable {name!r} is {there} instead of {here}"
        return ""
