"""The account of a job's data, as plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.v1 import job_pb2


@dataclass(frozen=True, slots=True)
class DataCount:
    """Samples by what became of them.

    Attributes:
        done: trained on.
        leased: in the hands of workers.
        loose: taken back from a worker, or passed over for the sake of order: the next to be leased.
        untouched: never leased.
    """

    done: int = 0
    leased: int = 0
    loose: int = 0
    untouched: int = 0

    @classmethod
    def from_proto(cls, message: job_pb2.DataCount) -> "DataCount":
        """The count that a message carries."""
        return cls(message.done, message.leased, message.loose, message.untouched)


@dataclass(frozen=True, slots=True)
class HeldRange:
    """Samples [start, stop) of an epoch's order, which a worker trains on."""

    worker: str
    rank: int
    epoch: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class DataAccount:
    """What became of a job's data.

    Attributes:
        samples: of one pass; 0: the job has no data, or no worker has loaded its program yet.
        epochs: passes.
        epoch: the first that is not all done, from 0; the last one when they all are.
        total: of all epochs.
        in_progress: by epoch, of those that have been begun and are not all done; the first 1,000 of them.
        held: which worker has what.
    """

    samples: int = 0
    epochs: int = 0
    epoch: int = 0
    total: DataCount = DataCount()
    in_progress: Mapping[int, DataCount] = field(default_factory=dict)
    held: tuple[HeldRange, ...] = ()

    @classmethod
    def from_proto(cls, message: job_pb2.GetDataReply) -> "DataAccount":
        """The account that a message carries."""
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
