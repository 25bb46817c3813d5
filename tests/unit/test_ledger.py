from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shoal_coordinator.ledger import DataRange, Lease, Ledger, NoRange, default_range_size


def drain(ledger, worker="w"):
    """Trains on all there is; the ranges in order."""
    ranges = []
    while isinstance(lease := ledger.lease(worker), Lease):
        ranges.append(lease.range)
        assert ledger.complete(worker, lease.number)
        ledger.validate()
    return ranges


def test_ranges_come_in_order_and_cover_every_epoch():
    ledger = Ledger(examples=10, epochs=2, range_size=4)
    cuts = [(0, 4), (4, 8), (8, 10)]
    assert drain(ledger) == [DataRange(epoch, *cut) for epoch in (0, 1) for cut in cuts]
    assert ledger.finished
    assert ledger.lease("w") is NoRange.FINISHED
    assert (ledger.samples, ledger.epoch) == (20, 1)


def test_a_repeated_request_gets_the_same_range():
    ledger = Ledger(8, 1, 4)
    assert ledger.lease("w") == ledger.lease("w")


def test_a_repeated_done_counts_once():
    ledger = Ledger(8, 1, 4)
    lease = ledger.lease("w")
    assert ledger.complete("w", lease.number)
    assert not ledger.complete("w", lease.number)
    ledger.validate()


def test_the_next_epoch_begins_while_others_finish_this_one():
    ledger = Ledger(8, 2, 4)
    ledger.lease("slow")
    ledger.complete("fast", ledger.lease("fast").number)
    assert ledger.lease("fast").range.epoch == 1
    assert ledger.epoch == 0


def test_what_is_taken_back_goes_out_before_anything_else():
    ledger = Ledger(8, 2, 4)
    lost = ledger.lease("a")
    assert ledger.take_back("a") == lost.range
    assert ledger.take_back("a") is None
    again = ledger.lease("b")
    assert again.range == lost.range
    assert again.number != lost.number
    assert not ledger.complete("a", lost.number)


def test_one_waits_while_others_hold_the_rest():
    ledger = Ledger(4, 1, 4)
    held = ledger.lease("a")
    assert ledger.lease("b") is NoRange.WAIT
    ledger.complete("a", held.number)
    assert ledger.lease("b") is NoRange.FINISHED


def test_without_data_nothing_is_handed_out_and_nothing_finishes():
    ledger = Ledger(0, 3, 4)
    assert ledger.lease("w") is NoRange.WAIT
    assert not ledger.finished
    ledger.validate()


def test_many_epochs_cost_no_memory():
    ledger = Ledger(1, 2**32 - 1, 1)
    assert ledger.samples == 2**32 - 1
    assert ledger.lease("w").range == DataRange(0, 0, 1)


@pytest.mark.parametrize(
    ("examples", "workers", "batch", "size"), [(1797, 2, 32, 96), (10, 4, 32, 32), (0, 1, 32, 32), (6400, 1, 100, 800)]
)
def test_default_range_size(examples, workers, batch, size):
    assert default_range_size(examples, workers, batch) == size


class Training(RuleBasedStateMachine):
    """Workers lease, finish and die at random; what they visit is counted."""

    workers = st.sampled_from("abcd")

    @initialize(examples=st.integers(1, 30), epochs=st.integers(1, 3), size=st.integers(1, 12))
    def begin(self, examples, epochs, size):
        self.ledger = Ledger(examples, epochs, size)
        self.held: dict[str, Lease] = {}
        self.visits: Counter[tuple[int, int]] = Counter()
        self.deaths = 0

    @rule(worker=workers)
    def lease(self, worker):
        lease = self.ledger.lease(worker)
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

    @rule(worker=workers, trained=st.booleans())
    def die(self, worker, trained):
        lease = self.held.pop(worker, None)
        self.ledger.take_back(worker)
        if lease:
            self.deaths += 1
            if trained:  # it was through, but died before it could say so
                self.visit(lease.range)

    def visit(self, part):
        self.visits.update((part.epoch, example) for example in range(part.start, part.stop))

    @invariant()
    def holds(self):
        if hasattr(self, "ledger"):
            self.ledger.validate()

    def teardown(self):
        if not hasattr(self, "ledger"):
            return
        for worker in list(self.held):
            self.complete(worker)
        for part in drain(self.ledger):
            self.visit(part)
        assert self.ledger.finished
        every = {(epoch, example) for epoch in range(self.ledger.epochs) for example in range(self.ledger.examples)}
        assert set(self.visits) == every
        if not self.deaths:
            assert set(self.visits.values()) == {1}


TestTraining = Training.TestCase
TestTraining.settings = settings(max_examples=60, stateful_step_count=40)
