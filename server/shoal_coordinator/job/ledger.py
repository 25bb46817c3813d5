"""Which of a job's samples are trained on, by whom, and which still wait. Pure: no clock, no I/O.

The samples of every epoch are cut into ranges, numbered through all epochs from 0. A range is unleased, requeued, leased
or done; the lease of a worker that dies or leaves is taken back, and what it had not trained on goes out before what is
unleased. So every example is visited at least once an epoch, and exactly once when nobody fails.

Rank r prefers the ranges whose number is r modulo the number of workers. Those that it passes over on its way lie requeued
for the ranks that they are for. So workers that go in step, as synchronous ones do, each get the same ranges whoever
asks first, and the same again after a restore; and one that lags holds nobody up, since others take its share.
"""

import itertools
from bisect import insort
from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from shoal._wire import Cursor, DataRange, Lease, NoRange
from shoal.job import Job
from shoal.status import DataAccount, DataCount, HeldRange
from shoal.v1 import state_pb2

# With this many ranges a worker and epoch, the fastest worker waits for the slowest for about an eighth of an epoch.
_RANGES_A_WORKER = 8
# A rank has at most so many ranges, the one that it holds and those that others have passed over for it.
_MOST_A_RANK = 2
# Epochs that an account shows one by one; only a worker that is far behind the others makes for more.
_MOST_EPOCHS = 1_000


@dataclass(frozen=True, slots=True)
class _RequeuedRange:
    """A range that waits."""

    range: DataRange
    owner: int | None = None  # the rank that it is for; None: whoever comes first

    def to_proto(self) -> state_pb2.RequeuedRange:
        part = self.range
        return state_pb2.RequeuedRange(epoch=part.epoch, start=part.start, stop=part.stop, owner=self.owner)

    @classmethod
    def from_proto(cls, message: state_pb2.RequeuedRange) -> "_RequeuedRange":
        return cls(DataRange.from_proto(message), message.owner if message.HasField("owner") else None)


