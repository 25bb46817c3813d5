"""What a job is made of: its submission, its workers' parts in it, and what its program trains. Values."""

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
        ref: its name, and which submission of that name it is.
        spec: what the user asked for.
        token: by which a repeat of the submission is known.
    """

    ref: JobRef
    spec: Job
    token: str = ""

    def to_proto(self) -> state_pb2.SubmissionRecord:
        """The record of this submission, without its number."""
        return state_pb2.SubmissionRecord(spec=self.spec.to_proto(), token=self.token)

    @classmethod
    def from_proto(cls, number: int, record: state_pb2.SubmissionRecord) -> "Submission":
        """The submission of this number that a record is of.

        Raises:
            ShoalError, ValueError: the record makes no sense.
        """
        spec = Job.from_proto(record.spec)
        return cls(JobRef(spec.name, number), spec, record.token)


class Stage(enum.Enum):
    """How far a worker's entry into a job is."""

    ASSIGNED = "loads the program"
    ENTERING = "servers are told"
    ADMITTED = "may pull and push"


@dataclass(slots=True)
class GroupMember:
    """A live worker's part in a job. Only its job's `WorkerGroup` changes it."""

    worker: str
    incarnation: int
    rank: int  # in [0, workers), unique among the job's participants
    assignment: int  # unique in the cluster
    stage: Stage = Stage.ASSIGNED
    described: bool = False  # it knows the program, and its initial values
    step: int = 0  # where it begins
    last_report: WorkerReported | None = None  # its last report; kept with the job's tally, not here

    def to_proto(self) -> state_pb2.GroupMemberRecord:
        """The record of this part."""
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
        """The part that a record is of."""
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
    """What the program trains."""

    variables: Mapping[str, Variable]
    samples: int

    @property
    def given(self) -> frozenset[str]:
        """The variables whose initial values a worker has to send."""
        return frozenset(name for name, it in self.variables.items() if isinstance(it.initializer, Given))

    def conflict(self, second: "ProgramDescription") -> str:
        """Where another description of the same job differs; empty: nowhere."""
        if self.samples != second.samples:
            return f"{second.samples} samples instead of {self.samples}"
        for name in sorted(self.variables.keys() | second.variables.keys()):
            here, there = self.variables.get(name), second.variables.get(name)
            if here is None or there is None:
                return f"variable {name!r} is only in one of the two"
            if here != there:
                return f"variable {name!r} is {there} instead of {here}"
        return ""
