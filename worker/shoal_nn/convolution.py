"""Convolutions of images, in the order [batch, height, width, channels]."""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.initializers import HeNormal, Initializer, Zeros
from shoal.program import Array
from shoal.variables import Variable
from shoal_nn._ops import Padding, Pair, Windows, column_sums, convolve, cudnn, pair
from shoal_nn._windowed import Windowed
from shoal_nn.layer import Arrays, Pullback, Shape, Train, trainable
from shoal_worker.arrays import namespace_of

_HE, _ZEROS = HeNormal(), Zeros()


@dataclass(frozen=True, kw_only=True)
class _Convolution(Windowed):
    """What both have in common: all but how many filters and groups there are."""

    window: Pair = 3
    strides: Pair = 1
    padding: Padding = "same"
    bias: bool = True
    initializer: Initializer = _HE
    input_gradient: bool = True

    def __post_init__(self) -> None:
        self._check_windows()

    def output_shape(self, shape: Shape) -> Shape:
        windows = self._windows(shape)
        return (*windows.outputs, self._filters_and_groups(shape)[0])

    def variables(self, shape: Shape) -> dict[str, Variable]:
        self.output_shape(shape)
        filters, groups = self._filters_and_groups(shape)
        kept = {"kernel": trainable((*pair(self.window), shape[2] // groups, filters), self.initializer)}
        return kept | ({"bias": trainable((filters,), _ZEROS)} if self.bias else {})

    def apply(self, params: Arrays, state: Arrays, x: Array, train: Train) -> tuple[Array, dict[str, Array], Pullback]:  # noqa: ARG002
        kernel = self._kept(params, "kernel", *pair(self.window), *self._last_axes)
        bias = self._kept(params, "bias", kernel.shape[3]) if self.bias else None
        self._require_floats(x)
        channels = self._channels(kernel)
        self._require(x.ndim == 4 and x.shape[3] == channels, x.shape[1:], f"(height, width, {channels})")
        windows = self._windows(x.shape[1:])
        groups = channels // kernel.shape[2]
        y = _forward(x, kernel, windows, groups)
        if bias is not None:
            y += bias.astype(y.dtype, copy=False)

        def pullback(dy: Array) -> tuple[dict[str, Array], Array]:
            by_kernel, dx = _backward(x, kernel, dy, windows, groups, input_gradient=self.input_gradient)
            found = {"kernel": by_kernel.astype(kernel.dtype, copy=False)}
            if bias is not None:
                found["bias"] = column_sums(dy).astype(bias.dtype, copy=False)
            return found, dx

        return y, {}, pullback

    @abstractmethod
    def _filters_and_groups(self, shape: Shape) -> tuple[int, int]:
        """How many, for examples of this shape."""

    @property
    @abstractmethod
    def _last_axes(self) -> tuple[int | None, int | None]:
        """Lengths of a kernel's, whatever the samples: None where they decide."""

    @abstractmethod
    def _channels(self, kernel: Array) -> int:
        """Of the input that goes with a kernel."""


@dataclass(frozen=True)
class Conv2D(_Convolution):
    """A convolution (in truth a correlation, as everywhere) over height and width.

    Variables: "kernel" [window height, window width, channels / groups, filters] and "bias" [filters].

    Args:
        filters: channels of the output.
        groups: the channels are cut into so many, each with filters / groups filters of its own; 1 mixes them all.
        window: height and width, or one number for both.
        strides: from one window to the next, down and across.
        padding: "same": the output is ceil(input / stride), the zeros around as TensorFlow puts them, the odd one below
            and on the right; "valid": none; or how many, as PyTorch has it: n on all sides, (rows, columns), or
            ((above, below), (left, right)).
        bias: whether there is one; a normalization that follows makes it useless.
        initializer: of the kernel; the bias begins with 0.
        input_gradient: False for a model's first layer, where nobody wants dx: it is None.

    Raises:
        InvalidLayer: an argument is out of its range, or groups do not divide the filters.
    """

    filters: int
    groups: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._demand(
            min(self.filters, self.groups) > 0 and self.filters % self.groups == 0,
            f"{self.filters} filters in {self.groups} groups; give 1 or more of each, and each group as many filters",
        )

    def _filters_and_groups(self, shape: Shape) -> tuple[int, int]:
        self._require(
            shape[2] % self.groups == 0, shape, f"(height, width, channels), {self.groups} groups of as many channels"
        )
        return self.filters, self.groups

    @property
    def _last_axes(self) -> tuple[None, int]:
        return None, self.filters

    def _channels(self, kernel: Array) -> int:
        return int(kernel.shape[2]) * self.groups


@dataclass(frozen=True)
class DepthwiseConv2D(_Convolution):
    """A convolution of each channel by itself: `Conv2D` with as many groups as there are channels.

    Variables: "kernel" [window height, window width, 1, channels * multiplier] and "bias" [channels * multiplier]. The
    outputs of one channel lie side by side. The other arguments are those of `Conv2D`.

    Args:
        multiplier: outputs of each channel.

    Raises:
        InvalidLayer: an argument is out of its range.
    """

    multiplier: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._demand(self.multiplier > 0, f"multiplier is {self.multiplier}; give 1 or more")

    def _filters_and_groups(self, shape: Shape) -> tuple[int, int]:
        return shape[2] * self.multiplier, shape[2]

    @property
    def _last_axes(self) -> tuple[int, None]:
        return 1, None

    def _channels(self, kernel: Array) -> int:
        return int(kernel.shape[3]) // self.multiplier


def _forward(x: Array, kernel: Array, windows: Windows, groups: int) -> Array:
    if cudnn.takes(x, windows) and (y := cudnn.forward(x, kernel, windows)) is not None:
        return y
    if groups == 1:
        return convolve.convolve(x, kernel, windows)
    if kernel.shape[2] == 1:
        return _depthwise(x).convolve_each(_repeated(x, kernel), kernel[:, :, 0], windows)
    xp = namespace_of(x)
    parts = zip(xp.split(x, groups, axis=3), xp.split(kernel, groups, axis=3), strict=True)
    return xp.concatenate([convolve.convolve(each, filters, windows) for each, filters in parts], axis=3)


def _backward(
    x: Array, kernel: Array, dy: Array, windows: Windows, groups: int = 1, *, input_gradient: bool
) -> tuple[Array, Array | None]:
    """The gradients by the kernel and, if it is wanted, by the input."""
    if cudnn.takes(x, windows) and (gradients := _by_cudnn(x, kernel, dy, windows, input_gradient)):
        return gradients
    xp = namespace_of(x)
    if groups > 1 and kernel.shape[2] == 1:
        by_kernel, dx = _depthwise(x).gradients_each(_repeated(x, kernel), kernel[:, :, 0], dy, windows, input_gradient)
        if dx is not None and dx.shape != x.shape:
            dx = dx.reshape(*x.shape, -1).sum(axis=4)
        return by_kernel.reshape(kernel.shape), dx
    if groups > 1:
        parts = zip(*(xp.split(array, groups, axis=3) for array in (x, kernel, dy)), strict=True)
        found = [
            _backward(each, filters, part, windows, input_gradient=input_gradient) for each, filters, part in parts
        ]
        dx = xp.concatenate([each for _, each in found], axis=3) if input_gradient else None
        return xp.concatenate([each for each, _ in found], axis=3), dx
    by_kernel = convolve.gradient_by_kernel(x, dy, windows)
    return by_kernel, convolve.gradient_by_input(kernel, dy, windows) if input_gradient else None


def _by_cudnn(
    x: Array, kernel: Array, dy: Array, windows: Windows, input_gradient: bool
) -> tuple[Array, Array | None] | None:
    by_kernel = cudnn.gradient_by_kernel(x, kernel, dy, windows)
    dx = cudnn.gradient_by_input(x, kernel, dy, windows) if input_gradient else None
    return None if by_kernel is None or (input_gradient and dx is None) else (by_kernel, dx)


def _depthwise(x: Array) -> Any:
    """The module that has `convolve_each` and its gradients for such arrays."""
    if namespace_of(x) is not np:
        return convolve
    from shoal_nn._ops import depthwise as compiled  # noqa: PLC0415 - numba takes a second to import

    return compiled


def _repeated(x: Array, kernel: Array) -> Array:
    """Each channel as often as it has filters."""
    times = kernel.shape[3] // x.shape[3]
    return x if times == 1 else namespace_of(x).repeat(x, times, axis=3)


__all__ = ["Conv2D", "DepthwiseConv2D"]
