"""Batches of leased ranges: the same with and without read-ahead. No sample outside the leases is read."""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import errors
from shoal._wire import LATEST_ORDER, DataRange, Lease, NoRange
from shoal.data import Seekable
from shoal.data._reading.permutation import IndexPermutation
from shoal.program import Blocks
from shoal_worker.batches import LeasedBatches, order_of, prefetch_of
from support import waiting


class Squares:
    """Writes down what is read of it, and lets others wait for that."""

    def __init__(self, size: int = 100, prefetch: Any = None) -> None:
        self.size = size
        self.read: list[np.ndarray] = []
        self.changed = threading.Condition()  # guards read
        if prefetch is not None:
            self.prefetch = prefetch

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: np.ndarray) -> np.ndarray:
        with self.changed:
            self.read.append(indices)
            self.changed.notify_all()
        return indices**2

    def reads(self, count: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: len(self.read) >= count, 20)


class Lines:
    """Of a file, say: read in sequence."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ranges: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return self.size

    def read(self, start: int, stop: int) -> np.ndarray:
        self.ranges.append((start, stop))
        return np.arange(start, stop) ** 2


def leased(dataset: Seekable | Squares, ranges: Sequence[Lease], batch_size: int = 4, seed: int = 3) -> LeasedBatches:
    answers: list[Lease | NoRange] = [*ranges, NoRange.FINISHED]
    return LeasedBatches(dataset, batch_size, seed, lambda done: answers.pop(0))


def check_drain(batches: LeasedBatches) -> list[np.ndarray]:
    """All batches, of all ranges."""
    found = []
    while batches.lease() is not NoRange.FINISHED:
        while batches.has_next:
            batch = batches.take()
            assert batch.samples == len(batch.data)
            found.append(batch.data)
    batches.close()
    assert not readers()
    return found


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


@given(st.data(), st.integers(1, 60), st.integers(1, 13), st.integers(0, 4), st.integers(0, 3))
def test_batches_depend_on_neither_prefetch_nor_worker(
    data: st.DataObject, size: int, batch_size: int, prefetch: int, window: int
) -> None:
    """The test covers every data set, with and without read-ahead, with one worker and with many."""
    cuts = sorted(data.draw(st.sets(st.integers(0, size))) | {0, size})
    ranges = [Lease(1, DataRange(5, *cut)) for cut in itertools.pairwise(cuts)]
    owners = data.draw(st.lists(st.integers(0, 2), min_size=len(ranges), max_size=len(ranges)))
    block = data.draw(st.integers(1, 20))
    makers: list[Callable[[int], Seekable | Squares]] = [
        lambda ahead: Squares(size, ahead),
        lambda ahead: Seekable(Lines(size), block=block, window=window, prefetch=ahead),
    ]
    for make in makers:
        alone = check_drain(leased(make(0), ranges, batch_size))
        assert sorted(np.concatenate(alone).tolist()) == [number**2 for number in range(size)]
        by_range = {part.range.start: check_drain(leased(make(0), [part], batch_size)) for part in ranges}
        for owner in range(3):
            mine = [part for part, its in zip(ranges, owners, strict=True) if its == owner]
            found = check_drain(leased(make(prefetch), mine, batch_size))
            expected = [batch for part in mine for batch in by_range[part.range.start]]
            assert [batch.tolist() for batch in found] == [batch.tolist() for batch in expected]


def test_a_range_is_read_in_the_order_that_it_refers_to() -> None:
    """Ranges of both versions, in turn: each has the samples of its own order."""
    ranges = [Lease(1, DataRange(5, 0, 30), 0), Lease(2, DataRange(5, 0, 100), 1), Lease(3, DataRange(5, 30, 100), 0)]
    batches = leased(Squares(), ranges, batch_size=100)
    first, second, third = check_drain(batches)
    permuted = np.random.Generator(np.random.Philox(key=np.array([3, 5], np.uint64))).permutation(100)
    np.testing.assert_array_equal(np.concatenate([first, third]), permuted**2)
    np.testing.assert_array_equal(second, IndexPermutation(100, seed=3, epoch=5).at(np.arange(100)) ** 2)


@pytest.mark.parametrize("window", [0, 1, 3])
def test_blocks_have_one_order_in_all_versions(window: int) -> None:
    dataset = Seekable(Lines(1000), block=10, window=window)
    orders = [list(order_of(dataset, 3, version).numbers(2, 15, 700)) for version in (0, 1)]
    np.testing.assert_array_equal(np.concatenate(orders[0]), np.concatenate(orders[1]))


def test_a_version_of_the_order_that_is_not_known_is_refused() -> None:
    batches = leased(Squares(), [Lease(1, DataRange(0, 0, 40), order=LATEST_ORDER + 1)])
    with pytest.raises(errors.WrongVersion, match="order 2, but this worker knows only the orders up to 1"):
        batches.lease()
    assert not batches.has_next


def test_the_next_batches_are_read_while_the_program_computes_and_no_more_than_asked_for() -> None:
    dataset = Squares(prefetch=2)
    batches = leased(dataset, [Lease(1, DataRange(0, 0, 40))])
    batches.lease()
    for taken in range(1, 8):
        batches.take()
        assert dataset.reads(taken + 2), "nothing is read while the program computes"
        assert len(dataset.read) == taken + 2
    batches.close()
    assert not readers()


def test_nothing_is_read_in_turn_before_its_step() -> None:
    dataset = Squares(prefetch=0)
    batches = leased(dataset, [Lease(1, DataRange(0, 0, 8))])
    batches.lease()
    assert not dataset.read
    batches.take()
    assert len(dataset.read) == 1
    assert not readers()


def test_only_blocks_of_leased_ranges_are_read() -> None:
    lines = Lines(1000)
    dataset = Seekable(lines, block=10, prefetch=5)
    order = order_of(dataset, 3)
    found = check_drain(leased(dataset, [Lease(1, DataRange(0, 205, 333))]))
    [*pieces] = order.numbers(0, 205, 333)
    numbers = np.concatenate(pieces)
    np.testing.assert_array_equal(np.concatenate(found), numbers**2)
    homes = {int(number) // 10 for number in numbers}
    assert sorted(lines.ranges) == sorted((10 * home, 10 * home + 10) for home in homes)


def test_a_block_is_read_while_another_is_trained_on() -> None:
    class Slow(Lines):
        def __init__(self) -> None:
            super().__init__(100)
            self.changed = threading.Condition()  # guards ranges

        def read(self, start: int, stop: int) -> np.ndarray:
            with self.changed:
                self.changed.notify_all()
                return super().read(start, stop)

        def reads(self, count: int) -> bool:
            with self.changed:
                return self.changed.wait_for(lambda: len(self.ranges) >= count, 20)

    lines = Slow()
    batches = leased(Seekable(lines, block=20, prefetch=1), [Lease(1, DataRange(0, 0, 100))], batch_size=2)
    batches.lease()
    batches.take()
    assert lines.reads(2), "the second block is not read while batches of the first are taken"
    assert len(lines.ranges) == 2, "a third block is read already"
    batches.close()
    assert not readers()


def test_a_block_is_read_once_though_leases_end_within_it() -> None:
    lines = Lines(100)
    ranges = [Lease(lease, DataRange(0, start, start + 10)) for lease, start in enumerate(range(0, 100, 10), 1)]
    check_drain(leased(Seekable(lines, block=30), ranges))
    assert len(lines.ranges) == len(set(lines.ranges)) == 4


@pytest.mark.parametrize("prefetch", [0, 3])
def test_an_error_is_raised_at_the_step_that_it_belongs_to(prefetch: int) -> None:
    class Spoilt(Squares):
        def batch(self, indices: np.ndarray) -> np.ndarray:
            if len(self.read) == 2:
                raise OSError("the third batch is spoilt")
            return super().batch(indices)

    batches = leased(Spoilt(prefetch=prefetch), [Lease(1, DataRange(0, 0, 40))])
    batches.lease()
    batches.take()
    batches.take()
    with pytest.raises(OSError, match="third"):
        batches.take()
    batches.close()
    assert not readers()


def test_a_reader_that_waits_for_room_ends_with_the_training() -> None:
    dataset = Squares(prefetch=1)
    batches = leased(dataset, [Lease(1, DataRange(0, 0, 100))])
    batches.lease()
    assert dataset.reads(1)
    batches.close()
    waiting.wait_until(lambda: not readers(), what="the reader's end")
    assert len(dataset.read) == 1
    assert not batches.has_next


class TooFew(Squares):
    blocks = Blocks(np.array([0, 50, 100]))

    def batches(self, plan: Iterator[Any]) -> Iterator[np.ndarray]:
        yield from [self.batch(numbers) for numbers in plan][:1]


def test_a_data_set_that_gives_too_few_batches_is_an_error() -> None:
    batches = leased(TooFew(), [Lease(1, DataRange(0, 0, 12))])
    batches.lease()
    batches.take()
    with pytest.raises(errors.ProgramError, match=r"ended 2 batches early"):
        batches.take()


@pytest.mark.parametrize(("given", "meant"), [(None, 2), (0, 0), (7, 7)])
def test_a_data_set_says_how_far_to_read_ahead(given: int | None, meant: int) -> None:
    assert prefetch_of(Squares(prefetch=given)) == meant


def test_a_method_named_prefetch_is_the_programs_own() -> None:
    assert prefetch_of(Squares(prefetch=lambda: 3)) == 2


@pytest.mark.parametrize("given", [-1, 1.5, True, "2"])
def test_a_prefetch_that_is_no_number_of_batches_is_refused(given: float | str) -> None:
    with pytest.raises(errors.ProgramError, match=r"`prefetch` of data set Squares is .*an integer"):
        prefetch_of(Squares(prefetch=given))


def test_blocks_that_do_not_fit_the_data_set_are_refused() -> None:
    class WithBlocks(Squares):
        blocks = Blocks(np.array([0, 100]))

    dataset = WithBlocks(90)
    with pytest.raises(errors.ProgramError, match=r"has 100 samples in its blocks, but its len\(\) is 90"):
        order_of(dataset, 0)
    dataset.size = 100
    with pytest.raises(errors.ProgramError, match=r"blocks, but no batches\(plan\)"):
        order_of(dataset, 0)


def test_a_data_set_with_something_else_named_blocks_is_read_as_ever() -> None:
    class WithOtherNames(Squares):
        blocks = batches = (1, 2)

    assert len(np.concatenate(check_drain(leased(WithOtherNames(10), [Lease(1, DataRange(0, 0, 10))])))) == 10
