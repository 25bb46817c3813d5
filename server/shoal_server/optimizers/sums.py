"""Kernels of `sum` variables: additions that stay within the range of the dtype.

A sum that leaves the range becomes the limit that it passed. An element at a limit stays there, whatever is added, so
an overflow remains visible in the values. Without this, integers would wrap around, and floats would become infinite.
NaN stays NaN.
"""

from typing import Any

import numpy as np
from numba import types

from shoal_server.optimizers.compilation import FLOATS, kernel, readable, writable


@kernel([(writable(dtype), readable(dtype), dtype, dtype, types.int64) for dtype in FLOATS])
def _add_floats(total: Any, increment: Any, lowest: Any, highest: Any, swapped: int) -> None:
    for i in range(total.size):
        base, more = (increment[i], total[i]) if swapped else (total[i], increment[i])
        found = base + more
        if base == highest or found > highest:
            found = highest
        if base == lowest or found < lowest:
            found = lowest
        total[i] = found


@kernel([(writable(types.int64), readable(types.int64), types.int64, types.int64, types.int64)])
def _add_integers(total: Any, increment: Any, lowest: Any, highest: Any, swapped: int) -> None:
    for i in range(total.size):
        base, more = (increment[i], total[i]) if swapped else (total[i], increment[i])
        # Compared before the addition: compiled code may assume that no sum wraps around.
        if base == highest or (more > 0 and base > highest - more):
            total[i] = highest
        elif base == lowest or (more < 0 and base < lowest - more):
            total[i] = lowest
        else:
            total[i] = base + more


def add(values: np.ndarray, increment: np.ndarray, *, into_increment: bool = False) -> None:
    """Computes values + increment, element by element, within the range of the dtype.

    Args:
        values: float32, float64 or int64; flat and contiguous.
        increment: of the type and size of `values`, flat and contiguous.
        into_increment: whether the result replaces `increment` instead of `values`.

    Raises:
        ValueError: the shapes differ.
    """
    if values.shape != increment.shape:
        raise ValueError(f"cannot add {increment.shape} elements to {values.shape}")
    total, other = (increment, values) if into_increment else (values, increment)
    if np.issubdtype(values.dtype, np.integer):
        limits = np.iinfo(values.dtype)
        _add_integers(total, other, np.int64(limits.min), np.int64(limits.max), int(into_increment))
    else:
        highest = np.finfo(values.dtype).max
        _add_floats(total, other, -highest, highest, int(into_increment))


__all__ = ["add"]
