"""The workers and sessions of a job, as plain values."""

from dataclasses import dataclass
from typing import Literal, cast

from shoal.v1 import job_pb2


@dataclass(frozen=True, slots=True)
class JobMember:
    """A worker or session that is, or was, in a job.

    Attributes:
        worker: its member id.
        rank: its rank. If another one has taken the rank, only that one is listed.
        state: "present", "finished", or "left" if it left before it finished, or was lost.
        step: its current step, according to its last report. 0 unless it is present.
        reason: why it has left, such as "left: the session raised ValueError: boom". "" unless it has.
    """

    worker: str
    rank: int
    state: Literal["present", "finished", "left"]
    step: int = 0
    reason: str = ""

    def to_proto(self) -> job_pb2.JobMember:
        """Returns the message that carries the member."""
        state = job_pb2.JobMember.State.Value(self.state.upper())
        return job_pb2.JobMember(worker=self.worker, rank=self.rank, state=state, step=self.step, reason=self.reason)

    @classmethod
    def from_proto(cls, message: job_pb2.JobMember) -> "JobMember":
        """Returns the member that a message carries."""
        state = cast(Literal["present", "finished", "left"], job_pb2.JobMember.State.Name(message.state).lower())
        return cls(message.worker, message.rank, state, message.step, message.reason)


__all__ = ["JobMember"]
