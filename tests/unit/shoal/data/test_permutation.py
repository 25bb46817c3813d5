"""Permutation by index: a bijection of any size, the same on all machines, and statistical tests find no structure.

The golden values fix the function, so a change of it fails in the short form. Most statistics are of the long form.
"""

import hashlib
import itertools
import math
import time
import tracemalloc
from collections import Counter
from statistics import median

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from shoal import errors
from shoal.data._reading import permutation as module
from shoal.data._reading.permutation import MAX_SIZE, IndexPermutation
from support.run_lengths import long_only
from support.run_lengths import size as length

SEEDS, EPOCHS = st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)
BILLION = 10**9
POWERS = [2**k + d for k in range(12, 64) for d in (-1, 0, 1) if 4096 < 2**k + d <= MAX_SIZE]

# Places 0 to 5 of some orders.
GOLDEN_10 = [4, 6, 3, 5, 2, 1, 8, 7, 9, 0]
GOLDEN_4096 = [335, 2978, 279, 3821, 2180, 574]
GOLDEN_4097 = [4000, 599, 2120, 1212, 2234, 2285]
GOLDEN_BILLION = [900265865, 16794109, 503964414, 188706160, 282150031, 833547970]
GOLDEN_MAX = [916063091534223889, 4418856787394415029, 4630302800805532365]
GOLDEN_DIGEST = "37ccd3098128cb86"


class Reference:
    """The same permutation with Python's integers, one number at a time, and its inverse. For sizes above 4,096."""

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self.size, self.keys = size, [key(size, seed, epoch, place) for place in range(10)]
        root = math.isqrt(size - 1) + 1
        self.left = root + root % 2
        self.right = -(-size // self.left)

    def at(self, place: int) -> int:
        number = self.once(place)
        while number >= self.size:
            number = self.once(number)
        return number

    def inverse(self, number: int) -> int:
        place = self.once(number, back=True)
        while place >= self.size:
            place = self.once(place, back=True)
        return place

    def once(self, number: int, back: bool = False) -> int:
        left, right = divmod(number, self.right)
        for place in reversed(range(10)) if back else range(10):
            half, modulus = (left, self.right) if place % 2 else (right, self.left)
            step = (finalized(half + self.keys[place]) >> 32) * modulus >> 32
            step = -step if back else step
            if place % 2:
                right = (right + step) % modulus
            else:
                left = (left + step) % modulus
        return left * self.right + right


def key(*numbers: int) -> int:
    size, seed, epoch, place = numbers
    text = b"".join(number.to_bytes(8, "little") for number in (seed, epoch, size, place))
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"shoal order").digest(), "little")


def finalized(number: int) -> int:
    """SplitMix64's finalizer, as published."""
    number %= 2**64
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
    return number ^ number >> 31


def whole(size: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return IndexPermutation(size, seed, epoch).at(np.arange(size))


def deviation(counts: ArrayLike, expected: ArrayLike | None = None) -> float:
    """Pearson's statistic in standard deviations from its mean: below 5 if the counts are as expected."""
    counts = np.asarray(counts, float).ravel()
    expected = np.full(len(counts), counts.sum() / len(counts)) if expected is None else np.asarray(expected, float)
    freedom = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


# A bijection.


def test_sizes_up_to_5000_are_permuted() -> None:
    for size in length([*range(500), *range(500, 5001, 45), 4096, 4097], range(5001)):
        assert np.array_equal(np.sort(whole(size, seed=size, epoch=7)), np.arange(size)), size


@given(st.integers(0, 200_000), SEEDS, EPOCHS)
@example(4096, 0, 0)
@example(4097, 0, 0)
@example(66 * 65, 1, 1)  # nothing is left over
@example(66 * 65 - 1, 1, 1)
def test_every_number_occurs_once(size: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(whole(size, seed, epoch)), np.arange(size))


@given(st.integers(4097, MAX_SIZE) | st.sampled_from(POWERS), SEEDS, EPOCHS, st.data())
@example(MAX_SIZE, 2**64 - 1, 2**32 - 1, None)
def test_a_large_permutation_is_exact_and_has_an_inverse(
    size: int, seed: int, epoch: int, data: st.DataObject | None
) -> None:
    """The inverse shows that no two places have the same number, though there are too many to try."""
    drawn = data.draw(st.lists(st.integers(0, size - 1), max_size=20)) if data else []
    places = [0, 1, size // 2, size - 2, size - 1, *drawn]
    found = IndexPermutation(size, seed, epoch).at(np.array(places))
    reference = Reference(size, seed, epoch)
    assert found.dtype == np.int64
    assert found.tolist() == [reference.at(place) for place in places]
    assert [reference.inverse(number) for number in found.tolist()] == places


@pytest.mark.parametrize("size", POWERS)
def test_the_edges_of_powers_of_two(size: int) -> None:
    ends = np.unique(np.append(np.arange(500), size - 1 - np.arange(500)))
    numbers = IndexPermutation(size, 3, 1).at(ends)
    assert len(np.unique(numbers)) == len(ends)
    assert numbers.min() >= 0
    assert numbers.max() < size


@given(st.integers(1, 10**12), st.data())
def test_number_of_a_place_does_not_depend_on_other_places(size: int, data: st.DataObject) -> None:
    places = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=50)))
    order = IndexPermutation(size, 1, 2)
    together = order.at(places)
    assert [int(order.at(places[index : index + 1])[0]) for index in range(len(places))] == together.tolist()
    assert order.at(places[:0]).tolist() == []