class Ledger:
    """The ranges of one job.

    Args:
        samples_per_epoch: how many. 0: the job has no data; nothing is leased, and workers stop by their steps.
        epochs: passes.
        range_size: samples a lease; the last one of an epoch may be shorter.
        changed: told that the record is another one now.
    """

    def __init__(
        self, samples_per_epoch: int, epochs: int, range_size: int, changed: Callable[[], None] = lambda: None
    ) -> None:
        self.samples_per_epoch, self.epochs = samples_per_epoch, epochs
        self._changed = changed
        self._range_size = range_size
        self._next = 0  # number of the first range that was neither leased nor passed over
        self._requeued: list[_RequeuedRange] = []  # in order of their ranges
        self._held: dict[str, Lease] = {}  # by worker: each holds one at a time
        self._ranks: dict[str, int] = {}  # of those that hold one
        self._leases = 0
        self._epoch = 0  # all epochs before this one are done
        self._done: dict[int, int] = {}  # samples, by epoch, of this one and those after it
        # Those that were told to wait though something is requeued. Not in the record: at worst, one waits once more.
        self._patient: set[str] = set()

    @property
    def finished(self) -> bool:
        """Whether every example of every epoch is done; never so without data."""
        return bool(self.samples_per_epoch) and self._unleased == 0 and not self._requeued and not self._held

    @property
    def epoch(self) -> int:
        """The first epoch that is not all done; the last one when they all are."""
        return min(self._epoch, self.epochs - 1)

    @property
    def samples(self) -> int:
        """Examples in all epochs; 0: the job has no data."""
        return self.samples_per_epoch * self.epochs

    def held_by(self, worker: str) -> Lease | None:
        """What a worker holds."""
        return self._held.get(worker)

    def lease(self, worker: str, rank: int, workers: int) -> Lease | NoRange:
        """Gives a worker its next range.

        A worker holds one range at a time. So one that asks again, having missed the answer, gets the same.

        Args:
            worker: who asks.
            rank: its rank.
            workers: how many there are now, >= 1.
        """
        if worker in self._held:
            return self._held[worker]
        following = self._take_next(worker, rank, workers)
        if following is None:
            return NoRange.FINISHED if self.finished else NoRange.WAIT
        self._leases += 1
        self._held[worker], self._ranks[worker] = Lease(self._leases, following), rank
        self._patient.discard(worker)
        self._changed()
        return self._held[worker]

    def complete(self, worker: str, number: int) -> bool:
        """Marks what a worker leased as done; False if it does not hold that lease (any more): nothing changes."""
        held = self._held.get(worker)
        if held is None or held.number != number:
            return False
        self._release(worker)
        self._count(held.range, held.range.samples)
        self._changed()
        return True

    def take_back(self, worker: str, consumed: int = 0) -> DataRange | None:
        """Takes what a worker holds back, for whoever comes first.

        Args:
            worker: who holds it.
            consumed: samples of it, the first ones, that are done.

        Returns:
            What is left of it; None: nothing.
        """
        self._patient.discard(worker)
        held = self._held.get(worker)
        if held is None:
            return None
        self._release(worker)
        left = self._split(held.range, consumed, None)
        self._changed()
        return left

    def settled(self, cursors: Mapping[str, Cursor], ranks: Mapping[str, int]) -> state_pb2.LedgerRecord:
        """This ledger as it should be after a restore of a checkpoint; it does not change itself.

        Nobody holds anything then. What is left of a lease is requeued, for the rank that held it.

        Args:
            cursors: by worker, how far the checkpoint has it in its data.
            ranks: by worker, of those that are in the job.
        """
        copy = Ledger.from_proto(self.to_proto())
        for worker, held in self._held.items():
            cursor = cursors.get(worker)
            consumed = cursor.consumed if cursor and cursor.lease == held.number else 0
            copy._release(worker)
            copy._split(held.range, consumed, ranks.get(worker))
        return copy.to_proto()

    def account(self) -> DataAccount:
        """What is done, who holds what, and what waits."""
        leased, requeued = Counter[int](), Counter[int]()
        for lease in self._held.values():
            leased[lease.range.epoch] += lease.range.samples
        for part in self._requeued:
            requeued[part.range.epoch] += part.range.samples
        begun = sorted(self._done.keys() | leased.keys() | requeued.keys())
        in_progress = {}
        for epoch in begun[:_MOST_EPOCHS]:
            parts = self._done.get(epoch, 0), leased[epoch], requeued[epoch]
            in_progress[epoch] = DataCount(*parts, self.samples_per_epoch - sum(parts))
        return DataAccount(
            samples=self.samples_per_epoch,
            epochs=self.epochs,
            epoch=self.epoch,
            total=DataCount(self._done_in_all, leased.total(), requeued.total(), self._unleased),
            in_progress=in_progress,
            held=tuple(
                HeldRange(worker, self._ranks.get(worker, 0), lease.range.epoch, lease.range.start, lease.range.stop)
                for worker, lease in sorted(self._held.items(), key=lambda item: item[1].range)
            ),
        )

    def to_proto(self) -> state_pb2.LedgerRecord:
        """The record of this ledger."""
        return state_pb2.LedgerRecord(
            samples=self.samples_per_epoch,
            epochs=self.epochs,
            range_size=self._range_size,
            next=self._range(self._next).to_proto(),
            loose=[part.to_proto() for part in self._requeued],
            held={worker: lease.to_proto() for worker, lease in self._held.items()},
            leases=self._leases,
            epoch=self._epoch,
            done=self._done,
            ranks=self._ranks,
        )

    @classmethod
    def from_proto(cls, record: state_pb2.LedgerRecord, changed: Callable[[], None] = lambda: None) -> "Ledger":
        """The ledger that a record is of."""
        ledger = cls(record.samples, record.epochs, record.range_size, changed)
        ledger._next = record.next.epoch * ledger._ranges + record.next.start // max(1, record.range_size)
        ledger._requeued = [_RequeuedRange.from_proto(part) for part in record.loose]
        ledger._held = {worker: Lease(part.lease, DataRange.from_proto(part)) for worker, part in record.held.items()}
        ledger._ranks = {worker: record.ranks.get(worker, 0) for worker in record.held}
        ledger._leases, ledger._epoch = record.leases, record.epoch
        ledger._done = dict(record.done)
        return ledger

    @classmethod
    def of(cls, spec: Job, samples_per_epoch: int, changed: Callable[[], None] = lambda: None) -> "Ledger":
        """The ledger of a job of which nothing is done, and whose data set has so many samples."""
        size = spec.range_size or default_range_size(samples_per_epoch, spec.workers, spec.batch_size)
        return cls(samples_per_epoch, spec.epochs, size, changed)

    @classmethod
    def resumed(
        cls, record: state_pb2.LedgerRecord, *, epochs: int, workers: int, changed: Callable[[], None] = lambda: None
    ) -> "Ledger":
        """A ledger that goes on from a record of `settled`.

        Args:
            record: where to go on.
            epochs: passes in all; fewer than are done: it is finished.
            workers: how many there will be; what is for a rank that there is no more is anybody's.
            changed: told that the record is another one now.
        """
        ledger = cls.from_proto(record, changed)
        ledger.epochs = epochs
        ledger._next = min(ledger._next, epochs * ledger._ranges)
        ledger._requeued = [
            part if part.owner is None or part.owner < workers else _RequeuedRange(part.range)
            for part in ledger._requeued
            if part.range.epoch < epochs
        ]
        ledger._epoch = min(ledger._epoch, epochs)
        ledger._done = {epoch: count for epoch, count in ledger._done.items() if epoch < epochs}
        return ledger

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        held = [lease.range for lease in self._held.values()]
        requeued = [part.range for part in self._requeued]
        assert self._range_size > 0
        assert self._ranks.keys() == self._held.keys(), "a rank without a lease, or a lease without a rank"
        assert len({lease.number for lease in self._held.values()}) == len(held), "a lease in two hands"
        assert requeued == sorted(requeued)
        assert all(part.samples > 0 for part in held + requeued), "an empty range"
        assert all(a.epoch < b.epoch or a.stop <= b.start for a, b in itertools.pairwise(sorted(held + requeued)))
        assert all(part < self._range(self._next) for part in held + requeued), "overlap"
        pending = sum(part.samples for part in held + requeued)
        assert self._done_in_all + pending + self._unleased == self.samples, "samples were lost or counted twice"
        assert all(self._epoch <= epoch and 0 < count <= self.samples_per_epoch for epoch, count in self._done.items())
        assert self.finished == (bool(self.samples_per_epoch) and self._done_in_all == self.samples)

    # Which range is next.

    def _take_next(self, worker: str, rank: int, workers: int) -> DataRange | None:
        """What a worker is to have, which then is neither requeued nor unleased any more; None: nothing for now."""
        if mine := self._take_requeued(lambda owner: owner == rank):
            return mine
        if nobodys := self._take_requeued(lambda owner: owner is None or owner >= workers):
            return nobodys
        if rank < workers:
            number = self._next + (rank - self._next) % workers
            if number < self._end:
                passed = range(self._next, number)
                if not passed or self._have_room({other % workers for other in passed}):
                    for other in passed:
                        insort(
                            self._requeued,
                            _RequeuedRange(self._range(other), other % workers),
                            key=lambda part: part.range,
                        )
                    self._next = number + 1
                    return self._range(number)
            elif worker not in self._patient:
                # Nothing more is for this rank. What is left is for others, which may be about to ask for it, as those
                # are that go in step with this one. It may have it if it asks once more before they do.
                self._patient.add(worker)
                return None
        if earliest := self._take_requeued(lambda _: True):  # before `_next`, as all that is requeued
            return earliest
        if self._next == self._end:
            return None
        self._next += 1
        return self._range(self._next - 1)

    def _take_requeued(self, suits: Callable[[int | None], bool]) -> DataRange | None:
        """The earliest loose range whose owner suits."""
        for place, part in enumerate(self._requeued):
            if suits(part.owner):
                return self._requeued.pop(place).range
        return None

    def _have_room(self, ranks: Set[int]) -> bool:
        """Whether one more range may be left for each of these. One that has too many lags: others take its share."""
        owners = (part.owner for part in self._requeued if part.owner in ranks)
        holders = (rank for rank in self._ranks.values() if rank in ranks)
        return max(Counter(itertools.chain(owners, holders)).values(), default=0) < _MOST_A_RANK

    # Small things.

    @property
    def _ranges(self) -> int:
        """How many make up an epoch."""
        return -(-self.samples_per_epoch // max(1, self._range_size))

    @property
    def _end(self) -> int:
        """The number behind the last range."""
        return self._ranges * self.epochs

    @property
    def _unleased(self) -> int:
        """Examples that were neither leased nor passed over."""
        first = self._range(self._next)
        return (self.epochs - first.epoch) * self.samples_per_epoch - first.start

    @property
    def _done_in_all(self) -> int:
        return self._epoch * self.samples_per_epoch + sum(self._done.values())

    def _range(self, number: int) -> DataRange:
        epoch, place = divmod(number, max(1, self._ranges))
        start = place * self._range_size
        return DataRange(epoch, start, min(start + self._range_size, self.samples_per_epoch))

    def _release(self, worker: str) -> None:
        del self._held[worker], self._ranks[worker]

    def _split(self, part: DataRange, consumed: int, owner: int | None) -> DataRange | None:
        """Counts a range's first samples as done; the rest, if there is one, is requeued."""
        left = part.after(consumed)
        self._count(part, part.samples - left.samples)
        if not left.samples:
            return None
        insort(self._requeued, _RequeuedRange(left, owner), key=lambda requeued: requeued.range)
        return left

    def _count(self, part: DataRange, done: int) -> None:
        if done:
            self._done[part.epoch] = self._done.get(part.epoch, 0) + done
        while self._done.get(self._epoch) == self.samples_per_epoch:
            del self._done[self._epoch]
            self._epoch += 1


def default_range_size(samples: int, workers: int, batch_size: int) -> int:
    """Examples a lease: whole batches, at least one, and small enough that workers end an epoch close together."""
    return max(1, samples // (_RANGES_A_WORKER * workers * batch_size)) * batch_size
