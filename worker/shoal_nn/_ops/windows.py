"""Positions of the windows of convolutions and pooling, and padding of images."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from shoal.program import Array
from shoal_worker.arrays import Namespace

# Height and width; a single number stands for both.
Pair = int | tuple[int, int]
# "same", "valid", or the padding in rows and columns: one number, (rows, columns), or ((above, below), (left, right)).
Padding = Literal["same", "valid"] | int | tuple[int, int] | tuple[tuple[int, int], tuple[int, int]]

# Bytes of a block: on a CPU, what fits a core's cache; on a GPU, large, because each launch has a cost.
BLOCK, _GPU_BLOCK = 2 << 20, 256 << 20


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows over images of one size.

    Attributes:
        inputs: height and width of the images.
        outputs: number of windows down and across; 0 or less if an image is too small.
        window: height and width of a window.
        strides: distance between windows, down and across.
        before: padding rows above the image, and padding columns left of it.
        after: padding rows below, and padding columns right of it.
    """

    inputs: tuple[int, int]
    outputs: tuple[int, int]
    window: tuple[int, int]
    strides: tuple[int, int]
    before: tuple[int, int]
    after: tuple[int, int]

    @property
    def padded(self) -> tuple[int, int]:
        """Height and width of a padded image."""
        height, width = (sum(lengths) for lengths in zip(self.before, self.inputs, self.after, strict=True))
        return height, width

    @property
    def interior(self) -> tuple[slice, slice]:
        """Position of the image in the padded image."""
        (top, left), (height, width) = self.before, self.inputs
        return slice(top, top + height), slice(left, left + width)

    @property
    def exact(self) -> bool:
        """Whether there is no padding."""
        return self.padded == self.inputs

    def taps(self) -> Iterator[tuple[int, int, tuple[slice, slice, slice]]]:
        """Yields each position in a window, and the index that selects it in all windows of [batch, *padded, ...]."""
        (down, across), (rows, columns) = self.strides, self.outputs
        for i in range(self.window[0]):
            for j in range(self.window[1]):
                which = slice(i, i + down * (rows - 1) + 1, down), slice(j, j + across * (columns - 1) + 1, across)
                yield i, j, (slice(None), *which)

    def pad(self, xp: Namespace, x: Array, filling: Any, dtype: np.dtype[Any]) -> Array:
        """Pads images; returns the array itself if nothing has to change.

        Args:
            xp: the namespace of x.
            x: [batch, *inputs, channels].
            filling: value of the padding.
            dtype: dtype of the result.
        """
        if self.exact:
            return x.astype(dtype, copy=False)
        padded = xp.full((len(x), *self.padded, x.shape[3]), filling, dtype)
        padded[:, *self.interior] = x
        return padded


def windows_over(inputs: tuple[int, int], window: Pair, strides: Pair, padding: Padding) -> Windows:
    """Returns the windows over images.

    Args:
        inputs: height and width of the images.
        window: height and width of a window.
        strides: distance between windows.
        padding: padding of the images.
    """
    sizes, steps = pair(window), pair(strides)
    rows = [_along(inputs[axis], sizes[axis], steps[axis], _sides(padding, axis)) for axis in (0, 1)]
    (above, below, down), (left, right, across) = rows
    return Windows(inputs, (down, across), sizes, steps, (above, left), (below, right))


def pair(length: Pair) -> tuple[int, int]:
    """Returns (height, width)."""
    height, width = (length, length) if isinstance(length, int) else length
    return height, width


def explicit(padding: Padding) -> tuple[int, ...]:
    """Returns all lengths of an explicit padding: above, below, left, right."""
    return () if isinstance(padding, str) else tuple(side for axis in (0, 1) for side in _given(padding, axis))


def blocks(xp: Namespace, count: int, nbytes: int, least: int = 0) -> Iterator[slice]:
    """Cuts a batch into blocks whose working memory fits the cache, which is twice as fast as one block.

    Args:
        xp: the namespace of the arrays.
        count: number of samples.
        nbytes: working memory of a sample, in bytes.
        least: smallest working memory of a block, in bytes. Pass the size of the data that every block uses completely,
            such as a kernel.
    """
    length = max(1, max(BLOCK if xp is np else _GPU_BLOCK, least) // max(nbytes, 1))
    for start in range(0, count, length):
        yield slice(start, min(start + length, count))


def _sides(padding: Padding, axis: int) -> tuple[int, int] | None:
    """Returns the padding before and after; None for "same"."""
    if padding == "same":
        return None
    return (0, 0) if padding == "valid" else _given(padding, axis)


def _given(padding: Padding, axis: int) -> tuple[int, int]:
    if isinstance(padding, int):
        return padding, padding
    side = padding[axis]
    assert not isinstance(side, str)
    return pair(side)


def _along(length: int, window: int, stride: int, sides: tuple[int, int] | None) -> tuple[int, int, int]:
    """Returns the padding before and after, and the number of windows, along one axis."""
    if sides is None:  # as in TensorFlow: the odd row or column of padding is after the image
        count = -(-length // stride)
        total = max((count - 1) * stride + window - length, 0)
        return total // 2, total - total // 2, count
    return *sides, (length + sum(sides) - window) // stride + 1


__all__ = ["BLOCK", "Padding", "Pair", "Windows", "blocks", "explicit", "pair", "windows_over"]
