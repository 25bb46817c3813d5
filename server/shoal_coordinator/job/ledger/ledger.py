"""The ledger of one job: the state of every range of samples, and the worker that leases it. Pure: no clock, no I/O.

The samples of every epoch are cut into ranges. The ranges are numbered, and their numbers continue from epoch to epoch.
A range is unleased, leased, requeued or done. When a worker dies or leaves, its lease is taken back, and the rest of
its range is leased again before unleased ranges. So every sample is visited at least once in each epoch, and exactly
once if no worker fails.

With n workers, rank r prefers the ranges r, r + n, r + 2n, and so on. A range that it skips is requeued for the rank
that prefers this range. If workers run at the same speed, as in synchronous training, each rank therefore gets exactly
the ranges that it prefers, whatever the order of the requests. This is also true after a restore.

A slow worker delays no other worker, because at most two ranges are kept for a rank: those that are reserved for it,
and the one that it holds. Suppose that a worker would have to skip a range, and that two ranges are already kept for
the rank that prefers it. The worker then skips nothing. It takes the earliest requeued range, whichever rank that one
is reserved for.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set

from shoal._wire import LATEST_ORDER, Cursor, DataRange, Lease, NoRange
from shoal.job import Job
from shoal.status import DataAccount, DataCount, HeldRange
from shoal.v1 import state_pb2
from shoal_coordinator.job.ledger.requeued_ranges import RequeuedRange, RequeuedRanges
from shoal_coordinator.messages import JobRecordKind, record_keys

# With this many ranges for each worker and epoch, the fastest worker waits about an eighth of an epoch for the slowest.
_RANGES_PER_WORKER = 8
# Maximum number of ranges kept for a rank: the one that it holds, and those that are reserved for it.
_MAX_PER_RANK = 2
# Maximum number of epochs that an account shows one by one; a worker far behind the others causes more.
_MAX_EPOCHS = 1_000


class Ledger:
    """The ranges of one job.

    Args:
        samples_per_epoch: number of samples. 0 means no data: nothing is leased, and workers stop by their steps.
        epochs: number of passes over the data.
        range_size: samples per lease; the last range of an epoch may be shorter.
        changed: called with the name of a record that has changed.

    Attributes:
        order: version of the order that the ranges refer to. It stays the same for the life of the ledger, because
            the ranges would mean other samples in another order.
    """

    def __init__(
        self, samples_per_epoch: int, epochs: int, range_size: int, changed: Callable[[str], None] = lambda _: None
    ) -> None:
        self.samples_per_epoch, self.epochs = samples_per_epoch, epochs
        self.order = LATEST_ORDER
        self._changed = changed
        self._range_size = range_size
        self._next = 0  # number of the first unleased range
        self._requeued = RequeuedRanges(changed)
        self._held: dict[str, Lease] = {}  # by worker; each holds one at a time
        self._ranks: dict[str, int] = {}  # of the workers that hold a lease
        self._leases = 0
        self._epoch = 0  # all epochs before this one are done
        self._done: dict[int, int] = {}  # samples done, by epoch, from `_epoch` on
        # Workers told to wait although a range is requeued. Not stored: after a restore, one may wait once more.
        self._told_to_wait: set[str] = set()

    @property
    def finished(self) -> bool:
        """Whether all samples of all epochs are done; always False without data."""
        return bool(self.samples_per_epoch) and self._unleased == 0 and not self._requeued and not self._held

    @property
    def epoch(self) -> int:
        """The first epoch that is not complete; the last epoch if all are."""
        return min(self._epoch, self.epochs - 1)

    @property
    def samples(self) -> int:
        """Samples in all epochs; 0 if the job has no data."""
        return self.samples_per_epoch * self.epochs

    def held_by(self, worker: str) -> Lease | None:
        """Returns the lease that a worker holds."""
        return self._held.get(worker)

    def lease(self, worker: str, rank: int, workers: int) -> Lease | NoRange:
        """Leases the next range to a worker.

        A worker holds one range at a time. If it repeats the request after a lost reply, it gets the same lease.

        Args:
            worker: id of the worker.
            rank: its rank.
            workers: number of workers now, >= 1.

        Returns:
            The lease, or whether to wait or finish.
        """
        if worker in self._held:
            return self._held[worker]
        following = self._take_next(worker, rank, workers)
        if following is None:
            return NoRange.FINISHED if self.finished else NoRange.WAIT
        self._leases += 1
        self._held[worker], self._ranks[worker] = Lease(self._leases, following, self.order), rank
        self._told_to_wait.discard(worker)
        self._lease_changed(worker)
        return self._held[worker]

    def complete(self, worker: str, number: int) -> bool:
        """Marks a worker's range as done; returns False, and changes nothing, if the worker has no such lease."""
        held = self._held.get(worker)
        if held is None or held.number != number:
            return False
        self._release(worker)
        self._count(held.range, held.range.samples)
        return True

    def take_back(self, worker: str, consumed: int = 0, preferred_rank: int | None = None) -> DataRange | None:
        """Takes back a worker's lease, and requeues the rest of the range.

        Args:
            worker: id of the worker.
            consumed: number of samples, from the start of the range, that are done.
            preferred_rank: the rank for which the rest is reserved; None means any rank. A worker that has finished
                passes its own, so that a job that continues from this one gives each rank the samples that it would
                have had.

        Returns:
            The rest of the range; None if nothing is left.
        """
        self._told_to_wait.discard(worker)
        held = self._held.get(worker)
        if held is None:
            return None
        self._release(worker)
        return self._split(held.range, consumed, preferred_rank)

    def settled(self, cursors: Mapping[str, Cursor], ranks: Mapping[str, int]) -> state_pb2.LedgerRecord:
        """Returns a copy of this ledger as a checkpoint stores it. This ledger does not change.

        No worker holds a lease in it. The rest of each leased range is requeued for the rank that held it.

        Args:
            cursors: by worker, its position in its data at the cut.
            ranks: by worker, for the workers in the job.
        """
        copy = Ledger.from_proto(self.to_proto())
        for worker, held in self._held.items():
            cursor = cursors.get(worker)
            consumed = cursor.consumed if cursor and cursor.lease == held.number else 0
            copy._release(worker)
            copy._split(held.range, consumed, ranks.get(worker))
        return copy.to_proto()

    def account(self) -> DataAccount:
        """Returns what is done, what waits, and which worker holds what."""
        leased, requeued = Counter[int](), Counter[int]()
        for lease in self._held.values():
            leased[lease.range.epoch] += lease.range.samples
        for part in self._requeued:
            requeued[part.range.epoch] += part.range.samples
        begun = sorted(self._done.keys() | leased.keys() | requeued.keys())
        in_progress = {}
        for epoch in begun[:_MAX_EPOCHS]:
            parts = self._done.get(epoch, 0), leased[epoch], requeued[epoch]
            in_progress[epoch] = DataCount(*parts, self.samples_per_epoch - sum(parts))
        return DataAccount(
            samples=self.samples_per_epoch,
            epochs=self.epochs,
            epoch=self.epoch,
            total=DataCount(self._done_total, leased.total(), requeued.total(), self._unleased),
            in_progress=in_progress,
            held=tuple(
                HeldRange(worker, self._ranks.get(worker, 0), lease.range.epoch, lease.range.start, lease.range.stop)
                for worker, lease in sorted(self._held.items(), key=lambda item: item[1].range)
            ),
        )

    def to_proto(self) -> state_pb2.LedgerRecord:
        """Returns the whole ledger, as checkpoints store it."""
        whole = self.to_record()
        whole.requeued.extend(part.to_proto() for part in self._requeued)
        for worker, lease in self._held.items():
            whole.held[worker].CopyFrom(lease.to_proto())
        whole.ranks.update(self._ranks)
        return whole

    # The stored records. With a thousand workers, the whole ledger would be too large to write with each lease.

    @property
    def part_names(self) -> Iterator[str]:
        """The names of the records of leased and requeued ranges. The record `JobRecordKind.LEDGER` has the rest."""
        yield from map(record_keys.of_lease, self._held)
        yield from self._requeued.record_names

    def to_record(self) -> state_pb2.LedgerRecord:
        """Returns the ledger without its leased and requeued ranges."""
        return state_pb2.LedgerRecord(
            samples=self.samples_per_epoch,
            epochs=self.epochs,
            range_size=self._range_size,
            next=self._range(self._next).to_proto(),
            leases=self._leases,
            epoch=self._epoch,
            done=self._done,
            order=self.order,
        )

    def lease_record(self, worker: str) -> state_pb2.LeaseRecord | None:
        """Returns the record of the lease that a worker holds; None if it holds none."""
        held = self._held.get(worker)
        return state_pb2.LeaseRecord(range=held.to_proto(), rank=self._ranks[worker]) if held else None

    def requeued_record(self, epoch: int, start: int) -> state_pb2.RequeuedRange | None:
        """Returns the record of the requeued range that begins with this sample; None if there is none."""
        return self._requeued.record(epoch, start)

    @classmethod
    def from_proto(cls, record: state_pb2.LedgerRecord, changed: Callable[[str], None] = lambda _: None) -> "Ledger":
        """Returns the ledger in a message with the whole of it."""
        ledger = cls(record.samples, record.epochs, record.range_size, changed)
        ledger.order = record.order
        ledger._next = record.next.epoch * ledger._ranges + record.next.start // max(1, record.range_size)
        ledger._requeued = RequeuedRanges(changed, map(RequeuedRange.from_proto, record.requeued))
        ledger._held = {worker: Lease.from_proto(part, record.order) for worker, part in record.held.items()}
        ledger._ranks = {worker: record.ranks.get(worker, 0) for worker in record.held}
        ledger._leases, ledger._epoch = record.leases, record.epoch
        ledger._done = dict(record.done)
        return ledger

    @classmethod
    def of(cls, spec: Job, samples_per_epoch: int, changed: Callable[[str], None] = lambda _: None) -> "Ledger":
        """Returns the ledger of a new job, given the number of samples in an epoch.

        Args:
            spec: the job.
            samples_per_epoch: samples in its data set.
            changed: called with the name of a record that has changed.

        Returns:
            A ledger in which nothing is done.
        """
        size = spec.range_size or default_range_size(samples_per_epoch, spec.workers, spec.batch_size)
        return cls(samples_per_epoch, spec.epochs, size, changed)

    @classmethod
    def resumed(
        cls,
        record: state_pb2.LedgerRecord,
        *,
        epochs: int,
        workers: int,
        changed: Callable[[str], None] = lambda _: None,
    ) -> "Ledger":
        """Returns a ledger that continues from a record made by `settled`.

        Args:
            record: where to continue.
            epochs: passes in all. If fewer than are done, the ledger is finished.
            workers: number of workers. Ranges reserved for a rank that no longer exists go to any rank.
            changed: called with the name of a record that has changed.

        Returns:
            The ledger.
        """
        ledger = cls.from_proto(record, changed)
        left = [part for part in ledger._requeued if part.range.epoch < epochs]
        ledger._requeued = RequeuedRanges(changed, (part.within(workers) for part in left))
        ledger.epochs = epochs
        ledger._next = min(ledger._next, epochs * ledger._ranges)
        ledger._epoch = min(ledger._epoch, epochs)
        ledger._done = {epoch: count for epoch, count in ledger._done.items() if epoch < epochs}
        return ledger

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        held = [lease.range for lease in self._held.values()]
        requeued = [part.range for part in self._requeued]
        assert self._range_size > 0
        assert self._ranks.keys() == self._held.keys(), "a rank without a lease, or a lease without a rank"
        assert len({lease.number for lease in self._held.values()}) == len(held), "two workers share a lease"
        assert requeued == sorted(requeued)
        assert all(part.samples > 0 for part in held + requeued), "an empty range"
        assert all(a.epoch < b.epoch or a.stop <= b.start for a, b in itertools.pairwise(sorted(held + requeued)))
        assert all(part < self._range(self._next) for part in held + requeued), "overlap"
        pending = sum(part.samples for part in held + requeued)
        assert self._done_total + pending + self._unleased == self.samples, "samples were lost or counted twice"
        assert all(self._epoch <= epoch and 0 < count <= self.samples_per_epoch for epoch, count in self._done.items())
        assert self.finished == (bool(self.samples_per_epoch) and self._done_total == self.samples)

    # Which range is next.

    def _take_next(self, worker: str, rank: int, workers: int) -> DataRange | None:
        """Returns a worker's next range, no longer requeued or unleased; None if there is none now."""
        if mine := self._requeued.take(lambda preferred: preferred == rank):
            return mine
        if nobodys := self._requeued.take(lambda preferred: preferred is None or preferred >= workers):
            return nobodys
        if rank < workers:
            number = self._next + (rank - self._next) % workers
            if number < self._end:
                passed = range(self._next, number)
                if not passed or self._have_room({other % workers for other in passed}):
                    for other in passed:
                        self._requeued.add(self._range(other), other % workers)
                    self._next = number + 1
                    return self._range(number)
            elif worker not in self._told_to_wait:
                # No unleased range is left for this rank. The rest is reserved for others, which may be about to ask
                # if they run in step with this worker. If this worker asks again before they do, it gets a range.
                self._told_to_wait.add(worker)
                return None
        if earliest := self._requeued.take(lambda _: True):  # before `_next`, like all requeued ranges
            return earliest
        if self._next == self._end:
            return None
        self._next += 1
        return self._range(self._next - 1)

    def _have_room(self, ranks: Set[int]) -> bool:
        """Returns whether one more range can be reserved for each of these ranks."""
        preferred = (part.preferred_rank for part in self._requeued if part.preferred_rank in ranks)
        holders = (rank for rank in self._ranks.values() if rank in ranks)
        return max(Counter(itertools.chain(preferred, holders)).values(), default=0) < _MAX_PER_RANK

    # Helpers.

    @property
    def _ranges(self) -> int:
        """The number of ranges in an epoch."""
        return -(-self.samples_per_epoch // max(1, self._range_size))

    @property
    def _end(self) -> int:
        """The number after the last range."""
        return self._ranges * self.epochs

    @property
    def _unleased(self) -> int:
        """The number of unleased samples."""
        first = self._range(self._next)
        return (self.epochs - first.epoch) * self.samples_per_epoch - first.start

    @property
    def _done_total(self) -> int:
        return self._epoch * self.samples_per_epoch + sum(self._done.values())

    def _range(self, number: int) -> DataRange:
        epoch, place = divmod(number, max(1, self._ranges))
        start = place * self._range_size
        return DataRange(epoch, start, min(start + self._range_size, self.samples_per_epoch))

    def _release(self, worker: str) -> None:
        del self._held[worker], self._ranks[worker]
        self._lease_changed(worker)

    def _lease_changed(self, worker: str) -> None:
        self._changed(record_keys.of_lease(worker))
        self._changed(JobRecordKind.LEDGER)

    def _split(self, part: DataRange, consumed: int, preferred_rank: int | None) -> DataRange | None:
        """Counts the first samples of a range as done, and requeues and returns the rest, if any."""
        left = part.after(consumed)
        self._count(part, part.samples - left.samples)
        if not left.samples:
            return None
        self._requeued.add(left, preferred_rank)
        return left

    def _count(self, part: DataRange, done: int) -> None:
        if done:
            self._done[part.epoch] = self._done.get(part.epoch, 0) + done
        while self._done.get(self._epoch) == self.samples_per_epoch:
            del self._done[self._epoch]
            self._epoch += 1


def default_range_size(samples: int, workers: int, batch_size: int) -> int:
    """Returns the default number of samples per lease, small enough that workers end an epoch at about the same time.

    Args:
        samples: samples in one epoch.
        workers: number of workers.
        batch_size: samples in one batch.

    Returns:
        The number of samples: whole batches, at least one.
    """
    return max(1, samples // (_RANGES_PER_WORKER * workers * batch_size)) * batch_size
