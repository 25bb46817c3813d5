"""Global norms of gradients, and the factor that limits them: see `clip_norm` of `shoal.optim.Optimizer`.

The square of a norm is the sum of the squares of all slices. It does not depend on the order of the slices, and so not
on the servers that hold them.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from shoal_server.optimizers.compilation import FLOATS, kernel, readable, writable

_TINY = 1e-6  # as in PyTorch: a norm of 0 divides nothing


@kernel(
    [(readable(dtype), readable(types.int64), readable(types.float64), writable(types.float64)) for dtype in FLOATS]
)
def _squares(gradient: Any, bounds: Any, rates: Any, squares: Any) -> None:
    # Four sums, because each addition to one sum waits for the one before. In float64, also for float32 gradients.
    for k in range(rates.size):
        squares[k] = 0.0
        if rates[k] == 0:
            continue
        first = second = third = fourth = 0.0
        part = gradient[bounds[k] : bounds[k + 1]]
        whole = part.size // 4 * 4
        for i in range(0, whole, 4):
            a, b = np.float64(part[i]), np.float64(part[i + 1])
            c, d = np.float64(part[i + 2]), np.float64(part[i + 3])
            first += a * a
            second += b * b
            third += c * c
            fourth += d * d
        for i in range(whole, part.size):
            first += np.float64(part[i]) * np.float64(part[i])
        squares[k] = (first + second) + (third + fourth)


def squares_of(
    gradient: np.ndarray, bounds: npt.NDArray[np.int64], rates: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Returns the sum of the squares of each range of a gradient, 0 for a frozen range. A sum may be infinite.

    The same range always gives the same bits.

    Args:
        gradient: float32 or float64, flat and contiguous.
        bounds: the ranges, which cover the gradient; see `update_rules.SettingRanges`.
        rates: their learning rates; see `update_rules.SettingRanges`.
    """
    squares = np.empty(rates.size)
    _squares(gradient, bounds, rates, squares)
    return squares


def total(squares: Iterable[float]) -> float:
    """Returns the sum of these numbers, rounded once. It does not depend on their order, and may be infinite."""
    try:
        return math.fsum(squares)
    except OverflowError:
        return math.inf


def clip_factor(squares: float, clip_norm: float) -> float:
    """Returns the factor of a gradient that limits its norm, at most 1.

    Args:
        squares: sum of the squares of all elements.
        clip_norm: largest norm, > 0.
    """
    return min(1.0, clip_norm / (math.sqrt(squares) + _TINY))


__all__ = ["clip_factor", "squares_of", "total"]
