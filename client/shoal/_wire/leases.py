"""Ranges of a job's samples, and the coordinator's answer to a worker that asks for one."""

import enum
from dataclasses import dataclass

from shoal.v1 import job_pb2, state_pb2

# The version of the order of an epoch's samples that new jobs use. `LedgerRecord.order` says what each version means.
LATEST_ORDER = 1


@dataclass(frozen=True, slots=True, order=True)
class DataRange:
    """Samples [start, stop) of an epoch's seeded permutation; epochs count from 0."""

    epoch: int
    start: int
    stop: int

    @property
    def samples(self) -> int:
        """The number of samples."""
        return self.stop - self.start

    def after(self, consumed: int) -> "DataRange":
        """Returns the rest of the range after this many samples; `consumed` may exceed the range."""
        return DataRange(self.epoch, min(self.start + consumed, self.stop), self.stop)

    def to_proto(self, lease: int = 0) -> job_pb2.DataRange:
        """Returns the message that carries this range under the number of a lease; 0 means that it is not leased."""
        return job_pb2.DataRange(lease=lease, epoch=self.epoch, start=self.start, stop=self.stop)

    @classmethod
    def from_proto(cls, message: job_pb2.DataRange | state_pb2.RequeuedRange) -> "DataRange":
        """Returns the range that a message carries."""
        return cls(message.epoch, message.start, message.stop)


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of one worker to train on one range.

    Attributes:
        number: number of the lease, > 0, unique in the job.
        range: the leased range.
        order: version of the order that the range refers to.
    """

    number: int
    range: DataRange
    order: int = LATEST_ORDER

    def to_proto(self) -> job_pb2.DataRange:
        """Returns the message that carries this lease without the version of the order."""
        return self.range.to_proto(self.number)

    @classmethod
    def from_proto(cls, message: job_pb2.DataRange, order: int) -> "Lease":
        """Returns the lease that a message carries, with the version of the order."""
        return cls(message.lease, DataRange.from_proto(message), order)


class NoRange(enum.Enum):
    """Reason why a worker gets no range."""

    WAIT = "other workers hold the remaining ranges, which may be requeued, or are about to lease them"
    FINISHED = "all data is done, or the job is over"


__all__ = ["LATEST_ORDER", "DataRange", "Lease", "NoRange"]
