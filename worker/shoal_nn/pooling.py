"""Pooling layers, over windows of images and over whole images."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from shoal.program import Array
from shoal_nn._ops import Padding, Pair, Windows, blocks, widened
from shoal_nn._windowed import Windowed
from shoal_nn.layer import Shape, StatelessLayer, Train
from shoal_worker.arrays import namespace_of


@dataclass(frozen=True)
class _Pooling(Windowed, StatelessLayer):
    window: Pair = 2
    strides: Pair | None = None
    padding: Padding = "valid"

    def __post_init__(self) -> None:
        self._check_windows(overlapping=True)  # a window of padding only has no maximum

    def output_shape(self, shape: Shape) -> Shape:
        return (*self._windows(shape).outputs, shape[2])


@dataclass(frozen=True)
class MaxPool(_Pooling):
    """Maximum of each window of a channel. If several elements are the maximum, the first one gets dy.

    Args:
        window: height and width, or one number for both.
        strides: distance between windows; None means the window's size, so that windows do not overlap.
        padding: as for `Conv2D`, but less than the window; padding is never the maximum.

    Raises:
        InvalidLayer: an argument is out of range.
    """

    def _value(self, x: Array, train: Train) -> tuple[Array, Callable[[Array], Array]]:  # noqa: ARG002 - acts the same
        xp, windows = namespace_of(x), self._windows(x.shape[1:])
        padded = windows.pad(xp, x, -math.inf, x.dtype)
        taps = [index for _, _, index in windows.taps()]
        y = padded[taps[0]].copy()
        for index in taps[1:]:
            xp.maximum(y, padded[index], out=y)

        def pull(dy: Array) -> Array:
            dx = xp.zeros(padded.shape, dy.dtype)
            for which in blocks(xp, len(x), 4 * math.prod(padded.shape[1:]) * padded.itemsize):
                seen, largest, part, found = padded[which], y[which], dy[which], dx[which]
                open_ = xp.ones(largest.shape, bool)
                for index in taps:
                    hit = seen[index] == largest
                    hit &= open_
                    open_ ^= hit
                    found[index] += part * hit.astype(dy.dtype)
            return dx[:, *windows.interior]

        return y, pull


@dataclass(frozen=True)
class AvgPool(_Pooling):
    """Mean of each window of a channel.

    Args:
        window: height and width, or one number for both.
        strides: distance between windows; None means the window's size, so that windows do not overlap.
        padding: as for `Conv2D`, but less than the window.
        count_padding: whether the mean includes the padding's zeros, as by default in PyTorch. Otherwise it is over the
            elements of the image, as in TensorFlow.

    Raises:
        InvalidLayer: an argument is out of range.
    """

    count_padding: bool = False

    def _value(self, x: Array, train: Train) -> tuple[Array, Callable[[Array], Array]]:  # noqa: ARG002 - acts the same
        xp, windows = namespace_of(x), self._windows(x.shape[1:])
        wide = widened(x)
        padded = windows.pad(xp, wide, 0, wide.dtype)
        taps = [index for _, _, index in windows.taps()]
        total = xp.zeros((len(x), *windows.outputs, x.shape[3]), wide.dtype)
        for index in taps:
            total += padded[index]
        share = self._share(wide, windows)

        def pull(dy: Array) -> Array:
            part = widened(dy) * share
            dx = xp.zeros(padded.shape, wide.dtype)
            for index in taps:
                dx[index] += part
            return dx[:, *windows.interior].astype(x.dtype, copy=False)

        return (total * share).astype(x.dtype, copy=False), pull

    def _share(self, x: Array, windows: Windows) -> Array:
        """Returns [1, *outputs, 1]: the weight of an element in each window's mean."""
        xp = namespace_of(x)
        shape = (1, *windows.padded, 1) if self.count_padding else (1, *windows.inputs, 1)
        counted = xp.ones(shape, x.dtype)
        if not self.count_padding:
            counted = windows.pad(xp, counted, 0, x.dtype)
        return 1 / sum(counted[index] for _, _, index in windows.taps())


@dataclass(frozen=True)
class GlobalAvgPool(StatelessLayer):
    """Mean of each channel: [batch, ..., channels] to [batch, channels]."""

    def output_shape(self, shape: Shape) -> Shape:
        self._require(len(shape) > 1, shape, "at least two axes: (..., channels)")
        return shape[-1:]

    def _value(self, x: Array, train: Train) -> tuple[Array, Callable[[Array], Array]]:  # noqa: ARG002 - acts the same
        count = math.prod(x.shape[1:-1])
        mean = widened(x).reshape(len(x), count, x.shape[-1]).mean(axis=1)

        def pull(dy: Array) -> Array:
            part = (widened(dy) / count).astype(x.dtype, copy=False)
            part = part.reshape(len(x), *(1 for _ in x.shape[1:-1]), x.shape[-1])
            return namespace_of(x).broadcast_to(part, x.shape)

        return mean.astype(x.dtype, copy=False), pull


@dataclass(frozen=True)
class GlobalMaxPool(StatelessLayer):
    """Maximum of each channel: [batch, ..., channels] to [batch, channels]. The first of equal maxima gets dy."""

    def output_shape(self, shape: Shape) -> Shape:
        self._require(len(shape) > 1, shape, "at least two axes: (..., channels)")
        return shape[-1:]

    def _value(self, x: Array, train: Train) -> tuple[Array, Callable[[Array], Array]]:  # noqa: ARG002 - acts the same
        xp = namespace_of(x)
        flat = x.reshape(len(x), -1, x.shape[-1])
        which = flat.argmax(axis=1)[:, None]

        def pull(dy: Array) -> Array:
            hit = xp.arange(flat.shape[1])[:, None] == which
            return (hit * dy[:, None]).astype(x.dtype, copy=False).reshape(x.shape)

        return xp.take_along_axis(flat, which, axis=1)[:, 0], pull


__all__ = ["AvgPool", "GlobalAvgPool", "GlobalMaxPool", "MaxPool"]
