"""In which dtype layers add up and multiply matrices."""

from typing import Any

import numpy as np

from shoal.program import Array
from shoal_worker.arrays import Namespace, namespace_of

_FLOAT32 = np.dtype(np.float32)


def is_half(dtype: np.dtype[Any]) -> bool:
    """Whether it is float16 or bfloat16."""
    return dtype.itemsize == 2


def widened(x: Array) -> Array:
    """The same values in a dtype to compute in: float32 for both halves, otherwise the array itself."""
    return x.astype(_FLOAT32) if is_half(x.dtype) else x


def product_dtype(xp: Namespace, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What to multiply matrices in: NumPy has no fast product of halves; a GPU has, and adds theirs up in float32."""
    return _FLOAT32 if xp is np and is_half(dtype) else dtype


def matmul(a: Array, b: Array, dtype: np.dtype[Any]) -> Array:
    """The product of two matrices of numbers that are, or could be, of a dtype."""
    dtype = product_dtype(namespace_of(a), dtype)
    return a.astype(dtype, copy=False) @ b.astype(dtype, copy=False)


def column_sums(x: Array) -> Array:
    """Of an array, over all axes but the last; of halves, in float32."""
    return widened(x).reshape(-1, x.shape[-1]).sum(axis=0)


__all__ = ["column_sums", "is_half", "matmul", "product_dtype", "widened"]
