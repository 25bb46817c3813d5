from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shoal._wire import DataRange, Lease, NoRange
from shoal._wire.cursor import Cursor
from shoal.status import DataCount, HeldRange
from shoal_coordinator.job.ledger import Ledger, default_range_size


def ask(ledger, worker, rank=0, workers=1):
    """What a worker gets that asks again when it is told to wait for others, once."""
    answer = ledger.lease(worker, rank, workers)
    return ledger.lease(worker, rank, workers) if answer is NoRange.WAIT else answer


def drain(ledger, worker="w", rank=0, workers=1):
    """Trains on all there is; the ranges in order."""
    ranges = []
    while isinstance(lease := ask(ledger, worker, rank, workers), Lease):
        ranges.append(lease.range)
        assert ledger.complete(worker, lease.number)
        ledger.validate()
    return ranges


def test_ranges_come_in_order_and_cover_every_epoch():
    ledger = Ledger(samples_per_epoch=10, epochs=2, range_size=4)
    cuts = [(0, 4), (4, 8), (8, 10)]
    assert drain(ledger) == [DataRange(epoch, *cut) for epoch in (0, 1) for cut in cuts]
    assert ledger.finished
    assert ledger.lease("w", 0, 1) is NoRange.FINISHED
    assert (ledger.samples, ledger.epoch) == (20, 1)


def test_a_repeated_request_gets_the_same_range():
    ledger = Ledger(8, 1, 4)
    assert ledger.lease("w", 0, 1) == ledger.lease("w", 0, 1)


def test_a_repeated_done_counts_once():
    ledger = Ledger(8, 1, 4)
    lease = ledger.lease("w", 0, 1)
    assert ledger.complete("w", lease.number)
    assert not ledger.complete("w", lease.number)
    ledger.validate()


def test_the_next_epoch_begins_while_others_finish_this_one():
    ledger = Ledger(8, 2, 4)
    ledger.lease("slow", 0, 2)
    ledger.complete("fast", ledger.lease("fast", 1, 2).number)
    assert ledger.lease("fast", 1, 2).range.epoch == 1
    assert ledger.epoch == 0


def test_each_rank_gets_the_ranges_of_its_class_whoever_asks_first():
    ledger = Ledger(24, 1, 4)
    assert ledger.lease("c", 2, 3).range == DataRange(0, 8, 12)
    assert ledger.lease("a", 0, 3).range == DataRange(0, 0, 4)
    assert ledger.lease("b", 1, 3).range == DataRange(0, 4, 8)
    ledger.validate()


def test_one_that_lags_loses_its_share_to_others():
    ledger = Ledger(100, 1, 4)
    ledger.lease("slow", 0, 2)
    starts = [ledger.lease("fast", 1, 2).range.start]
    for number in range(2, 5):
        ledger.complete("fast", number)
        starts.append(ledger.lease("fast", 1, 2).range.start)
    # It passes over 8, for the slow one. That it would have to pass over 16 says that the slow one lags.
    assert starts == [4, 12, 8, 20]
    ledger.validate()


def test_a_rank_without_a_class_takes_the_earliest():
    ledger = Ledger(24, 1, 4)
    ledger.lease("b", 1, 2)
    assert ledger.lease("z", 7, 2).range.start == 0
    assert ledger.lease("y", 8, 2).range.start == 8


def test_what_is_left_in_the_end_is_for_whoever_asks_twice():
    ledger = Ledger(4, 1, 4)
    assert ledger.lease("b", 1, 2) is NoRange.WAIT
    assert isinstance(ledger.lease("b", 1, 2), Lease)


def test_what_is_taken_back_goes_out_before_anything_else():
    ledger = Ledger(16, 2, 4)
    lost = ledger.lease("a", 0, 2)
    assert ledger.take_back("a") == lost.range
    assert ledger.take_back("a") is None
    again = ledger.lease("b", 1, 2)
    assert again.range == lost.range
    assert again.number != lost.number
    assert not ledger.complete("a", lost.number)


def test_only_what_was_not_trained_on_is_taken_back():
    ledger = Ledger(16, 1, 8)
    ledger.lease("a", 0, 2)
    assert ledger.take_back("a", consumed=3) == DataRange(0, 3, 8)
    assert ledger.lease("b", 1, 2).range == DataRange(0, 3, 8)
    assert ledger.take_back("b", consumed=8) is None
    assert ledger.account().total == DataCount(done=8, unleased=8)
    ledger.validate()


