"""A live worker of one job, and how far its entry has come (no I/O)."""

import enum
from dataclasses import dataclass

from shoal.v1 import state_pb2
from shoal_coordinator.messages import WorkerReported


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
        described: whether it has loaded the program and the given values.
        step: the step at which it starts.
        last_report: its last report; stored with the reports of the other live workers.
        stepped_at: when its step last rose, or it was admitted, in seconds of Unix time. Not stored.
        asked_at: when it last asked for data. Not stored.
    """

    worker: str
    incarnation: int
    rank: int
    assignment: int
    stage: Stage = Stage.ASSIGNED
    described: bool = False
    step: int = 0
    last_report: WorkerReported | None = None
    stepped_at: float = 0.0
    asked_at: float = 0.0

    @property
    def current_step(self) -> int:
        """Its step by its last report, or else the one at which it started."""
        return self.last_report.step if self.last_report else self.step

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
