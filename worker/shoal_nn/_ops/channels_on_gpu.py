"""The functions of `channels` for CuPy arrays: kernels in channels.cu.

CuPy's own sum over the first axis of [rows, channels] has one block of threads for 32 channels. So 64 channels occupy
two of the hundred multiprocessors of a GPU. These kernels divide the rows among blocks, too.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.program import Array
from shoal_worker.arrays import Namespace, namespace_of

_SOURCE = Path(__file__).with_name("channels.cu")
# The kernels' names of dtypes.
_STORED = {"float16": "Half", "bfloat16": "Bfloat16", "float32": "float", "float64": "double"}
# Most bytes that a thread loads at once, and threads of a block.
_LOAD_BYTES, _THREADS = 16, 256
# Most blocks, and fewest rows of a thread. They are the same for all GPUs, so that sums are, too.
_BLOCKS, _ROWS = 1056, 8


def column_sums(x: Array) -> Array:
    """Returns the sums over all axes but the last."""
    [found] = _Matrix(x).sums("sums")
    return found


def centered_squares(x: Array, mean: Array) -> Array:
    """Returns the sums of (x - mean)^2 over all axes but the last."""
    [found] = _Matrix(x).sums("squares", vectors=[mean])
    return found


def gradient_sums(dy: Array, x: Array, mean: Array) -> tuple[Array, Array]:
    """Returns the sums of dy and of dy * (x - mean) over all axes but the last."""
    sums, products = _Matrix(x).sums("gradient_sums", [dy], [mean], results=2)
    return sums, products


def scaled(x: Array, mean: Array, factor: Array, bias: Array) -> Array:
    """Returns (x - mean) * factor + bias, of the shape and dtype of x."""
    return _Matrix(x).mapped("scaled", [], [mean, factor, bias])


def input_gradient(dy: Array, x: Array, mean: Array, slope: Array, shift: Array, factor: Array) -> Array:
    """Returns ((x - mean) * slope + dy - shift) * factor, of the shape and dtype of x."""
    return _Matrix(x).mapped("input_gradient", [dy], [mean, slope, shift, factor])


def batch_statistics(
    squares: Array, mean: Array, scale: Array, running: tuple[Array, Array], numbers: Sequence[float]
) -> Sequence[Array]:
    """Returns the same as `channels.batch_statistics`. The numbers are the fields of `Moving` in their order."""
    return _by_channel("statistics", [squares, mean, scale, *running], numbers, results=4)


def slope_and_shift(products: Array, sums: Array, inverse: Array, count: int) -> Sequence[Array]:
    """Returns the same as `channels.slope_and_shift`."""
    return _by_channel("slope_and_shift", [products, sums, inverse], (float(count),), results=2)


def _by_channel(kernel: str, vectors: Sequence[Array], numbers: Sequence[float], results: int) -> Sequence[Array]:
    """Runs a kernel on vectors of the channels, in the dtype of the first one."""
    first = vectors[0]
    xp, wide, channels = namespace_of(first), first.dtype, len(first)
    found = xp.empty((results, channels), wide)
    arrays = [xp.ascontiguousarray(vector, wide) for vector in vectors]
    _kernels(xp, wide, wide, 1, first.device.id)[kernel](
        (math.ceil(channels / _THREADS),), (_THREADS,), (*arrays, found, *map(np.float64, numbers), np.int32(channels))
    )
    return list(found)


@dataclass(frozen=True)
class _Launch:
    """How kernels run on a matrix.

    Args:
        threads: of a block, across the channels and down the rows.
        blocks: the same for blocks.
        shared_bytes: shared memory of a block.
        sizes: rows and channels, the last arguments of a kernel.
        kernels: the kernels for the dtype.
        wide: dtype in which they compute.
    """

    threads: tuple[int, int]
    blocks: tuple[int, int]
    shared_bytes: int
    sizes: tuple[np.int64, np.int32]
    kernels: "_Kernels"
    wide: np.dtype[Any]


class _Matrix:
    """An array [..., channels] as a matrix of the kernels."""

    def __init__(self, x: Array) -> None:
        self._xp: Namespace = namespace_of(x)
        self._x = self._xp.ascontiguousarray(x)
        self._channels = x.shape[-1]
        nbytes = x.dtype.itemsize
        # A load is aligned to its size. An array that is a part of another one can begin anywhere.
        width = math.gcd(self._channels, _LOAD_BYTES // nbytes)
        self._width = width if self._x.data.ptr % (width * nbytes) == 0 else 1
        self._launch = _launch(self._xp, x.dtype, self._width, math.prod(x.shape[:-1]), self._channels, x.device.id)

    def sums(
        self, kernel: str, others: Sequence[Array] = (), vectors: Sequence[Array] = (), results: int = 1
    ) -> Sequence[Array]:
        """Runs a kernel that sums over rows, and adds the sums of its blocks.

        Args:
            kernel: its name in channels.cu.
            others: arrays like x, the kernel's arguments before x.
            vectors: of the channels, the kernel's arguments after x.
            results: number of sums.
        """
        parts, columns = self._launch.blocks[1], results * self._channels
        partial = self._xp.empty((parts, columns), np.float64)
        self._run(kernel, others, vectors, partial)
        found = self._xp.empty((results, self._channels), self._launch.wide)
        warps = _THREADS // 32
        self._launch.kernels["total"](
            (math.ceil(columns / warps),), (_THREADS,), (partial, found, np.int32(parts), np.int32(columns))
        )
        return list(found)

    def mapped(self, kernel: str, others: Sequence[Array], vectors: Sequence[Array]) -> Array:
        """Runs a kernel that computes each element of the result from one element of each array.

        The arguments are those of `sums`.
        """
        found = self._xp.empty(self._x.shape, self._x.dtype)
        self._run(kernel, others, vectors, found)
        return found

    def _run(self, kernel: str, others: Sequence[Array], vectors: Sequence[Array], result: Array) -> None:
        launch = self._launch
        alike = [self._alike(other) for other in others]
        middles = [self._xp.ascontiguousarray(vector, launch.wide) for vector in vectors]
        launch.kernels[kernel](
            launch.blocks,
            launch.threads,
            (*alike, self._x, *middles, result, *launch.sizes),
            shared_mem=launch.shared_bytes,
        )

    def _alike(self, other: Array) -> Array:
        """Returns the array with the dtype, order and alignment of x."""
        other = self._xp.ascontiguousarray(other, self._x.dtype)
        return other if other.data.ptr % (self._width * other.dtype.itemsize) == 0 else other.copy()


@functools.lru_cache(1024)
def _launch(xp: Namespace, dtype: np.dtype[Any], width: int, rows: int, channels: int, device: int) -> _Launch:
    packs = channels // width
    across = min(32, 1 << max(packs - 1, 0).bit_length())
    down = _THREADS // across
    columns = math.ceil(packs / across)
    parts = max(1, min(_BLOCKS // columns, math.ceil(rows / (down * _ROWS))))
    wide = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    return _Launch(
        (across, down),
        (columns, parts),
        _THREADS * width * np.dtype(np.float64).itemsize,
        (np.int64(rows), np.int32(channels)),
        _kernels(xp, dtype, wide, width, device),
        wide,
    )


class _Kernels(dict[str, Any]):
    """The kernels of a module by name."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __missing__(self, name: str) -> Any:
        self[name] = kernel = self._module.get_function(name)
        return kernel


@functools.cache
def _kernels(xp: Namespace, dtype: np.dtype[Any], wide: np.dtype[Any], width: int, device: int) -> _Kernels:  # noqa: ARG001 - loaded for a device
    stored, computed = _STORED[dtype.name], _STORED[wide.name]
    options = ("-std=c++11", f"-DSTORED={stored}", f"-DWIDE={computed}", f"-DWIDTH={width}")
    return _Kernels(xp.RawModule(code=_SOURCE.read_text(), options=options))


__all__ = [
    "batch_statistics",
    "centered_squares",
    "column_sums",
    "gradient_sums",
    "input_gradient",
    "scaled",
    "slope_and_shift",
]