def test_one_waits_while_others_hold_the_rest():
    ledger = Ledger(4, 1, 4)
    held = ledger.lease("a", 0, 2)
    assert ask(ledger, "b", 1, 2) is NoRange.WAIT
    ledger.complete("a", held.number)
    assert ledger.lease("b", 1, 2) is NoRange.FINISHED


def test_without_data_nothing_is_handed_out_and_nothing_finishes():
    ledger = Ledger(0, 3, 4)
    assert ask(ledger, "w") is NoRange.WAIT
    assert not ledger.finished
    assert ledger.account().total == DataCount()
    ledger.validate()


def test_many_epochs_cost_no_memory():
    ledger = Ledger(1, 2**32 - 1, 1)
    assert ledger.samples == 2**32 - 1
    assert ledger.lease("w", 0, 1).range == DataRange(0, 0, 1)


def test_the_account_adds_up():
    ledger = Ledger(10, 2, 4)
    ledger.complete("b", ledger.lease("b", 1, 2).number)
    ledger.lease("b", 1, 2)
    account = ledger.account()
    assert (account.samples, account.epochs, account.epoch) == (10, 2, 0)
    assert account.total == DataCount(done=4, leased=4, requeued=6, unleased=6)
    assert account.in_progress == {0: DataCount(done=4, requeued=6), 1: DataCount(leased=4, unleased=6)}
    assert account.held == (HeldRange("b", 1, 1, 0, 4),)


def settled_in_midst():
    """Rank 0 holds [0, 8) and has a range waiting; rank 1 holds [24, 32), having done [8, 16)."""
    ledger = Ledger(48, 1, 8)
    ledger.lease("a", 0, 2)
    ledger.complete("b", ledger.lease("b", 1, 2).number)
    second = ledger.lease("b", 1, 2)
    cursors = {"a": Cursor(1, 6), "b": Cursor(2, 8), "gone": Cursor(9, 1)}
    before = ledger.to_proto()
    record = ledger.settled(cursors, {"a": 0, "b": 1})
    assert ledger.to_proto() == before
    assert second.range == DataRange(0, 24, 32)
    return record


def test_a_restored_ledger_goes_on_where_the_checkpoint_is():
    ledger = Ledger.resumed(settled_in_midst(), epochs=1, workers=2)
    ledger.validate()
    assert ledger.account().total == DataCount(done=14, requeued=18, unleased=16)
    starts = {rank: ledger.lease(f"new {rank}", rank, 2).range for rank in (1, 0)}
    assert starts == {0: DataRange(0, 6, 8), 1: DataRange(0, 24, 32)}


def test_a_restored_ledger_may_have_other_workers_and_epochs():
    alone = Ledger.resumed(settled_in_midst(), epochs=2, workers=1)
    assert [part.start for part in drain(alone)] == [6, 16, 24, 32, 40, 0, 8, 16, 24, 32, 40]
    three = Ledger.resumed(settled_in_midst(), epochs=1, workers=3)
    assert three.lease("c", 2, 3).range.start == 40


def test_a_restored_ledger_with_fewer_epochs_than_are_done_is_finished():
    ledger = Ledger(8, 3, 8)
    for _ in range(2):
        ledger.complete("a", ledger.lease("a", 0, 1).number)
    ledger.lease("a", 0, 1)
    resumed = Ledger.resumed(ledger.settled({}, {"a": 0}), epochs=1, workers=1)
    resumed.validate()
    assert resumed.finished


@given(
    ranges=st.integers(1, 25),
    epochs=st.integers(1, 3),
    workers=st.integers(1, 5),
    stop=st.integers(0, 20),
    data=st.data(),
)
def test_workers_in_step_get_the_same_batches_in_whatever_order_they_ask(ranges, epochs, workers, stop, data):
    """Ranges are of two batches. One of the two runs goes on from a checkpoint; the other does not know it."""

    def run(stop):
        trained = []
        ledger = Ledger(4 * ranges - 1, epochs, 4)
        held: dict[int, tuple[Lease, int]] = {}  # by rank, and how much of it is done
        while not ledger.finished:
            if len(trained) == stop:
                cursors = {f"w{rank}": Cursor(lease.number, consumed) for rank, (lease, consumed) in held.items()}
                record = ledger.settled(cursors, {f"w{rank}": rank for rank in held})
                ledger, held = Ledger.resumed(record, epochs=epochs, workers=workers), {}
            batches = {}
            for rank in data.draw(st.permutations(range(workers))):
                lease, consumed = held.pop(rank, (None, 0))
                if lease and consumed >= lease.range.samples:
                    ledger.complete(f"w{rank}", lease.number)
                    lease = None
                if lease is None:
                    lease, consumed = ledger.lease(f"w{rank}", rank, workers), 0
                if isinstance(lease, Lease):
                    batches[rank] = lease.range.epoch, lease.range.start + consumed
                    held[rank] = lease, consumed + 2
                ledger.validate()
            trained.append(batches)
        return trained

    assert run(None) == run(stop)


