"""Norms of gradients: the sum of squares without frozen ranges, and the factor that limits the norm."""

import math
from typing import Any

import numpy as np
import pytest

from shoal_server.optimizers import norms


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [0, 1, 3, 4, 7, 1001])
def test_sum_of_squares_leaves_frozen_ranges_out(size: int, dtype: Any) -> None:
    gradient = np.random.default_rng(size).standard_normal(size).astype(dtype)
    bounds = np.array([0, size // 3, size // 2, size // 2, size])
    rates = np.array([1.0, 0.0, 5.0, 0.5])
    kept = np.concatenate([gradient[: size // 3], gradient[size // 2 :]]).astype(np.float64)
    found = norms.sum_of_squares(gradient, bounds, rates)
    assert found == pytest.approx(math.fsum(kept**2), rel=1e-14)
    assert found == norms.sum_of_squares(gradient, bounds, rates)


def test_squares_of_float32_do_not_overflow_and_those_of_float64_may() -> None:
    largest = np.full(4, np.finfo(np.float32).max)
    assert norms.sum_of_squares(largest, np.array([0, 4]), np.ones(1)) == pytest.approx(4 * float(largest[0]) ** 2)
    assert norms.sum_of_squares(np.full(4, 1e300), np.array([0, 4]), np.ones(1)) == math.inf
    assert norms.clip_factor(math.inf, 1.0) == 0


def test_factor_is_that_of_pytorch() -> None:
    assert norms.clip_factor(16.0, 1.0) == 1 / (4 + 1e-6)
    assert norms.clip_factor(16.0, 5.0) == 1
    assert norms.clip_factor(0.0, 1.0) == 1
