"""Checks of `shoal_nn._ops.channels` against float64, for arrays on any device."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from shoal_nn._ops import channels

# Shapes whose channels a thread loads one by one, in twos, fours and eights; one row; more rows than a block adds.
SHAPES = [(1, 1), (5, 3), (2, 70, 6), (3, 5, 7, 64), (2, 2, 5000), (4099, 12), (2, 50, 50, 8), (7, 40, 40, 3)]
DTYPES = {
    np.dtype(np.float64): 1e-12,
    np.dtype(np.float32): 1e-5,
    np.dtype(np.float16): 2e-3,
    np.dtype(ml_dtypes.bfloat16): 1.6e-2,
}


def check_sums_and_maps(
    shape: tuple[int, ...], dtype: np.dtype[Any], place: Callable[[np.ndarray], Any], host: Callable[[Any], np.ndarray]
) -> None:
    """Compares every function of the module with float64.

    Args:
        shape: of the array.
        dtype: its dtype, one of `DTYPES`.
        place: copies an array to the device.
        host: copies it back.
    """
    rng = np.random.default_rng(0)
    x, dy = ((1 + rng.standard_normal(shape)).astype(dtype) for _ in range(2))
    wide = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    vectors = [rng.standard_normal(shape[-1]).astype(wide) for _ in range(4)]
    mean, slope, shift, factor = vectors
    there = [place(each) for each in (x, dy, *vectors)]
    x, dy = x.astype(np.float64), dy.astype(np.float64)
    axes = tuple(range(x.ndim - 1))
    small = 1e-13 if dtype == np.float64 else 1e-6

    def near(found: Any, wanted: np.ndarray, terms: np.ndarray) -> None:
        found = host(found)
        assert found.dtype == wide
        np.testing.assert_array_less(abs(found - wanted), small * (1 + abs(terms).sum(axis=axes)))

    def like_x(found: Any, wanted: np.ndarray) -> None:
        found = host(found)
        assert found.dtype == dtype
        assert found.shape == shape
        tolerance = DTYPES[dtype]
        np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=tolerance, atol=tolerance * abs(wanted).max())

    x_there, dy_there, mean_there, slope_there, shift_there, factor_there = there
    centered = x - mean
    near(channels.column_sums(x_there), x.sum(axis=axes), x)
    near(channels.centered_squares(x_there, mean_there), (centered**2).sum(axis=axes), centered**2)
    sums, products = channels.gradient_sums(dy_there, x_there, mean_there)
    near(sums, dy.sum(axis=axes), dy)
    near(products, (dy * centered).sum(axis=axes), dy * centered)
    like_x(channels.scaled(x_there, mean_there, factor_there, shift_there), centered * factor + shift)
    found = channels.input_gradient(dy_there, x_there, mean_there, slope_there, shift_there, factor_there)
    like_x(found, (centered * slope + dy - shift) * factor)


def check_statistics(place: Callable[[np.ndarray], Any], host: Callable[[Any], np.ndarray]) -> None:
    """Compares the statistics of a batch, and the slope and shift of its gradient, with float64.

    Args:
        place: copies an array to the device.
        host: copies it back.
    """
    rng = np.random.default_rng(1)
    squares, mean, scale, running_mean, running_var, sums = 1 + rng.random((6, 300))
    moving = channels.Moving(count=50, divisor=49, momentum=0.1, epsilon=1e-5)
    inverse, factor, moved_mean, moved_var = channels.batch_statistics(
        place(squares), place(mean), place(scale), (place(running_mean), place(running_var)), moving
    )
    wanted = 1 / np.sqrt(squares / 50 + 1e-5)
    slope, shift = channels.slope_and_shift(place(squares), place(sums), inverse, 50)
    for found, exact in (
        (inverse, wanted),
        (factor, wanted * scale),
        (moved_mean, 0.9 * running_mean + 0.1 * mean),
        (moved_var, 0.9 * running_var + 0.1 * squares / 49),
        (slope, -squares * wanted**2 / 50),
        (shift, sums / 50),
    ):
        np.testing.assert_allclose(host(found), exact, rtol=1e-13)
