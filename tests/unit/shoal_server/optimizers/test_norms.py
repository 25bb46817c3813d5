"""Norms of gradients: the sums of squares without frozen ranges, and the factor that limits the norm."""

import math
from typing import Any

import numpy as np
import pytest

from shoal_server.optimizers import norms


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [0, 1, 3, 4, 7, 1001])
def test_squares_of_frozen_ranges_are_0(size: int, dtype: Any) -> None:
    gradient = np.random.default_rng(size).standard_normal(size).astype(dtype)
    bounds = np.array([0, size // 3, size // 2, size // 2, size])
    rates = np.array([1.0, 0.0, 5.0, 0.5])
    found = norms.squares_of(gradient, bounds, rates)
    for start, stop, rate, square in zip(bounds, bounds[1:], rates, found, strict=False):
        kept = gradient[start:stop].astype(np.float64) * bool(rate)
        assert square == pytest.approx(math.fsum(kept**2), rel=1e-14)
    np.testing.assert_array_equal(found, norms.squares_of(gradient, bounds, rates))


def test_squares_of_float32_do_not_overflow_and_those_of_float64_may() -> None:
    largest = np.full(4, np.finfo(np.float32).max)
    (square,) = norms.squares_of(largest, np.array([0, 4]), np.ones(1))
    assert square == pytest.approx(4 * float(largest[0]) ** 2)
    assert norms.squares_of(np.full(4, 1e300), np.array([0, 4]), np.ones(1)) == math.inf
    assert norms.clip_factor(math.inf, 1.0) == 0


def test_the_total_does_not_depend_on_the_order_and_may_be_infinite() -> None:
    draws = np.random.default_rng(0)
    squares = 10.0 ** draws.uniform(-30, 30, 100)
    assert len({norms.total(draws.permutation(squares)) for _ in range(10)}) == 1
    assert norms.total([1e308, 1e308]) == math.inf
    assert norms.total([1.0, math.inf]) == math.inf


def test_factor_is_that_of_pytorch() -> None:
    assert norms.clip_factor(16.0, 1.0) == 1 / (4 + 1e-6)
    assert norms.clip_factor(16.0, 5.0) == 1
    assert norms.clip_factor(0.0, 1.0) == 1
