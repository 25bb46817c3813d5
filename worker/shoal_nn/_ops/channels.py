"""Sums over all axes but the last, the channels, and the two maps of BatchNorm.

On a CPU, they work on pieces of arrays that fit the cache. On a GPU, `channels_on_gpu` has a kernel for each. Values in
float16 and bfloat16 are computed in float32, and sums of them are float32.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from shoal.program import Array
from shoal_nn._ops import channels_on_gpu
from shoal_nn._ops.arithmetic import widened
from shoal_nn._ops.windows import BLOCK, blocks
from shoal_worker.arrays import namespace_of

# Most elements of a run: long enough to amortize the start of a loop, short enough for the first-level cache.
_RUN = 2048
# Most rows of a piece. NumPy adds rows one after the other, so the error grows with their number.
_ROWS = 256


def column_sums(x: Array) -> Array:
    """Returns [channels]: the sums over all axes but the last."""
    if namespace_of(x) is not np:
        return channels_on_gpu.column_sums(x)
    rows = _in_runs(widened(x))
    return _total((rows[part].sum(axis=0) for part in _pieces(rows, arrays=1)), x.shape[-1])


def centered_squares(x: Array, mean: Array) -> Array:
    """Returns [channels]: the sums of (x - mean)^2 over all axes but the last."""
    if namespace_of(x) is not np:
        return channels_on_gpu.centered_squares(x, mean)
    runs = _Runs.of(x, mean)
    return _total((np.einsum("ij,ij->j", each, each) for each in runs.centered()), x.shape[-1])


def gradient_sums(dy: Array, x: Array, mean: Array) -> tuple[Array, Array]:
    """Returns two arrays [channels]: the sums of dy and of dy * (x - mean) over all axes but the last."""
    if namespace_of(x) is not np:
        return channels_on_gpu.gradient_sums(dy, x, mean)
    runs = _Runs.of(x, mean)
    slopes = widened(dy).reshape(runs.rows.shape)
    pairs = zip(runs.parts, runs.centered(), strict=True)
    products = (np.einsum("ij,ij->j", slopes[part], each) for part, each in pairs)
    return column_sums(dy), _total(products, x.shape[-1])


def scaled(x: Array, mean: Array, factor: Array, bias: Array) -> Array:
    """Returns (x - mean) * factor + bias, of the shape and dtype of x.

    Args:
        x: [..., channels].
        mean: [channels].
        factor: [channels].
        bias: [channels].
    """
    if namespace_of(x) is not np:
        return channels_on_gpu.scaled(x, mean, factor, bias)
    runs = _Runs.of(x, mean)
    factor, bias = _along(runs.rows, factor), _along(runs.rows, bias)

    def piece(_: slice, y: Array) -> Array:
        y *= factor
        y += bias
        return y

    return runs.mapped(piece).astype(x.dtype, copy=False).reshape(x.shape)


def input_gradient(dy: Array, x: Array, mean: Array, slope: Array, shift: Array, factor: Array) -> Array:
    """Returns ((x - mean) * slope + dy - shift) * factor, of the shape and dtype of x.

    Args:
        dy: [..., channels].
        x: [..., channels].
        mean: [channels].
        slope: [channels].
        shift: [channels].
        factor: [channels].
    """
    if namespace_of(x) is not np:
        return channels_on_gpu.input_gradient(dy, x, mean, slope, shift, factor)
    runs = _Runs.of(x, mean)
    slopes = widened(dy).reshape(runs.rows.shape)
    slope, shift, factor = (_along(runs.rows, each) for each in (slope, shift, factor))

    def piece(part: slice, dx: Array) -> Array:
        dx *= slope
        dx += slopes[part]
        dx -= shift
        dx *= factor
        return dx

    return runs.mapped(piece).astype(x.dtype, copy=False).reshape(x.shape)


@dataclass(frozen=True)
class Moving:
    """How BatchNorm's running statistics follow those of a batch.

    Args:
        count: values of a channel in the batch.
        divisor: of the sums of squares in the running variance.
        momentum: weight of the batch.
        epsilon: added to the batch's variance.
    """

    count: int
    divisor: int
    momentum: float
    epsilon: float


def batch_statistics(
    squares: Array, mean: Array, scale: Array, running: tuple[Array, Array], moving: Moving
) -> Sequence[Array]:
    """Returns 1 / sqrt(var + epsilon), the same times scale, and the moved running mean and variance.

    Args:
        squares: [channels], the sums of (x - mean)^2.
        mean: [channels], of the batch.
        scale: [channels], of the layer.
        running: the running mean and variance, each [channels].
        moving: how they move.
    """
    if namespace_of(squares) is not np:
        return channels_on_gpu.batch_statistics(squares, mean, scale, running, astuple(moving))
    var = squares / moving.count
    inverse = 1 / np.sqrt(var + moving.epsilon)
    share, last = moving.momentum, var * (moving.count / moving.divisor)
    moved = [(1 - share) * old + share * new for old, new in zip(running, (mean, last), strict=True)]
    return [inverse, inverse * scale.astype(inverse.dtype, copy=False), *moved]


def slope_and_shift(products: Array, sums: Array, inverse: Array, count: int) -> Sequence[Array]:
    """Returns the slope and the shift of `input_gradient`.

    Args:
        products: [channels], the sums of dy * (x - mean) over the batch.
        sums: [channels], the sums of dy over the batch.
        inverse: [channels], 1 / sqrt(var + epsilon).
        count: values of a channel in the batch.
    """
    if namespace_of(products) is not np:
        return channels_on_gpu.slope_and_shift(products, sums, inverse, count)
    return products * inverse * inverse / -count, sums / count


@dataclass(frozen=True)
class _Runs:
    """A NumPy array as a matrix with long rows, its pieces, and the mean along a row.

    The array is centered again in each operation: a piece stays in the cache, and no second array is kept.
    """

    rows: Array
    parts: Sequence[slice]
    middle: Array

    @classmethod
    def of(cls, x: Array, mean: Array) -> "_Runs":
        rows = _in_runs(widened(x))
        return cls(rows, _pieces(rows, arrays=3), _along(rows, mean))

    def centered(self) -> Iterator[Array]:
        return (self.rows[part] - self.middle for part in self.parts)

    def mapped(self, piece: Callable[[slice, Array], Array]) -> Array:
        """Joins the results of a function of each part and its centered values."""
        if len(self.parts) == 1:
            return piece(self.parts[0], self.rows[self.parts[0]] - self.middle)
        whole = np.empty_like(self.rows)
        for part in self.parts:
            whole[part] = piece(part, self.rows[part] - self.middle)
        return whole


def _in_runs(x: Array) -> Array:
    """Reshapes [..., channels] to a matrix with longer rows, each of several rows of channels.

    In an operation with a vector, NumPy starts a loop for each row. A row of channels alone is short, so its loop is
    slow.
    """
    channels, count = x.shape[-1], math.prod(x.shape[:-1])
    most = min(count, _RUN // max(channels, 1))
    times = next((times for times in range(most, 1, -1) if count % times == 0), 1)
    return x.reshape(-1, times * channels)


def _along(runs: Array, vector: Array) -> Array:
    """Repeats [channels] to the length of a row of `_in_runs`, in its dtype."""
    vector = vector.astype(runs.dtype, copy=False)
    times = runs.shape[1] // max(len(vector), 1)
    return vector if times == 1 else np.tile(vector, times)


def _pieces(rows: Array, *, arrays: int) -> list[slice]:
    """Cuts the rows of a matrix into pieces that fit the cache.

    A piece has at most 256 rows, which bounds the error of its sums. There is at least one piece.

    Args:
        rows: a matrix.
        arrays: number of arrays of this size that are used together.
    """
    nbytes = max(arrays * rows.shape[1] * rows.dtype.itemsize, BLOCK // _ROWS)
    return [*blocks(np, len(rows), nbytes)] or [slice(None)]


def _total(sums: Iterable[Array], channels: int) -> Array:
    """Returns [channels]: the total of all pieces, added in float64 so that the error does not grow with the batch."""
    first, *others = sums
    total = first.astype("float64")
    for each in others:
        total += each
    return total.reshape(-1, channels).sum(axis=0).astype(first.dtype, copy=False)


__all__ = [
    "Moving",
    "batch_statistics",
    "centered_squares",
    "column_sums",
    "gradient_sums",
    "input_gradient",
    "scaled",
    "slope_and_shift",
]
