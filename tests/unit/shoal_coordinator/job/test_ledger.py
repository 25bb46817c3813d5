from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shoal._wire import LATEST_ORDER, DataRange, Lease, NoRange
from shoal._wire.cursor import Cursor
from shoal.status import DataCount, HeldRange
from shoal.v1.state_pb2 import LedgerRecord
from shoal_coordinator.job.ledger import Ledger, default_range_size
from support.run_lengths import draws


def ask(ledger: Ledger, worker: str, rank: int = 0, workers: int = 1) -> Lease | NoRange:
    """What a worker gets that asks again when it is told to wait for others, once."""
    answer = ledger.lease(worker, rank, workers)
    return ledger.lease(worker, rank, workers) if answer is NoRange.WAIT else answer


def leased(ledger: Ledger, worker: str, rank: int = 0, workers: int = 1) -> Lease:
    """The range that a worker gets, which gets one."""
    found = ledger.lease(worker, rank, workers)
    assert isinstance(found, Lease)
    return found


def check_drain(ledger: Ledger, worker: str = "w", rank: int = 0, workers: int = 1) -> list[DataRange]:
    """Trains on all there is; the ranges in order."""
    ranges = []
    while isinstance(lease := ask(ledger, worker, rank, workers), Lease):
        ranges.append(lease.range)
        assert ledger.complete(worker, lease.number)
        ledger.validate()
    return ranges


def test_ranges_come_in_order_and_cover_every_epoch() -> None:
    ledger = Ledger(samples_per_epoch=10, epochs=2, range_size=4)
    cuts = [(0, 4), (4, 8), (8, 10)]
    assert check_drain(ledger) == [DataRange(epoch, *cut) for epoch in (0, 1) for cut in cuts]
    assert ledger.finished
    assert ledger.lease("w", 0, 1) is NoRange.FINISHED
    assert (ledger.samples, ledger.epoch) == (20, 1)


def test_a_repeated_request_gets_the_same_range() -> None:
    ledger = Ledger(8, 1, 4)
    assert ledger.lease("w", 0, 1) == ledger.lease("w", 0, 1)


def test_a_repeated_done_counts_once() -> None:
    ledger = Ledger(8, 1, 4)
    lease = leased(ledger, "w", 0, 1)
    assert ledger.complete("w", lease.number)
    assert not ledger.complete("w", lease.number)
    ledger.validate()


def test_the_next_epoch_begins_while_others_finish_this_one() -> None:
    ledger = Ledger(8, 2, 4)
    ledger.lease("slow", 0, 2)
    ledger.complete("fast", leased(ledger, "fast", 1, 2).number)
    assert leased(ledger, "fast", 1, 2).range.epoch == 1
    assert ledger.epoch == 0


def test_each_rank_gets_the_ranges_of_its_class_in_any_order_of_requests() -> None:
    ledger = Ledger(24, 1, 4)
    assert leased(ledger, "c", 2, 3).range == DataRange(0, 8, 12)
    assert leased(ledger, "a", 0, 3).range == DataRange(0, 0, 4)
    assert leased(ledger, "b", 1, 3).range == DataRange(0, 4, 8)
    ledger.validate()


def test_one_that_lags_loses_its_share_to_others() -> None:
    ledger = Ledger(100, 1, 4)
    ledger.lease("slow", 0, 2)
    starts = [leased(ledger, "fast", 1, 2).range.start]
    for number in range(2, 5):
        ledger.complete("fast", number)
        starts.append(leased(ledger, "fast", 1, 2).range.start)
    # It passes over 8, for the slow one. That it would have to pass over 16 says that the slow one lags.
    assert starts == [4, 12, 8, 20]
    ledger.validate()


def test_a_rank_without_a_class_takes_the_earliest() -> None:
    ledger = Ledger(24, 1, 4)
    ledger.lease("b", 1, 2)
    assert leased(ledger, "z", 7, 2).range.start == 0
    assert leased(ledger, "y", 8, 2).range.start == 8


def test_a_range_of_another_rank_is_leased_at_the_second_request() -> None:
    ledger = Ledger(4, 1, 4)
    assert ledger.lease("b", 1, 2) is NoRange.WAIT
    assert isinstance(ledger.lease("b", 1, 2), Lease)


def test_a_requeued_range_is_leased_first() -> None:
    ledger = Ledger(16, 2, 4)
    lost = leased(ledger, "a", 0, 2)
    assert ledger.take_back("a") == lost.range
    assert ledger.take_back("a") is None
    again = leased(ledger, "b", 1, 2)
    assert again.range == lost.range
    assert again.number != lost.number
    assert not ledger.complete("a", lost.number)


