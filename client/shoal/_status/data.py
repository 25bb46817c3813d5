"""The account of a job's data: how many samples are done, leased, requeued and unleased, as plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.v1 import job_pb2


@dataclass(frozen=True, slots=True)
class DataCount:
    """Numbers of samples by their state.

    Attributes:
        done: trained on.
        leased: held by workers.
        requeued: taken back from a worker, or reserved for a rank and skipped when another rank asked. They are
            leased before unleased samples.
        unleased: never leased.
    """

    done: int = 0
    leased: int = 0
    requeued: int = 0
    unleased: int = 0

    @classmethod
    def from_proto(cls, message: job_pb2.DataCount) -> "DataCount":
        """Returns the count that a message carries."""
        return cls(message.done, message.leased, message.requeued, message.unleased)


@dataclass(frozen=True, slots=True)
class HeldRange:
    """A range of an epoch's order that a worker has leased.

    Attributes:
        worker: member id of the worker.
        rank: rank of the worker.
        epoch: the pass over the data set, from 0.
        start: place of the first sample.
        stop: place after the last sample.
    """

    worker: str
    rank: int
    epoch: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class DataAccount:
    """The account of a job's data.

    Attributes:
        samples: samples in one epoch. 0 means that the job has no data, or that no worker has loaded its program yet.
        epochs: number of epochs.
        epoch: the first epoch that is not complete, from 0. When all are complete, the last one.
        total: count over all epochs.
        in_progress: counts of the epochs that have started and are not complete, at most the first 1,000.
        held: the leased ranges, at most the first 10,000.
    """

    samples: int = 0
    epochs: int = 0
    epoch: int = 0
    total: DataCount = DataCount()
    in_progress: Mapping[int, DataCount] = field(default_factory=dict)
    held: tuple[HeldRange, ...] = ()

    @property
    def epochs_done(self) -> int:
        """The number of complete epochs before the first one that is not complete."""
        complete = self.samples and self.total.done >= self.samples * self.epochs
        return self.epochs if complete else self.epoch

    @classmethod
    def from_proto(cls, message: job_pb2.GetDataReply) -> "DataAccount":
        """Returns the account that a message carries."""
        return cls(
            samples=message.samples,
            epochs=message.epochs,
            epoch=message.epoch,
            total=DataCount.from_proto(message.total),
            in_progress={each.epoch: DataCount.from_proto(each.count) for each in message.in_progress},
            held=tuple(
                HeldRange(each.worker, each.rank, each.range.epoch, each.range.start, each.range.stop)
                for each in message.held
            ),
        )


__all__ = ["DataAccount", "DataCount", "HeldRange"]
