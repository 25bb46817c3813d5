"""Every sample once an epoch, in an order that nothing but the seed, the epoch and the blocks decides."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import errors
from shoal.data._reading.order import ShuffledBlocks, ShuffledSamples, cut
from shoal.program import Blocks


def starts(lengths):
    return np.append(0, np.cumsum(lengths))


@st.composite
def blocks(draw):
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    ends = draw(st.sets(st.integers(1, len(lengths) - 1))) if len(lengths) > 1 else set()
    runs = draw(st.sampled_from([None, np.array([0, *sorted(ends), len(lengths)])]))
    return Blocks(starts(lengths), draw(st.integers(0, 5)), runs)


def ranges(draw, samples):
    cuts = sorted(draw(st.sets(st.integers(0, samples))) | {0, samples})
    return list(itertools.pairwise(cuts))


def numbers(order, epoch, start, stop):
    pieces = list(order.numbers(epoch, start, stop))
    return np.concatenate([*pieces, np.empty(0, np.int64)])


@given(st.data(), blocks(), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
def test_every_sample_comes_once_however_the_epoch_is_cut(data, layout, seed, epoch):
    whole = numbers(ShuffledBlocks(layout, seed), epoch, 0, layout.samples)
    assert sorted(whole) == list(range(layout.samples))
    one = ShuffledBlocks(layout, seed)
    parts = ranges(data.draw, layout.samples)
    for start, stop in data.draw(st.permutations(parts)):
        fresh = data.draw(st.booleans())
        order = ShuffledBlocks(layout, seed) if fresh else one
        np.testing.assert_array_equal(numbers(order, epoch, start, stop), whole[start:stop])


@given(blocks(), st.integers(0, 9))
def test_a_window_holds_so_many_blocks_and_runs_stay_together(layout, seed):
    whole = numbers(ShuffledBlocks(layout, seed), 3, 0, layout.samples)
    homes = np.searchsorted(layout.starts, whole, side="right") - 1
    step, lengths = max(1, layout.window), np.diff(layout.starts)
    place, sequence = 0, []
    while place < len(whole):
        here, size = [], 0
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


def test_epochs_and_seeds_differ_and_a_window_is_shuffled():
    layout = Blocks(starts([50] * 20))
    orders = [numbers(ShuffledBlocks(layout, seed), epoch, 0, 1000).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    first = np.array(orders[0][:50])
    assert first.min() // 50 == first.max() // 50
    assert (np.diff(first) != 1).any()


def test_single_samples_are_ordered_as_they_always_were():
    expected = np.random.Generator(np.random.Philox(key=np.array([7, 3], np.uint64))).permutation(20)
    np.testing.assert_array_equal(numbers(ShuffledSamples(20, 7), 3, 5, 17), expected[5:17])


@given(st.lists(st.integers(0, 7), max_size=8), st.integers(1, 9))
def test_cutting_changes_nothing_but_the_lengths(lengths, size):
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
def test_blocks_that_are_none_are_refused(layout, said):
    with pytest.raises(errors.ProgramError, match=said):
        Blocks(**layout)
