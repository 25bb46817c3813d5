"""In which dtype layers add up and multiply matrices."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from shoal.program import Array
from shoal_nn._ops.windows import BLOCK, blocks
from shoal_worker.arrays import Namespace, namespace_of

_FLOAT32 = np.dtype(np.float32)
# Elements of a run at most: long enough that a loop's start costs little, and short enough for the nearest cache.
_RUN = 2048
# Rows of a piece at most. NumPy adds rows one to the other, so an error grows with their number.
_ROWS = 256


def is_half(dtype: np.dtype[Any]) -> bool:
    """Whether it is float16 or bfloat16."""
    return dtype.name in ("float16", "bfloat16")


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether gradients can be of it."""
    return dtype.kind == "f" or is_half(dtype)


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
    channels = x.shape[-1]
    count = math.prod(x.shape[:-1]) if namespace_of(x) is np else 1
    most = min(count, _RUN // max(channels, 1))
    times = next((times for times in range(most, 1, -1) if count % times == 0), 1)
    return x.reshape(-1, times * channels)


def along(runs: Array, vector: Array) -> Array:
    """[channels] as often as a run of `in_runs` has them."""
    times = runs.shape[1] // max(len(vector), 1)
    return vector if times == 1 else namespace_of(runs).tile(vector, times)


def pieces(rows: Array, *, arrays: int) -> list[slice]:
    """Cuts the rows of a matrix so that as many of so many arrays stay in the cache together; on a GPU not at all.

    No piece has more than 256 rows, so that sums of one are near; there is one at least.
    """
    if namespace_of(rows) is not np:
        return [slice(None)]
    nbytes = max(arrays * rows.shape[1] * rows.dtype.itemsize, BLOCK // _ROWS)
    return [*blocks(np, len(rows), nbytes)] or [slice(None)]


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
    rows = in_runs(widened(x))
    return _total((rows[part].sum(axis=0) for part in pieces(rows, arrays=1)), x.shape[-1])


def column_products(pairs: Iterable[tuple[Array, Array]], channels: int) -> Array:
    """[channels]: the sums of a times b, each pair a piece of `in_runs`, with no array of the products on a CPU."""
    return _total((_products(a, b) for a, b in pairs), channels)


def _products(a: Array, b: Array) -> Array:
    xp = namespace_of(a)
    return xp.einsum("ij,ij->j", a, b) if xp is np else (a * b).sum(axis=0)


def _total(sums: Iterable[Array], channels: int) -> Array:
    """[channels]: all pieces' sums of runs, joined in float64, so that what is lost does not grow with the batch."""
    first, *others = sums
    total = first.astype("float64")
    for each in others:
        total += each
    return total.reshape(-1, channels).sum(axis=0).astype(first.dtype, copy=False)


__all__ = [
    "along",
    "column_products",
    "column_sums",
    "in_runs",
    "is_float",
    "is_half",
    "joined",
    "matmul",
    "pieces",
    "product_dtype",
    "widened",
]
