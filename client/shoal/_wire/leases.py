"""Ranges of a job's samples, and what a worker that asks the coordinator for one is answered."""

import enum
from dataclasses import dataclass

from shoal.v1 import job_pb2, state_pb2


@dataclass(frozen=True, slots=True, order=True)
class DataRange:
    """Samples [start, stop) of an epoch's seeded permutation; epochs count from 0."""

    epoch: int
    start: int
    stop: int

    @property
    def samples(self) -> int:
        """How many there are."""
        return self.stop - self.start

    def after(self, consumed: int) -> "DataRange":
        """What is left of it behind so many samples; they may be more than there are."""
        return DataRange(self.epoch, min(self.start + consumed, self.stop), self.stop)

    def to_proto(self, lease: int = 0) -> job_pb2.DataRange:
        """The message that carries this range, leased under a number or not at all."""
        return job_pb2.DataRange(lease=lease, epoch=self.epoch, start=self.start, stop=self.stop)

    @classmethod
    def from_proto(cls, message: job_pb2.DataRange | state_pb2.RequeuedRange) -> "DataRange":
        """The range that a message carries."""
        return cls(message.epoch, message.start, message.stop)


@dataclass(frozen=True, slots=True)
class Lease:
    """A range in one worker's hands; the number is unique in the job and > 0."""

    number: int
    range: DataRange

    def to_proto(self) -> job_pb2.DataRange:
        """The message that carries this lease."""
        return self.range.to_proto(self.number)

    @classmethod
    def from_proto(cls, message: job_pb2.DataRange) -> "Lease":
        """The lease that a message carries."""
        return cls(message.lease, DataRange.from_proto(message))


class NoRange(enum.Enum):
    """Why a worker gets no range."""

    WAIT = "others hold the rest, which may come back, or are about to ask for it"
    FINISHED = "all data is done, or the job is over"


__all__ = ["DataRange", "Lease", "NoRange"]
