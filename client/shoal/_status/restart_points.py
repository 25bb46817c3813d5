"""The checkpoints that jobs continued from after a restart, as plain values."""

from dataclasses import dataclass

from shoal.v1 import job_pb2


@dataclass(frozen=True, slots=True)
class RestartPoint:
    """The checkpoint that a job continued from at its latest restart.

    Attributes:
        job: the job that took the checkpoint.
        number: number of the checkpoint within that job.
        step: the step at which the job continued.
    """

    job: str
    number: int
    step: int

    def to_proto(self) -> job_pb2.RestartPoint:
        """Returns the message that carries the checkpoint."""
        return job_pb2.RestartPoint(job=self.job, number=self.number, step=self.step)

    @classmethod
    def from_proto(cls, message: job_pb2.RestartPoint) -> "RestartPoint":
        """Returns the checkpoint that a message carries."""
        return cls(message.job, message.number, message.step)


__all__ = ["RestartPoint"]
