"""Order of samples: each sample occurs once an epoch, and only the seed, the epoch and the blocks decide the order."""

import itertools
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import errors
from shoal.data._reading.order import PermutedSamples, ShuffledBlocks, ShuffledSamples, cut
from shoal.data._reading.permutation import IndexPermutation
from shoal.program import Blocks

# As NumPy 2.4 draws them.
PERMUTED = [16, 15, 13, 4, 19, 9, 11, 3, 2, 5, 0, 6]
IN_WINDOWS = [11, 10, 1, 9, 2, 0, 4, 6, 8, 3, 5, 7]
IN_RUNS = [5, 6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4]


def starts(lengths: list[int]) -> np.ndarray:
    return np.append(0, np.cumsum(lengths))


@st.composite
def blocks(draw: Callable[..., Any]) -> Blocks:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    ends = draw(st.sets(st.integers(1, len(lengths) - 1))) if len(lengths) > 1 else set()
    runs = draw(st.sampled_from([None, np.array([0, *sorted(ends), len(lengths)])]))
    return Blocks(starts(lengths), draw(st.integers(0, 5)), runs)


def ranges(draw: Callable[..., Any], samples: int) -> list[tuple[int, int]]:
    cuts = sorted(draw(st.sets(st.integers(0, samples))) | {0, samples})
    return list(itertools.pairwise(cuts))


def numbers(order: PermutedSamples | ShuffledBlocks | ShuffledSamples, epoch: int, start: int, stop: int) -> np.ndarray:
    pieces = list(order.numbers(epoch, start, stop))
    return np.concatenate([*pieces, np.empty(0, np.int64)])


@given(st.data(), blocks(), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
def test_every_sample_occurs_once_for_any_ranges(data: st.DataObject, layout: Blocks, seed: int, epoch: int) -> None:
    whole = numbers(ShuffledBlocks(layout, seed), epoch, 0, layout.samples)
    assert sorted(whole) == list(range(layout.samples))
    one = ShuffledBlocks(layout, seed)
    parts = ranges(data.draw, layout.samples)
    for start, stop in data.draw(st.permutations(parts)):
        fresh = data.draw(st.booleans())
        order = ShuffledBlocks(layout, seed) if fresh else one
        np.testing.assert_array_equal(numbers(order, epoch, start, stop), whole[start:stop])


@given(blocks(), st.integers(0, 9))
def test_window_holds_its_number_of_blocks_and_runs_stay_together(layout: Blocks, seed: int) -> None:
    whole = numbers(ShuffledBlocks(layout, seed), 3, 0, layout.samples)
    homes = np.searchsorted(layout.starts, whole, side="right") - 1
    step, lengths = max(1, layout.window), np.diff(layout.starts)
    place, sequence = 0, []
    while place < len(whole):
        size = 0
        here: list[int] = []
        while len(here) < step and place + size < len(whole):
            new = next(home for home in homes[place:] if home not in here)
            here = sorted({*here, new})
            size = int(lengths[here].sum())
        window = homes[place : place + size]
        assert set(window) == set(here)
        if not layout.window:
            assert (np.diff(whole[place : place + size]) == 1).all()
        sequence += here
        place += size
    if step == 1:  # so that the sequence of blocks is known
        order = np.argsort(sequence)
        for first, stop in zip(layout.runs, layout.runs[1:], strict=False):
            assert (np.diff(order[first:stop]) == 1).all()


def test_epochs_and_seeds_differ_and_a_window_is_shuffled() -> None:
    layout = Blocks(starts([50] * 20))
    orders = [numbers(ShuffledBlocks(layout, seed), epoch, 0, 1000).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    first = np.array(orders[0][:50])
    assert first.min() // 50 == first.max() // 50
    assert (np.diff(first) != 1).any()


@given(st.data(), st.integers(1, 30_000), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
def test_every_single_sample_occurs_once_for_any_ranges(
    data: st.DataObject, samples: int, seed: int, epoch: int
) -> None:
    order = ShuffledSamples(samples, seed)
    cuts = sorted(data.draw(st.sets(st.integers(0, samples), max_size=5)) | {0, samples})
    parts = [numbers(order, epoch, *part) for part in itertools.pairwise(cuts)]
    expected = IndexPermutation(samples, seed, epoch).at(np.arange(samples))
    np.testing.assert_array_equal(np.concatenate(parts), expected)


def test_places_outside_the_data_set_are_refused() -> None:
    with pytest.raises(IndexError, match="places 0 to 20 are not all within an order of 20 samples"):
        list(ShuffledSamples(20, 7).numbers(0, 0, 21))


def test_a_range_of_a_huge_epoch_takes_constant_memory() -> None:
    tracemalloc.start()
    try:
        count = 0
        for piece in ShuffledSamples(10**9, 7).numbers(2, 999_000_000, 999_500_000):
            count += len(piece)
        assert count == 500_000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_range_of_a_huge_epoch_of_blocks_takes_memory_by_the_block() -> None:
    count, size = 100_000, 10_000
    layout = Blocks(np.arange(count + 1) * size)
    tracemalloc.start()
    try:
        drawn = numbers(ShuffledBlocks(layout, 7), 2, 12_345_678, 12_347_678)
        assert len(drawn) == 2_000
        assert tracemalloc.get_traced_memory()[1] < 100 * count
    finally:
        tracemalloc.stop()


def test_orders_of_numpy_do_not_change_with_its_version() -> None:
    """Stored jobs depend on them. If this fails, NumPy draws another permutation, and Shoal needs its own copy."""
    assert numbers(PermutedSamples(20, 7), 3, 5, 17).tolist() == PERMUTED
    assert numbers(ShuffledBlocks(Blocks([0, 3, 5, 9, 12], window=2), 7), 3, 0, 12).tolist() == IN_WINDOWS
    runs = Blocks([0, 3, 5, 9, 12], window=0, runs=[0, 2, 4])
    assert numbers(ShuffledBlocks(runs, 2), 0, 0, 12).tolist() == IN_RUNS


@given(st.lists(st.integers(0, 7), max_size=8), st.integers(1, 9))
def test_cutting_changes_nothing_but_the_lengths(lengths: list[int], size: int) -> None:
    pieces = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1]) if lengths else []
    batches = list(cut(iter(pieces), size))
    assert [*map(int, np.concatenate([*batches, np.empty(0, int)]))] == list(range(sum(lengths)))
    assert all(len(batch) == size for batch in batches[:-1])
    assert all(0 < len(batch) <= size for batch in batches)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"starts": [0, 5, 5]}, "starts of blocks must be two or more whole numbers that increase"),
        ({"starts": [1, 5]}, "starts"),
        ({"starts": [0]}, "starts"),
        ({"starts": [0.0, 1.0]}, "starts"),
        ({"starts": [[0, 1]]}, "starts"),
        ({"starts": [0, 5, 9], "runs": [0, 1]}, "runs end at block 1, but there are 2"),
        ({"starts": [0, 5, 9], "runs": [0, 2, 1]}, "runs of blocks"),
        ({"starts": [0, 5], "window": -1}, "window is -1"),
        ({"starts": [0, 5], "window": 1.5}, "window is 1.5"),
    ],
)
def test_blocks_that_are_none_are_refused(layout: dict[str, Any], said: str) -> None:
    with pytest.raises(errors.ProgramError, match=said):
        Blocks(**layout)
