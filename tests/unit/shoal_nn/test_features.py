"""Crosses of categories: their numbers never change, and are the same on every worker."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_nn import FeatureCross, crossed

WORD = 2**64
PUBLISHED = [7055, 2495, 4158, 2243, 4800]
whole = st.integers(-(2**63), 2**63 - 1)


def mix(number: int) -> int:
    """SplitMix64, in whole numbers of Python."""
    number = (number + 0x9E3779B97F4A7C15) % WORD
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % WORD
    number = (number ^ number >> 27) * 0x94D049BB133111EB % WORD
    return number ^ number >> 31


@given(st.lists(st.tuples(whole, whole), min_size=1, max_size=5), st.integers(1, 2**62))
def test_crosses_follow_the_documented_formula(pairs: Sequence[tuple[int, int]], rows: int) -> None:
    a, b = (np.array(each, np.int64) for each in zip(*pairs, strict=True))
    found = crossed(a, b, rows)
    assert found.dtype == np.int64
    assert found.tolist() == [mix(mix(x % WORD) + y) % rows for x, y in pairs]


def test_crosses_stay_the_same_forever() -> None:
    """Tables are trained by them."""
    a, b = np.array([0, 0, 1, 7, -1]), np.array([0, 1, 0, 12, 5])
    assert crossed(a, b, 10_000).tolist() == PUBLISHED
    assert crossed(a.astype(np.int32), b.astype(np.int8), 10_000).tolist() == PUBLISHED


def test_the_pairs_are_spread_evenly() -> None:
    a, b = np.meshgrid(np.arange(300), np.arange(300))
    counts = np.bincount(crossed(a, b, 100).ravel(), minlength=100)
    assert counts.sum() == 90_000
    assert counts.min() > 780  # 900 each, four sigmas
    assert counts.max() < 1020
    assert (crossed(a, b, 10**9) != crossed(b, a, 10**9))[a != b].all()


def test_a_layer_crosses_two_of_its_features() -> None:
    x = {"a": np.array([[1, 2], [3, 4]]), "b": np.array([[5, 6], [7, 8]]), "c": np.zeros(2)}
    y, state, pullback = FeatureCross("b", "a", 50).apply({}, {}, x, False)
    np.testing.assert_array_equal(y, crossed(x["b"], x["a"], 50))
    assert (state, pullback(y)) == ({}, ({}, None))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint64])
def test_numbers_without_a_sign_do_as_well(dtype: type[np.unsignedinteger]) -> None:
    a = np.arange(5)
    np.testing.assert_array_equal(crossed(a.astype(dtype), a.astype(dtype), 99), crossed(a, a, 99))