@pytest.mark.parametrize(
    ("samples", "workers", "batch", "size"), [(1797, 2, 32, 96), (10, 4, 32, 32), (0, 1, 32, 32), (6400, 1, 100, 800)]
)
def test_default_range_size(samples, workers, batch, size):
    assert default_range_size(samples, workers, batch) == size


class Training(RuleBasedStateMachine):
    """Workers lease, finish, leave and die at random, and all go on from a checkpoint; what they visit is counted."""

    workers = st.sampled_from("abcd")
    counts = st.integers(1, 4)

    @initialize(samples=st.integers(1, 30), epochs=st.integers(1, 3), size=st.integers(1, 12))
    def begin(self, samples, epochs, size):
        self.ledger = Ledger(samples, epochs, size)
        self.held: dict[str, Lease] = {}
        self.visits: Counter[tuple[int, int]] = Counter()
        self.losses = 0

    @rule(worker=workers, workers=counts)
    def lease(self, worker, workers):
        lease = self.ledger.lease(worker, "abcd".index(worker), workers)
        if isinstance(lease, Lease):
            assert self.held.setdefault(worker, lease) == lease
        else:
            assert worker not in self.held

    @rule(worker=workers)
    def complete(self, worker):
        if worker in self.held:
            lease = self.held.pop(worker)
            assert self.ledger.complete(worker, lease.number)
            self.visit(lease.range)

    @rule(worker=workers, consumed=st.integers(0, 12))
    def leave(self, worker, consumed):
        lease = self.held.pop(worker, None)
        left = self.ledger.take_back(worker, consumed)
        if lease:
            self.visit_first(lease.range, consumed)
            assert (left.samples if left else 0) == max(0, lease.range.samples - consumed)

    @rule(worker=workers, trained=st.booleans())
    def die(self, worker, trained):
        lease = self.held.pop(worker, None)
        self.ledger.take_back(worker)
        if lease:
            self.losses += 1
            if trained:  # it was through, but died before it could say so
                self.visit(lease.range)

    @rule(data=st.data(), workers=counts)
    def restore(self, data, workers):
        """All that was trained on behind the checkpoint is undone with the variables: it counts no more."""
        cursors = {}
        for worker, lease in self.held.items():
            consumed = data.draw(st.integers(0, lease.range.samples))
            cursors[worker] = Cursor(lease.number, consumed)
            self.visit_first(lease.range, consumed)
        record = self.ledger.settled(cursors, {worker: "abcd".index(worker) for worker in self.held})
        self.ledger = Ledger.resumed(record, epochs=self.ledger.epochs, workers=workers)
        self.held = {}

    @rule()
    def restart(self):
        self.ledger = Ledger.from_proto(self.ledger.to_proto())

    def visit_first(self, part, consumed):
        self.visit(DataRange(part.epoch, part.start, min(part.start + consumed, part.stop)))

    def visit(self, part):
        self.visits.update((part.epoch, sample) for sample in range(part.start, part.stop))

    @invariant()
    def holds(self):
        if hasattr(self, "ledger"):
            self.ledger.validate()
            total = self.ledger.account().total
            assert total.done + total.leased + total.requeued + total.unleased == self.ledger.samples

    def teardown(self):
        if not hasattr(self, "ledger"):
            return
        for worker in list(self.held):
            self.complete(worker)
        for part in drain(self.ledger, workers=2):
            self.visit(part)
        assert self.ledger.finished
        every = {
            (epoch, sample) for epoch in range(self.ledger.epochs) for sample in range(self.ledger.samples_per_epoch)
        }
        assert set(self.visits) == every
        if not self.losses:
            assert set(self.visits.values()) == {1}


TestTraining = Training.TestCase
TestTraining.settings = settings(max_examples=60, stateful_step_count=40)
