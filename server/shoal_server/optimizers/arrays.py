"""Flat arrays for arenas, placed where kernels are fast."""

from typing import Any

import numpy as np
import numpy.typing as npt

from shoal._memory.buffers import allocate


def empty(elements: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A flat array for an arena, not initialised, placed as `shoal._memory.buffers.allocate` does."""
    return np.asarray(allocate(elements * np.dtype(dtype).itemsize)).view(dtype)


def full(elements: int, fill: float, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A flat array for an arena, laid as by `empty`, of one number."""
    array = empty(elements, dtype)
    array.fill(fill)
    return array


__all__ = ["empty", "full"]
