"""Sums and matrix products that layers share, and the rules for the dtypes in which they are computed."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from shoal.program import Array
from shoal_nn._ops.windows import BLOCK, blocks
from shoal_worker.arrays import Namespace, namespace_of

_FLOAT32 = np.dtype(np.float32)
# Most elements of a run: long enough to amortize the start of a loop, short enough for the first-level cache.
RUN = 2048
# Most rows of a piece. NumPy adds rows one after the other, so the error grows with their number.
_ROWS = 256


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


def in_runs(x: Array) -> Array:
    """Reshapes [..., channels] to a matrix with longer rows, each of several rows of channels.

    In an operation with a vector, NumPy starts a loop for each row. A row of channels alone is short, so its loop is
    slow.
    """
    channels = x.shape[-1]
    count = math.prod(x.shape[:-1]) if namespace_of(x) is np else 1
    most = min(count, RUN // max(channels, 1))
    times = next((times for times in range(most, 1, -1) if count % times == 0), 1)
    return x.reshape(-1, times * channels)


def along(runs: Array, vector: Array) -> Array:
    """Repeats [channels] to the length of a row of `in_runs`."""
    times = runs.shape[1] // max(len(vector), 1)
    return vector if times == 1 else namespace_of(runs).tile(vector, times)


def pieces(rows: Array, *, arrays: int) -> list[slice]:
    """Cuts the rows of a matrix into pieces that fit the cache. On a GPU, there is one piece.

    A piece has at most 256 rows, which bounds the error of its sums. There is at least one piece.

    Args:
        rows: a matrix.
        arrays: number of arrays of this size that are used together.
    """
    if namespace_of(rows) is not np:
        return [slice(None)]
    nbytes = max(arrays * rows.shape[1] * rows.dtype.itemsize, BLOCK // _ROWS)
    return [*blocks(np, len(rows), nbytes)] or [slice(None)]


def joined(like: Array, parts: Sequence[slice], piece: Callable[[slice], Array]) -> Array:
    """Joins the results of a function for each part into one array.

    Args:
        like: an array with the shape and dtype of the result.
        parts: the parts of its first axis.
        piece: returns the values of a part.
    """
    if len(parts) == 1:
        return piece(parts[0])
    whole = namespace_of(like).empty_like(like)
    for part in parts:
        whole[part] = piece(part)
    return whole


def column_sums(x: Array) -> Array:
    """Returns the sums over all axes but the last. Sums of 16-bit floats are float32."""
    rows = in_runs(widened(x))
    return _total((rows[part].sum(axis=0) for part in pieces(rows, arrays=1)), x.shape[-1])


def column_products(pairs: Iterable[tuple[Array, Array]], channels: int) -> Array:
    """Returns [channels]: the sums of a * b over all pairs, without an array of products on a CPU.

    Args:
        pairs: pieces of `in_runs`.
        channels: length of the result.
    """
    return _total((_products(a, b) for a, b in pairs), channels)


def _products(a: Array, b: Array) -> Array:
    xp = namespace_of(a)
    return xp.einsum("ij,ij->j", a, b) if xp is np else (a * b).sum(axis=0)


def _total(sums: Iterable[Array], channels: int) -> Array:
    """Returns [channels]: the total of all pieces, added in float64 so that the error does not grow with the batch."""
    first, *others = sums
    total = first.astype("float64")
    for each in others:
        total += each
    return total.reshape(-1, channels).sum(axis=0).astype(first.dtype, copy=False)


__all__ = [
    "RUN",
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
