"""Matrix products, and the rules for the dtypes in which layers compute."""

from typing import Any

import numpy as np

from shoal.program import Array
from shoal_worker.arrays import Namespace, namespace_of

_FLOAT32 = np.dtype(np.float32)


def is_half(dtype: np.dtype[Any]) -> bool:
    """Returns whether the dtype is float16 or bfloat16."""
    return dtype.name in ("float16", "bfloat16")


def is_float(dtype: np.dtype[Any]) -> bool:
    """Returns whether gradients can have this dtype."""
    return dtype.kind == "f" or is_half(dtype)


def widened(x: Array) -> Array:
    """Returns the values in float32 if they are float16 or bfloat16, otherwise the array itself."""
    return x.astype(_FLOAT32) if is_half(x.dtype) else x


def product_dtype(xp: Namespace, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype of matrix products. NumPy has no fast product of 16-bit floats; a GPU has one."""
    return _FLOAT32 if xp is np and is_half(dtype) else dtype


def matmul(a: Array, b: Array, dtype: np.dtype[Any]) -> Array:
    """Returns the product of two matrices, computed in `product_dtype` of a dtype."""
    dtype = product_dtype(namespace_of(a), dtype)
    return a.astype(dtype, copy=False) @ b.astype(dtype, copy=False)


__all__ = ["is_float", "is_half", "matmul", "product_dtype", "widened"]
