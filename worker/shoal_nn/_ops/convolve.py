"""Convolutions and their gradients, as matrix products over windows.

A depthwise convolution is computed as a sum over the positions of the kernel instead.

Windows are copied to the rows of a matrix (im2col), for as many samples at a time as fit the cache. The pullback copies
the windows again. Until the pullback runs, only the input is kept. All blocks of samples share one buffer. The
allocator keeps the buffer from step to step (`shoal.tune_allocator`, CuPy's pool).
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from shoal.program import Array
from shoal_nn._ops.arithmetic import product_dtype, widened
from shoal_nn._ops.windows import Windows, blocks
from shoal_worker.arrays import Namespace, namespace_of


def convolve(x: Array, kernel: Array, windows: Windows) -> Array:
    """Returns y, where y[n, i, j, f] is the sum of x * kernel[..., f] over the window at (i, j) and its channels.

    Args:
        x: [batch, height, width, channels].
        kernel: [window height, window width, channels, filters].
        windows: the windows over images of that height and width.

    Returns:
        [batch, *outputs, filters], of the dtype of x.
    """
    xp = namespace_of(x)
    dtype = product_dtype(xp, x.dtype)
    filters = kernel.shape[3]
    matrix = kernel.astype(dtype, copy=False).reshape(-1, filters)
    y = xp.empty((len(x), *windows.outputs, filters), x.dtype)
    for which, rows in _rows(xp, x, windows, dtype, matrix.nbytes):
        out = y[which].reshape(-1, filters)
        if dtype == y.dtype:
            xp.matmul(rows, matrix, out=out)
        else:
            out[...] = xp.matmul(rows, matrix)
    return y


def gradient_by_kernel(x: Array, dy: Array, windows: Windows) -> Array:
    """Returns the gradient with respect to the kernel.

    Args:
        x: [batch, height, width, channels], the input.
        dy: [batch, *outputs, filters], the gradient with respect to the output.
        windows: the windows of the convolution.

    Returns:
        [window height, window width, channels, filters]; for 16-bit floats on a CPU, in float32.
    """
    xp = namespace_of(x)
    dtype = product_dtype(xp, x.dtype)
    channels, filters = x.shape[3], dy.shape[3]
    height, width = windows.window
    found = xp.zeros((height * width * channels, filters), dtype)
    for which, rows in _rows(xp, x, windows, dtype, found.nbytes):
        found += xp.matmul(rows.T, dy[which].reshape(-1, filters).astype(dtype, copy=False))
    return found.reshape(height, width, channels, filters)


def gradient_by_input(kernel: Array, dy: Array, windows: Windows) -> Array:
    """Returns the gradient with respect to the input.

    Args:
        kernel: [window height, window width, channels, filters].
        dy: [batch, *outputs, filters], the gradient with respect to the output.
        windows: the windows of the convolution.

    Returns:
        [batch, *inputs, channels], of the dtype of dy.
    """
    reach = [size - 1 for size in windows.window]
    before = [far - side for far, side in zip(reach, windows.before, strict=True)]
    after = [far - side for far, side in zip(reach, windows.after, strict=True)]
    if windows.strides == (1, 1) and min(*before, *after) >= 0:
        # This is a convolution with the rotated kernel. Reading windows is faster than adding to them.
        turned = kernel[::-1, ::-1].transpose(0, 1, 3, 2)
        back = Windows(
            windows.outputs, windows.inputs, windows.window, (1, 1), (before[0], before[1]), (after[0], after[1])
        )
        return convolve(dy, turned, back)
    return _scatter(kernel, dy, windows)


def _scatter(kernel: Array, dy: Array, windows: Windows) -> Array:
    xp = namespace_of(dy)
    dtype = product_dtype(xp, dy.dtype)
    height, width, channels, filters = kernel.shape
    matrix = kernel.astype(dtype, copy=False).reshape(-1, filters)
    dx = xp.empty((len(dy), *windows.inputs, channels), dy.dtype)
    cost = math.prod(windows.outputs) * len(matrix) * dtype.itemsize
    for which in blocks(xp, len(dy), cost, matrix.nbytes):
        columns = dy[which].reshape(-1, filters).astype(dtype, copy=False) @ matrix.T
        columns = columns.reshape(-1, *windows.outputs, height, width, channels)
        padded = xp.zeros((len(columns), *windows.padded, channels), dtype)
        for i, j, index in windows.taps():
            padded[index] += columns[:, :, :, i, j]
        dx[which] = padded[:, *windows.interior]
    return dx


def _rows(
    xp: Namespace, x: Array, windows: Windows, dtype: np.dtype[Any], kernel_bytes: int
) -> Iterator[tuple[slice, Array]]:
    """Yields blocks of samples with a matrix of their windows, which the next block overwrites."""
    if windows.window == (1, 1) and windows.exact:
        down, across = windows.strides
        yield slice(None), x[:, ::down, ::across].astype(dtype, copy=False).reshape(-1, x.shape[3])
        return
    channels, (height, width), (rows, columns) = x.shape[3], windows.window, windows.outputs
    cost = rows * columns * height * width * channels * dtype.itemsize
    parts = list(blocks(xp, len(x), cost, kernel_bytes))
    longest = max((part.stop - part.start for part in parts), default=0)
    padded = xp.zeros((longest, *windows.padded, channels), dtype)
    matrix = xp.empty((longest, rows, columns, height, width * channels), dtype)
    view = _window_view(xp, padded, windows)
    for which in parts:
        count = which.stop - which.start
        padded[:count, *windows.interior] = x[which]
        matrix[:count] = view[:count]
        yield which, matrix[:count].reshape(-1, height * width * channels)


def _window_view(xp: Namespace, padded: Array, windows: Windows) -> Array:
    """Returns a view [batch, *outputs, window height, window width * channels], contiguous in its last axis."""
    sample, line, place, element = padded.strides
    (down, across), (height, width) = windows.strides, windows.window
    shape = (len(padded), *windows.outputs, height, width * padded.shape[3])
    return xp.lib.stride_tricks.as_strided(padded, shape, (sample, line * down, place * across, line, element))


def convolve_each(x: Array, kernel: Array, windows: Windows) -> Array:
    """Returns the depthwise convolution: y[n, i, j, c] sums over the window only.

    Args:
        x: [batch, height, width, channels].
        kernel: [window height, window width, channels].
        windows: the windows over images of that height and width.

    Returns:
        [batch, *outputs, channels], of the dtype of x.
    """
    xp = namespace_of(x)
    kernel = widened(kernel.astype(x.dtype, copy=False))
    y = xp.empty((len(x), *windows.outputs, x.shape[3]), x.dtype)
    for which in blocks(xp, len(x), _cost_each(x, windows)):
        padded = windows.pad(xp, x[which], 0, kernel.dtype)
        total = xp.zeros((len(padded), *windows.outputs, x.shape[3]), kernel.dtype)
        term = xp.empty_like(total)
        for i, j, index in windows.taps():
            xp.multiply(padded[index], kernel[i, j], out=term)
            total += term
        y[which] = total
    return y


def gradients_each(
    x: Array, kernel: Array, dy: Array, windows: Windows, input_gradient: bool
) -> tuple[Array, Array | None]:
    """Returns the gradients of `convolve_each` with respect to the kernel and the input.

    Args:
        x: [batch, height, width, channels], the input.
        kernel: [window height, window width, channels].
        dy: [batch, *outputs, channels], the gradient with respect to the output.
        windows: the windows of the convolution.
        input_gradient: whether to compute the gradient with respect to the input; otherwise it is None.

    Returns:
        The gradient with respect to the kernel, in float32 for 16-bit floats, and the one with respect to the input.
    """
    xp = namespace_of(x)
    kernel = widened(kernel.astype(x.dtype, copy=False))
    by_kernel = xp.zeros_like(kernel)
    dx = xp.empty_like(x) if input_gradient else None
    for which in blocks(xp, len(x), _cost_each(x, windows)):
        padded, part = windows.pad(xp, x[which], 0, kernel.dtype), widened(dy[which])
        back = xp.zeros(padded.shape, kernel.dtype) if input_gradient else None
        term = xp.empty_like(part)
        for i, j, index in windows.taps():
            xp.multiply(padded[index], part, out=term)
            by_kernel[i, j] += term.reshape(-1, x.shape[3]).sum(axis=0)
            if back is not None:
                xp.multiply(part, kernel[i, j], out=term)
                back[index] += term
        if dx is not None and back is not None:
            dx[which] = back[:, *windows.interior]
    return by_kernel, dx


def _cost_each(x: Array, windows: Windows) -> int:
    """Returns the bytes of a sample: the padded image, the sums and one term."""
    elements = math.prod(windows.padded) + 2 * math.prod(windows.outputs)
    return elements * int(x.shape[3]) * max(int(x.dtype.itemsize), 4)


__all__ = ["convolve", "convolve_each", "gradient_by_input", "gradient_by_kernel", "gradients_each"]
