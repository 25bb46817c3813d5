"""Convolution layers for images [batch, height, width, channels]."""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.initializers import HeNormal, Initializer, Zeros
from shoal.program import Array
from shoal.variables import Variable
from shoal_nn._ops import Padding, Pair, Windows, column_sums, convolve, cudnn, pair
from shoal_nn._windowed import Windowed
from shoal_nn.layer import Pullback, Shape, Train, Values, trainable
from shoal_worker.arrays import namespace_of

_HE, _ZEROS = HeNormal(), Zeros()


@dataclass(frozen=True, kw_only=True)
class _Convolution(Windowed):
    """Base class of convolutions. Subclasses set the number of filters and groups."""

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

    def apply(self, params: Values, state: Values, x: Array, train: Train) -> tuple[Array, dict[str, Array], Pullback]:  # noqa: ARG002
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
        """Returns the numbers of filters and groups for samples of this shape."""

    @property
    @abstractmethod
    def _last_axes(self) -> tuple[int | None, int | None]:
        """Lengths of a kernel's last two axes; None where they depend on the samples."""

    @abstractmethod
    def _channels(self, kernel: Array) -> int:
        """Returns the number of input channels for a kernel."""


@dataclass(frozen=True)
class Conv2D(_Convolution):
    """Convolution over height and width. As in other libraries, it is a cross-correlation.

    Variables: "kernel" [window height, window width, channels / groups, filters] and "bias" [filters].

    Args:
        filters: channels of the output.
        groups: number of groups of channels, each with filters / groups filters of its own.
        window: height and width, or one number for both.
        strides: distance between windows, down and across, or one number for both.
        padding: zeros around the image. "same" gives an output of ceil(input / stride). If the number of zeros is odd,
            the extra one is below or on the right, as in TensorFlow. "valid" adds none. Explicit numbers are as in
            PyTorch: n on all sides, (rows, columns), or ((above, below), (left, right)).
        bias: whether to add a bias; a normalization that follows cancels it.
        initializer: initializer of the kernel; the bias starts at 0.
        input_gradient: whether to compute dx. False suits a model's first layer; dx is then None.

    Raises:
        InvalidLayer: an argument is out of range, or the number of filters is not divisible by groups.
    """

    filters: int
    groups: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._demand(
            min(self.filters, self.groups) > 0 and self.filters % self.groups == 0,
            f"{self.filters} filters in {self.groups} groups; give 1 or more of each, with filters divisible by groups",
        )

    def _filters_and_groups(self, shape: Shape) -> tuple[int, int]:
        self._require(
            shape[2] % self.groups == 0,
            shape,
            f"(height, width, channels) with channels divisible by {self.groups} groups",
        )
        return self.filters, self.groups

    @property
    def _last_axes(self) -> tuple[None, int]:
        return None, self.filters

    def _channels(self, kernel: Array) -> int:
        return int(kernel.shape[2]) * self.groups


@dataclass(frozen=True)
class DepthwiseConv2D(_Convolution):
    """Depthwise convolution: `Conv2D` with one group for each channel.

    Variables: "kernel" [window height, window width, 1, channels * multiplier] and "bias" [channels * multiplier]. The
    outputs of one channel are adjacent. The other arguments are those of `Conv2D`.

    Args:
        multiplier: number of outputs of each channel.

    Raises:
        InvalidLayer: an argument is out of range.
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
    """Returns the gradients with respect to the kernel and, if `input_gradient`, with respect to the input."""
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
    """Returns the module whose `convolve_each` and `gradients_each` take this array."""
    if namespace_of(x) is not np:
        return convolve
    from shoal_nn._ops import depthwise as compiled  # noqa: PLC0415 - numba takes a second to import

    return compiled


def _repeated(x: Array, kernel: Array) -> Array:
    """Repeats each channel once for each of its filters."""
    times = kernel.shape[3] // x.shape[3]
    return x if times == 1 else namespace_of(x).repeat(x, times, axis=3)


__all__ = ["Conv2D", "DepthwiseConv2D"]
