"""Where the windows of a convolution or a pooling lie, and images with their surroundings. No arithmetic."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from shoal.program import Array
from shoal_worker.arrays import Namespace

# Of height and width; a lone number is both.
Pair = int | tuple[int, int]
# "same", "valid", or zeros around: rows above and below, columns left and right; a pair has as many on either side.
Padding = Literal["same", "valid"] | int | tuple[int, int] | tuple[tuple[int, int], tuple[int, int]]

# Bytes of a block that a CPU's core finds again in its cache. A GPU has none like it, and each step has its price.
BLOCK, _GPU_BLOCK = 2 << 20, 256 << 20


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows over images of one size.

    Attributes:
        inputs: height and width of the images.
        outputs: windows down and across; 0 or less where an image is too small.
        window: their height and width.
        strides: from one to the next.
        before: rows above the image, and columns left of it.
        after: rows below, and columns right of it.
    """

    inputs: tuple[int, int]
    outputs: tuple[int, int]
    window: tuple[int, int]
    strides: tuple[int, int]
    before: tuple[int, int]
    after: tuple[int, int]

    @property
    def padded(self) -> tuple[int, int]:
        """Height and width of an image with its surroundings."""
        height, width = (sum(lengths) for lengths in zip(self.before, self.inputs, self.after, strict=True))
        return height, width

    @property
    def interior(self) -> tuple[slice, slice]:
        """Where the image is in these."""
        (top, left), (height, width) = self.before, self.inputs
        return slice(top, top + height), slice(left, left + width)

    @property
    def exact(self) -> bool:
        """Whether an image has no surroundings."""
        return self.padded == self.inputs

    def taps(self) -> Iterator[tuple[int, int, tuple[slice, slice, slice]]]:
        """Each place in a window, with the index of all windows' elements there in [batch, *padded, ...]."""
        (down, across), (rows, columns) = self.strides, self.outputs
        for i in range(self.window[0]):
            for j in range(self.window[1]):
                which = slice(i, i + down * (rows - 1) + 1, down), slice(j, j + across * (columns - 1) + 1, across)
                yield i, j, (slice(None), *which)

    def pad(self, xp: Namespace, x: Array, filling: Any, dtype: np.dtype[Any]) -> Array:
        """Images [batch, *inputs, channels] with surroundings; the array itself where there is nothing to do."""
        if self.exact:
            return x.astype(dtype, copy=False)
        padded = xp.full((len(x), *self.padded, x.shape[3]), filling, dtype)
        padded[:, *self.interior] = x
        return padded


def windows_over(inputs: tuple[int, int], window: Pair, strides: Pair, padding: Padding) -> Windows:
    """Lays windows over images of a height and width."""
    sizes, steps = pair(window), pair(strides)
    rows = [_along(inputs[axis], sizes[axis], steps[axis], _sides(padding, axis)) for axis in (0, 1)]
    (above, below, down), (left, right, across) = rows
    return Windows(inputs, (down, across), sizes, steps, (above, left), (below, right))


def pair(length: Pair) -> tuple[int, int]:
    """Of height and width."""
    height, width = (length, length) if isinstance(length, int) else length
    return height, width


def explicit(padding: Padding) -> tuple[int, ...]:
    """All lengths that a padding names."""
    return () if isinstance(padding, str) else tuple(side for axis in (0, 1) for side in _given(padding, axis))


def blocks(xp: Namespace, count: int, nbytes: int, least: int = 0) -> Iterator[slice]:
    """Cuts a batch so that a block's working memory stays in the cache: one of all of it is twice as slow.

    Args:
        xp: the namespace of the arrays.
        count: samples.
        nbytes: of working memory, for each.
        least: bytes that are worth as much: of what is read or written anew with every block.
    """
    length = max(1, max(BLOCK if xp is np else _GPU_BLOCK, least) // max(nbytes, 1))
    for start in range(0, count, length):
        yield slice(start, min(start + length, count))


def _sides(padding: Padding, axis: int) -> tuple[int, int] | None:
    """Before and after; None for what the strides decide."""
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
    """Before, after and the number of windows along one axis."""
    if sides is None:  # as TensorFlow has it: as many windows as strides fit, the odd one of the padding behind
        count = -(-length // stride)
        total = max((count - 1) * stride + window - length, 0)
        return total // 2, total - total // 2, count
    return *sides, (length + sum(sides) - window) // stride + 1


__all__ = ["BLOCK", "Padding", "Pair", "Windows", "blocks", "explicit", "pair", "windows_over"]