def test_only_samples_that_were_not_consumed_are_requeued() -> None:
    ledger = Ledger(16, 1, 8)
    ledger.lease("a", 0, 2)
    assert ledger.take_back("a", consumed=3) == DataRange(0, 3, 8)
    assert leased(ledger, "b", 1, 2).range == DataRange(0, 3, 8)
    assert ledger.take_back("b", consumed=8) is None
    assert ledger.account().total == DataCount(done=8, unleased=8)
    ledger.validate()


def test_one_waits_while_others_hold_the_rest() -> None:
    ledger = Ledger(4, 1, 4)
    held = leased(ledger, "a", 0, 2)
    assert ask(ledger, "b", 1, 2) is NoRange.WAIT
    ledger.complete("a", held.number)
    assert ledger.lease("b", 1, 2) is NoRange.FINISHED


def test_without_data_nothing_is_handed_out_and_nothing_finishes() -> None:
    ledger = Ledger(0, 3, 4)
    assert ask(ledger, "w") is NoRange.WAIT
    assert not ledger.finished
    assert ledger.account().total == DataCount()
    ledger.validate()


def test_many_epochs_cost_no_memory() -> None:
    ledger = Ledger(1, 2**32 - 1, 1)
    assert ledger.samples == 2**32 - 1
    assert leased(ledger, "w", 0, 1).range == DataRange(0, 0, 1)


def test_the_account_adds_up() -> None:
    ledger = Ledger(10, 2, 4)
    ledger.complete("b", leased(ledger, "b", 1, 2).number)
    ledger.lease("b", 1, 2)
    account = ledger.account()
    assert (account.samples, account.epochs, account.epoch) == (10, 2, 0)
    assert account.total == DataCount(done=4, leased=4, requeued=6, unleased=6)
    assert account.in_progress == {0: DataCount(done=4, requeued=6), 1: DataCount(leased=4, unleased=6)}
    assert account.held == (HeldRange("b", 1, 1, 0, 4),)


def check_half_done_record() -> LedgerRecord:
    """Rank 0 holds [0, 8) and has a range waiting; rank 1 holds [24, 32), having done [8, 16)."""
    ledger = Ledger(48, 1, 8)
    ledger.lease("a", 0, 2)
    ledger.complete("b", leased(ledger, "b", 1, 2).number)
    second = leased(ledger, "b", 1, 2)
    cursors = {"a": Cursor(1, 6), "b": Cursor(2, 8), "gone": Cursor(9, 1)}
    before = ledger.to_proto()
    record = ledger.settled(cursors, {"a": 0, "b": 1})
    assert ledger.to_proto() == before
    assert second.range == DataRange(0, 24, 32)
    return record


def test_a_restored_ledger_goes_on_where_the_checkpoint_is() -> None:
    ledger = Ledger.resumed(check_half_done_record(), epochs=1, workers=2)
    ledger.validate()
    assert ledger.account().total == DataCount(done=14, requeued=18, unleased=16)
    starts = {rank: leased(ledger, f"new {rank}", rank, 2).range for rank in (1, 0)}
    assert starts == {0: DataRange(0, 6, 8), 1: DataRange(0, 24, 32)}


@pytest.mark.parametrize("order", [0, 1, 2])
def test_a_ledger_keeps_its_order_for_life(order: int) -> None:
    """Also one that a later version knows: the worker refuses it, and the ledger loses nothing."""
    record = check_half_done_record()
    assert record.order == LATEST_ORDER
    record.order = order
    resumed = Ledger.resumed(record, epochs=2, workers=2)
    assert leased(resumed, "a", 0, 2).order == order
    again = Ledger.from_proto(resumed.to_proto())
    assert again.held_by("a") == resumed.held_by("a")
    assert leased(again, "b", 1, 2).order == again.settled({}, {}).order == order


def test_a_record_from_before_orders_had_versions_has_the_first() -> None:
    record = check_half_done_record()
    record.ClearField("order")
    assert LedgerRecord.FromString(record.SerializeToString()).order == 0
    assert leased(Ledger.from_proto(record), "a", 0, 2).order == 0


def test_a_restored_ledger_may_have_other_workers_and_epochs() -> None:
    alone = Ledger.resumed(check_half_done_record(), epochs=2, workers=1)
    assert [part.start for part in check_drain(alone)] == [6, 16, 24, 32, 40, 0, 8, 16, 24, 32, 40]
    three = Ledger.resumed(check_half_done_record(), epochs=1, workers=3)
    assert leased(three, "c", 2, 3).range.start == 40


