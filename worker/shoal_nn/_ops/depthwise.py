"""Depthwise convolutions of NumPy arrays in one pass over memory, compiled by Numba. For GPUs, see `convolve`.

The import takes a second, so callers import the module when they need it. A kernel compiles at its first call, within
about two seconds. Compiled kernels are cached on disk: beside this file, in the user's cache folder, or in
NUMBA_CACHE_DIR. Container images include them, because `compile_kernels` runs when an image is built
(`shoal._numerics.kernels`).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
from numba import types
from numba.np.numpy_support import from_dtype

from shoal._numerics.kernels import prepare
from shoal.program import Array
from shoal_nn._ops.arithmetic import widened
from shoal_nn._ops.windows import Windows


def convolve_each(x: Array, kernel: Array, windows: Windows) -> Array:
    """Returns the same as `convolve.convolve_each`."""
    seen, weights = _readable(x), _readable(kernel.astype(x.dtype, copy=False))
    y = np.empty((len(x), *windows.outputs, x.shape[3]), seen.dtype)
    _prepare(_convolve, seen.dtype)
    _convolve(seen, weights, y, windows.strides, windows.before)
    return y.astype(x.dtype, copy=False)


def gradients_each(
    x: Array, kernel: Array, dy: Array, windows: Windows, input_gradient: bool
) -> tuple[Array, Array | None]:
    """Returns the same as `convolve.gradients_each`.

    Args:
        x: [batch, height, width, channels], the input.
        kernel: [window height, window width, channels].
        dy: [batch, *outputs, channels], the gradient with respect to the output.
        windows: the windows of the convolution.
        input_gradient: whether to return the gradient with respect to the input; otherwise it is None.
    """
    seen, weights = _readable(x), _readable(kernel.astype(x.dtype, copy=False))
    by_kernel, dx = np.zeros(kernel.shape, seen.dtype), np.zeros(x.shape, seen.dtype)
    _prepare(_gradients, seen.dtype)
    _gradients(seen, weights, _readable(dy), by_kernel, dx, windows.strides, windows.before)
    return by_kernel, dx.astype(x.dtype, copy=False) if input_gradient else None


def compile_kernels() -> None:
    """Compiles the kernels for all types that they are called with, or loads them from the cache, and runs none."""
    for dtype in (np.float32, np.float64):
        _prepare(_convolve, np.dtype(dtype))
        _prepare(_gradients, np.dtype(dtype))


@cache
def _prepare(kernel: Any, dtype: np.dtype[Any]) -> None:
    number = from_dtype(dtype)
    pair: Any = types.UniTuple(types.intp, 2)  # type: ignore[no-untyped-call]
    seen, weights = (types.Array(number, axes, "C", readonly=True) for axes in (4, 3))
    y, by_kernel = (types.Array(number, axes, "C") for axes in (4, 3))
    arrays = (seen, weights, y) if kernel is _convolve else (seen, weights, seen, by_kernel, y)
    prepare(kernel, [(*arrays, pair, pair)])


def _readable(x: Array) -> Array:
    """Returns a read-only contiguous view, so that a kernel compiles once for each dtype."""
    view = np.ascontiguousarray(widened(x)).view()
    view.flags.writeable = False
    return view


def _kernel(function: Callable[..., None]) -> Any:
    return numba.njit(nogil=True, fastmath={"contract"}, error_model="numpy", cache=True)(function)


@_kernel
def _convolve(x: Any, kernel: Any, y: Any, strides: Any, before: Any) -> None:
    (_, inputs_down, inputs_across, channels), (height, width) = x.shape, kernel.shape[:2]
    for n in range(y.shape[0]):
        for i in range(y.shape[1]):
            top = i * strides[0] - before[0]
            for j in range(y.shape[2]):
                left = j * strides[1] - before[1]
                out = y[n, i, j]
                out[:] = 0
                # Only the taps inside the image.
                for a in range(max(0, -top), min(height, inputs_down - top)):
                    for b in range(max(0, -left), min(width, inputs_across - left)):
                        seen, weight = x[n, top + a, left + b], kernel[a, b]
                        for c in range(channels):
                            out[c] += seen[c] * weight[c]


@_kernel
def _gradients(x: Any, kernel: Any, dy: Any, by_kernel: Any, dx: Any, strides: Any, before: Any) -> None:
    """Adds to by_kernel and dx, which must be zeros."""
    (_, inputs_down, inputs_across, channels), (height, width) = x.shape, kernel.shape[:2]
    of_one = np.empty_like(by_kernel)  # sums over one sample; short sums have smaller rounding errors
    for n in range(dy.shape[0]):
        of_one[:] = 0
        for i in range(dy.shape[1]):
            top = i * strides[0] - before[0]
            for j in range(dy.shape[2]):
                left = j * strides[1] - before[1]
                part = dy[n, i, j]
                for a in range(max(0, -top), min(height, inputs_down - top)):
                    for b in range(max(0, -left), min(width, inputs_across - left)):
                        seen, weight = x[n, top + a, left + b], kernel[a, b]
                        found, back = of_one[a, b], dx[n, top + a, left + b]
                        for c in range(channels):
                            found[c] += seen[c] * part[c]
                            back[c] += weight[c] * part[c]
        by_kernel += of_one


__all__ = ["compile_kernels", "convolve_each", "gradients_each"]