# The same everywhere.


def test_orders_do_not_change_with_machine_or_version() -> None:
    """If this fails, jobs and checkpoints continue with other samples: that is a new version of the order."""
    assert whole(10, 7, 3).tolist() == GOLDEN_10
    assert IndexPermutation(4096, 7, 3).at(np.arange(6)).tolist() == GOLDEN_4096
    assert IndexPermutation(4097, 7, 3).at(np.arange(6)).tolist() == GOLDEN_4097
    assert IndexPermutation(BILLION, 7, 3).at(np.arange(6)).tolist() == GOLDEN_BILLION
    assert IndexPermutation(MAX_SIZE, 2**64 - 1, 2**32 - 1).at(np.arange(3)).tolist() == GOLDEN_MAX
    digest = hashlib.blake2b(whole(100_000, 1, 0).astype("<i8").tobytes(), digest_size=8).hexdigest()
    assert digest == GOLDEN_DIGEST


@pytest.mark.parametrize("size", [1000, 5000])
def test_seeds_epochs_and_sizes_have_different_orders(size: int) -> None:
    """Two permutations that do not know of each other agree at one place, on average; here in 10 or fewer."""
    keys = [*itertools.product((0, 1, 2, 2**64 - 1), (0, 1, 2)), (2**32, 0)]
    orders = {key: whole(size, *key) for key in keys}
    for one, other in itertools.combinations(keys, 2):
        assert (orders[one] == orders[other]).sum() <= 10, (one, other)
    for number in (1, 2):
        assert (whole(size + number)[:size] == orders[0, 0]).sum() <= 10


# Statistics. All seeds are fixed: a test passes always or never.


@long_only
@pytest.mark.parametrize("size", [2, 3, 5, 7, 16, 33])
def test_each_place_has_each_number_equally_often(size: int) -> None:
    seeds = 6000
    counts = np.zeros((size, size))
    for seed in range(seeds):
        counts[np.arange(size), whole(size, seed, epoch=1)] += 1
    expected = seeds / size
    # Each row and each column has the same sum, so there are (size - 1)**2 degrees of freedom.
    freedom = (size - 1) ** 2
    pearson = ((counts - expected) ** 2 / expected).sum() * (size - 1) / size
    assert abs(pearson - freedom) / math.sqrt(2 * freedom) < 5


@pytest.mark.parametrize("size", length([4], [2, 3, 4, 5]))
def test_all_permutations_of_a_small_size_are_equally_frequent(size: int) -> None:
    found = Counter(tuple(whole(size, seed).tolist()) for seed in range(12_000))
    assert len(found) == math.factorial(size)
    assert deviation([*found.values()]) < 5


@long_only
def test_all_orders_of_consecutive_epochs_are_equally_frequent() -> None:
    found = Counter(tuple(whole(4, 12345, epoch).tolist()) for epoch in range(12_000))
    assert len(found) == 24
    assert deviation([*found.values()]) < 5