def test_a_restored_ledger_with_fewer_epochs_than_are_done_is_finished() -> None:
    ledger = Ledger(8, 3, 8)
    for _ in range(2):
        ledger.complete("a", leased(ledger, "a", 0, 1).number)
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
def test_workers_in_step_get_the_same_batches_in_whatever_order_they_ask(
    ranges: int, epochs: int, workers: int, stop: int, data: st.DataObject
) -> None:
    """Ranges are of two batches. One of the two runs goes on from a checkpoint; the other does not know it."""

    def run(stop: int | None) -> list[dict[int, tuple[int, int]]]:
        trained: list[dict[int, tuple[int, int]]] = []
        ledger = Ledger(4 * ranges - 1, epochs, 4)
        held: dict[int, tuple[Lease, int]] = {}  # by rank, and how much of it is done
        while not ledger.finished:
            if len(trained) == stop:
                cursors = {f"w{rank}": Cursor(lease.number, consumed) for rank, (lease, consumed) in held.items()}
                record = ledger.settled(cursors, {f"w{rank}": rank for rank in held})
                ledger, held = Ledger.resumed(record, epochs=epochs, workers=workers), {}
            batches = {}
            for rank in data.draw(st.permutations(range(workers))):
                lease: Lease | NoRange | None
                lease, consumed = held.pop(rank, (None, 0))
                if isinstance(lease, Lease) and consumed >= lease.range.samples:
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
def test_default_range_size(samples: int, workers: int, batch: int, size: int) -> None:
    assert default_range_size(samples, workers, batch) == size


class Training(RuleBasedStateMachine):
    """Workers lease, finish, leave and die at random, and all go on from a checkpoint; what they visit is counted."""

    workers = st.sampled_from("abcd")
    counts = st.integers(1, 4)

    @initialize(samples=st.integers(1, 30), epochs=st.integers(1, 3), size=st.integers(1, 12))
    def begin(self, samples: int, epochs: int, size: int) -> None:
        self.ledger = Ledger(samples, epochs, size)
        self.held: dict[str, Lease] = {}
        self.visits: Counter[tuple[int, int]] = Counter()
        self.losses = 0

    @rule(worker=workers, workers=counts)
    def lease(self, worker: str, workers: int) -> None:
        lease = self.ledger.lease(worker, "abcd".index(worker), workers)
        if isinstance(lease, Lease):
            assert self.held.setdefault(worker, lease) == lease
        else:
            assert worker not in self.held

    @rule(worker=workers)
    def complete(self, worker: str) -> None:
        if worker in self.held:
            lease = self.held.pop(worker)
            assert self.ledger.complete(worker, lease.number)
            self.visit(lease.range)

    @rule(worker=workers, consumed=st.integers(0, 12))
    def leave(self, worker: str, consumed: int) -> None:
        lease = self.held.pop(worker, None)
        left = self.ledger.take_back(worker, consumed)
        if lease:
            self.visit_first(lease.range, consumed)
            assert (left.samples if left else 0) == max(0, lease.range.samples - consumed)

    @rule(worker=workers, trained=st.booleans())
    def die(self, worker: str, trained: bool) -> None:
        lease = self.held.pop(worker, None)
        self.ledger.take_back(worker)
        if lease:
            self.losses += 1
            if trained:  # it was through, but died before it could say so
                self.visit(lease.range)

    @rule(data=st.data(), workers=counts)
    def restore(self, data: st.DataObject, workers: int) -> None:
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
    def restart(self) -> None:
        self.ledger = Ledger.from_proto(self.ledger.to_proto())

    def visit_first(self, part: DataRange, consumed: int) -> None:
        self.visit(DataRange(part.epoch, part.start, min(part.start + consumed, part.stop)))

    def visit(self, part: DataRange) -> None:
        self.visits.update((part.epoch, sample) for sample in range(part.start, part.stop))

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.validate()
            total = self.ledger.account().total
            assert total.done + total.leased + total.requeued + total.unleased == self.ledger.samples

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for worker in list(self.held):
            self.complete(worker)
        for part in check_drain(self.ledger, workers=2):
            self.visit(part)
        assert self.ledger.finished
        every = {
            (epoch, sample) for epoch in range(self.ledger.epochs) for sample in range(self.ledger.samples_per_epoch)
        }
        assert set(self.visits) == every
        if not self.losses:
            assert set(self.visits.values()) == {1}


TestTraining = Training.TestCase
TestTraining.settings = settings(max_examples=draws(60), stateful_step_count=40)
