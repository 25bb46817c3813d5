"""Allocation of flat arrays for arenas."""

from typing import Any

import numpy as np
import numpy.typing as npt

from shoal._memory.buffers import allocate


def empty(elements: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Returns an uninitialized flat array for an arena, placed by `shoal._memory.buffers.allocate`."""
    return np.asarray(allocate(elements * np.dtype(dtype).itemsize)).view(dtype)


def full(elements: int, fill: float, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Returns a flat array for an arena, filled with one number.

    Args:
        elements: number of elements.
        fill: value of each element.
        dtype: dtype of the elements.
    """
    array = empty(elements, dtype)
    array.fill(fill)
    return array


__all__ = ["empty", "full"]
