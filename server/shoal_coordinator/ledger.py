"""Which of a job's examples are trained on, by whom, and which still wait. Pure: no clock, no I/O.

The examples of every epoch are cut into ranges, leased in order. A range is waiting, leased or done; the lease of a
worker that dies or leaves is taken back and given out again before anything else. So every example is visited at least
once an epoch, and exactly once when nobody fails.
"""

import enum
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from shoal.v1 import job_pb2, state_pb2

# With this many ranges a worker and epoch, the fastest worker waits for the slowest for about an eighth of an epoch.
_RANGES_A_WORKER = 8


@dataclass(frozen=True, slots=True, order=True)
class DataRange:
    """Examples [start, stop) of an epoch's seeded permutation; epochs count from 0."""

    epoch: int
    start: int
    stop: int

    def to_proto(self, lease: int = 0) -> job_pb2.DataRange:
        """The message that carries this range, leased under a number or not at all."""
        return job_pb2.DataRange(lease=lease, epoch=self.epoch, start=self.start, stop=self.stop)

    @classmethod
    def from_proto(cls, message: job_pb2.DataRange) -> "DataRange":
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


class NoRange(enum.Enum):
    """Why a worker gets no range."""

    WAIT = "others hold the rest, which may come back"
    FINISHED = "all is done"


class Ledger:
    """The ranges of one job.

    Args:
        examples: in one epoch. 0: the job has no data; nothing is leased, and workers stop by their steps.
        epochs: passes.
        range_size: examples a lease; the last one of an epoch may be shorter.
        changed: told that the record is another one now.
    """

    def __init__(self, examples: int, epochs: int, range_size: int, changed: Callable[[], None] = lambda: None) -> None:
        self.examples, self.epochs = examples, epochs
        self._changed = changed
        self._range_size = range_size
        self._next = DataRange(0, 0, min(range_size, examples))  # the first one that was never leased
        self._returned: list[DataRange] = []  # a heap, the earliest on top
        self._held: dict[str, Lease] = {}  # by worker: each holds one at a time
        self._leases = 0
        self._epoch = 0  # all epochs before this one are done
        self._done: dict[int, int] = {}  # examples, by epoch, of this one and those after it

    @property
    def finished(self) -> bool:
        """Whether every example of every epoch is done; never so without data."""
        return bool(self.examples) and self._untouched == 0 and not self._returned and not self._held

    @property
    def epoch(self) -> int:
        """The first epoch that is not all done; the last one when they all are."""
        return min(self._epoch, self.epochs - 1)

    @property
    def samples(self) -> int:
        """Examples in all epochs; 0: the job has no data."""
        return self.examples * self.epochs

    def lease(self, worker: str) -> Lease | NoRange:
        """Gives a worker the next range.

        A worker holds one range at a time. So one that asks again, having missed the answer, gets the same.
        """
        if worker in self._held:
            return self._held[worker]
        if self._returned:
            following = heapq.heappop(self._returned)
        elif self._untouched and self.examples:
            following, self._next = self._next, self._after(self._next)
        else:
            return NoRange.WAIT if self._held or not self.examples else NoRange.FINISHED
        self._leases += 1
        self._held[worker] = Lease(self._leases, following)
        self._changed()
        return self._held[worker]

    def complete(self, worker: str, number: int) -> bool:
        """Marks what a worker leased as done; False if it does not hold that lease (any more): nothing changes."""
        held = self._held.get(worker)
        if held is None or held.number != number:
            return False
        del self._held[worker]
        done = held.range
        self._done[done.epoch] = self._done.get(done.epoch, 0) + done.stop - done.start
        while self._done.get(self._epoch) == self.examples:
            del self._done[self._epoch]
            self._epoch += 1
        self._changed()
        return True

    def take_back(self, worker: str) -> DataRange | None:
        """Takes what a worker holds back, for others."""
        held = self._held.pop(worker, None)
        if held is None:
            return None
        heapq.heappush(self._returned, held.range)
        self._changed()
        return held.range

    def to_proto(self) -> state_pb2.LedgerRecord:
        """The record of this ledger."""
        return state_pb2.LedgerRecord(
            examples=self.examples,
            epochs=self.epochs,
            range_size=self._range_size,
            next=self._next.to_proto(),
            returned=[part.to_proto() for part in sorted(self._returned)],
            held={worker: lease.to_proto() for worker, lease in self._held.items()},
            leases=self._leases,
            epoch=self._epoch,
            done=self._done,
        )

    @classmethod
    def from_proto(cls, record: state_pb2.LedgerRecord, changed: Callable[[], None] = lambda: None) -> "Ledger":
        """The ledger that a record is of."""
        ledger = cls(record.examples, record.epochs, record.range_size, changed)
        ledger._next = DataRange.from_proto(record.next)
        ledger._returned = [DataRange.from_proto(part) for part in record.returned]  # sorted, and so a heap
        ledger._held = {worker: Lease(part.lease, DataRange.from_proto(part)) for worker, part in record.held.items()}
        ledger._leases, ledger._epoch = record.leases, record.epoch
        ledger._done = dict(record.done)
        return ledger

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        held = [lease.range for lease in self._held.values()]
        assert self._range_size > 0
        assert len({lease.number for lease in self._held.values()}) == len(held), "a lease in two hands"
        loose = sorted(held + self._returned)
        assert all(a.epoch < b.epoch or a.stop <= b.start for a, b in itertools.pairwise(loose)), "overlap"
        pending = sum(part.stop - part.start for part in loose)
        done = self._epoch * self.examples + sum(self._done.values())
        assert done + pending + self._untouched == self.samples, "examples were lost or counted twice"
        assert all(self._epoch <= epoch and 0 < count <= self.examples for epoch, count in self._done.items())
        assert self.finished == (bool(self.examples) and done == self.samples)

    @property
    def _untouched(self) -> int:
        """Examples that were never leased."""
        return (self.epochs - self._next.epoch) * self.examples - self._next.start

    def _after(self, part: DataRange) -> DataRange:
        epoch, start = (part.epoch, part.stop) if part.stop < self.examples else (part.epoch + 1, 0)
        return DataRange(epoch, start, min(start + self._range_size, self.examples))


def default_range_size(examples: int, workers: int, batch_size: int) -> int:
    """Examples a lease: whole batches, at least one, and small enough that workers end an epoch close together."""
    return max(1, examples // (_RANGES_A_WORKER * workers * batch_size)) * batch_size
