"""In which dtype layers add up and multiply matrices."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shoal.program import Array
from shoal_nn._windows import blocks
from shoal_worker.arrays import Namespace, namespace_of

_FLOAT32 = np.dtype(np.float32)
# Elements of a run at most: long enough that a loop's start costs little, and short enough for the nearest cache.
_RUN = 4096


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


def in_runs(x: Array) -> Array:
    """[..., channels] as the rows of a matrix, each of so many rows of channels that are one run of memory.

    NumPy has a loop for each row that a vector is combined with, or added to, and channels alone make short ones.
    """
    run = x.shape[-1]
    for length in reversed(x.shape[:-1]) if namespace_of(x) is np else ():
        if run * length > _RUN:
            break
        run *= length
    return x.reshape(-1, run)


def along(runs: Array, vector: Array) -> Array:
    """[channels] as often as a run of `in_runs` has them."""
    times = runs.shape[1] // max(len(vector), 1)
    return vector if times == 1 else namespace_of(runs).tile(vector, times)


def pieces(rows: Array, *, arrays: int) -> list[slice]:
    """Cuts the rows of a matrix so that as many of so many arrays stay in the cache together; on a GPU not at all."""
    xp = namespace_of(rows)
    return [*blocks(xp, len(rows), arrays * rows.shape[1] * rows.dtype.itemsize)] if xp is np else [slice(None)]


def joined(like: Array, parts: Sequence[slice], piece: Callable[[slice], Array]) -> Array:
    """The pieces that a function gives for each of the parts, as an array of this shape and dtype."""
    if len(parts) == 1:
        return piece(parts[0])
    whole = namespace_of(like).empty_like(like)
    for part in parts:
        whole[part] = piece(part)
    return whole


def column_sums(x: Array) -> Array:
    """Of an array, over all axes but the last; of halves, in float32."""
    return in_runs(widened(x)).sum(axis=0).reshape(-1, x.shape[-1]).sum(axis=0)


def column_products(a: Array, b: Array, channels: int) -> Array:
    """[channels]: the sums of a times b, both of `in_runs`, with no array of the products on a CPU."""
    xp = namespace_of(a)
    sums = xp.einsum("ij,ij->j", a, b) if xp is np else (a * b).sum(axis=0)
    return sums.reshape(-1, channels).sum(axis=0)


__all__ = [
    "along",
    "column_products",
    "column_sums",
    "in_runs",
    "is_half",
    "joined",
    "matmul",
    "pieces",
    "product_dtype",
    "widened",
]