@long_only
@pytest.mark.parametrize("size", [4097, 5000, BILLION, 2**48])
def test_place_of_a_large_order_is_uniform(size: int) -> None:
    places = np.array([0, 1, 2, Reference(size, 0, 0).right, size // 2, size - 1])
    rows = [IndexPermutation(size, seed, 0).at(places) for seed in range(3000)]
    parts = np.stack(rows).T.astype(object) * 50 // size
    sizes = np.diff([-(-part * size // 50) for part in range(51)]) / size * 3000
    for place, its in zip(places, parts, strict=True):
        assert deviation(np.bincount(its.astype(int), minlength=50), sizes.astype(float)) < 5, place


def steps_between(size: int, distance: int, seeds: int) -> float:
    """Deviation of the differences between numbers that are this far apart in the order, over many orders."""
    counts = np.zeros(size)
    for seed in range(seeds):
        numbers = whole(size, seed)
        counts += np.bincount((np.roll(numbers, -distance) - numbers) % size, minlength=size)
    assert counts[0] == 0
    return deviation(counts[1:])


@pytest.mark.parametrize(("size", "row"), length([(1000, 32)], [(1000, 32), (4225, 65), (5000, 70)]))
def test_neighbors_are_independent(size: int, row: int) -> None:
    for distance in (1, 2, row, row + 1):
        assert abs(steps_between(size, distance, seeds=300)) < 5, distance


@long_only
def test_the_test_of_neighbors_finds_a_network_of_too_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROUNDS", 4)
    assert steps_between(4225, 65, seeds=300) > 50


@long_only
@pytest.mark.parametrize("size", [2**20, 1_000_003, BILLION])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_serial_test_and_the_correlation_of_neighbors(size: int, seed: int) -> None:
    """Pairs of numbers that follow each other, and pairs a row apart, fill a square evenly."""
    row = Reference(size, 0, 0).right
    order = IndexPermutation(size, seed, 0)
    count = 2**19
    first = order.at(np.arange(count))
    assert deviation(np.bincount(first * 256 // size, minlength=256)) < 5
    for distance in (1, 2, row):
        second = order.at(np.arange(distance, distance + count))
        pairs = (first * 32 // size) * 32 + second * 32 // size
        assert deviation(np.bincount(pairs, minlength=1024)) < 5
        assert abs(np.corrcoef(first, second)[0, 1]) < 5 / math.sqrt(count)


@long_only
def test_one_number_stays_in_its_place_on_average() -> None:
    stays = [int((whole(4225, seed) == np.arange(4225)).sum()) for seed in range(1000)]
    expected = [1000 * math.exp(-1) / math.factorial(count) for count in range(4)]
    assert deviation([*np.bincount(np.minimum(stays, 4))], [*expected, 1000 - sum(expected)]) < 5


@long_only
@pytest.mark.parametrize("size", [3, 4, 66 * 66, 66 * 65])
def test_odd_permutations_are_as_frequent_as_even_ones(size: int) -> None:
    odd = 0
    for seed in range(400):
        numbers, cycles, seen = whole(size, seed).tolist(), 0, bytearray(size)
        for start in range(size):
            cycles += not seen[start]
            place = start
            while not seen[place]:
                seen[place] = 1
                place = numbers[place]
        odd += (size - cycles) % 2
    assert 150 < odd < 250


# What it costs.


def test_the_start_the_memory_and_a_draw_of_a_billion_samples() -> None:
    starts, draws = [], []
    for seed in range(21):
        places = np.random.default_rng(seed).integers(0, BILLION, 1000)
        began = time.perf_counter()
        order = IndexPermutation(BILLION, seed, 0)
        started = time.perf_counter()
        order.at(places)
        starts.append(started - began)
        draws.append(time.perf_counter() - started)
    assert median(starts) < 0.010
    assert median(draws) < 0.002
    tracemalloc.start()
    try:
        IndexPermutation(BILLION, 0, 0).at(places)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


# What is refused.


@pytest.mark.parametrize("size", [-1, 2**63, 2**64])
def test_a_size_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(errors.ProgramError, match=f"a data set has {size} samples; .* 0 to 9223372036854775807"):
        IndexPermutation(size, 0, 0)


@pytest.mark.parametrize("size", [0, 1, 10, 5000])
def test_a_place_out_of_range_is_refused(size: int) -> None:
    order = IndexPermutation(size, 0, 0)
    for place in (-1, size, 2**63 - 1):
        with pytest.raises(IndexError, match=f"not all within an order of {size} samples"):
            order.at(np.array([place]))


@pytest.mark.parametrize(("seed", "epoch"), [(-1, 0), (2**64, 0), (0, -1), (0, 2**64)])
def test_a_key_out_of_range_is_refused(seed: int, epoch: int) -> None:
    with pytest.raises(OverflowError):
        IndexPermutation(10, seed, epoch)
