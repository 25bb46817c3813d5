"""Convolutions of images [batch, height, width, channels]."""

from typing import Any, Literal

import shoal_nn
from shoal import errors
from shoal_distribute.keras.layers.base import Shape
from shoal_distribute.keras.layers.core import ActivatedLayer, check_channels_last
from shoal_distribute.keras.layers.core_layer import WeightArguments

SizePair = int | tuple[int, int]
PaddingName = Literal["same", "valid"]


class Conv2D(ActivatedLayer):
    """Convolution over height and width.

    Args:
        filters: channels of the output.
        kernel_size: height and width, or one number for both.
        strides: distance between windows, or one number for both.
        padding: "valid" or "same".
        data_format: must be None or "channels_last".
        dilation_rate: must be 1.
        groups: number of groups of channels.
        activation: name or function of the activation; None means none.
        use_bias: whether to add a bias.
        kernel_initializer: name or object.
        bias_initializer: name or object.
        kernel_regularizer: name, object or function; None means none.
        bias_regularizer: as `kernel_regularizer`.
        activity_regularizer: see `Layer`.
        kernel_constraint: name, object or function; None means none.
        bias_constraint: as `kernel_constraint`.
        **kwargs: see `Layer`.
    """

    def __init__(
        self,
        filters: int,
        kernel_size: SizePair,
        strides: SizePair = (1, 1),
        padding: PaddingName = "valid",
        data_format: str | None = None,
        dilation_rate: SizePair = (1, 1),
        groups: int = 1,
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        activity_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        **kwargs: Any,
    ) -> None:
        kernel = WeightArguments(kernel_initializer, kernel_regularizer, kernel_constraint)
        bias = WeightArguments(bias_initializer, bias_regularizer, bias_constraint)
        super().__init__(activation, kernel, bias, activity_regularizer=activity_regularizer, **kwargs)
        check_windows("Conv2D", padding, data_format, dilation_rate)
        self._layer = shoal_nn.Conv2D(
            filters, groups=groups, window=pair(kernel_size), strides=pair(strides), padding=padding, bias=use_bias
        )

    def core(self) -> shoal_nn.Layer:
        return self._layer


class DepthwiseConv2D(ActivatedLayer):
    """Convolution of each channel by itself. The kernel is [height, width, channels, depth_multiplier].

    Args:
        kernel_size: height and width, or one number for both.
        strides: distance between windows, or one number for both.
        padding: "valid" or "same".
        depth_multiplier: outputs of each channel.
        data_format: must be None or "channels_last".
        dilation_rate: must be 1.
        activation: name or function of the activation; None means none.
        use_bias: whether to add a bias.
        depthwise_initializer: name or object.
        bias_initializer: name or object.
        depthwise_regularizer: name, object or function; None means none.
        bias_regularizer: as `depthwise_regularizer`.
        activity_regularizer: see `Layer`.
        depthwise_constraint: name, object or function; None means none.
        bias_constraint: as `depthwise_constraint`.
        **kwargs: see `Layer`.
    """

    def __init__(
        self,
        kernel_size: SizePair,
        strides: SizePair = (1, 1),
        padding: PaddingName = "valid",
        depth_multiplier: int = 1,
        data_format: str | None = None,
        dilation_rate: SizePair = (1, 1),
        activation: Any = None,
        use_bias: bool = True,
        depthwise_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        depthwise_regularizer: Any = None,
        bias_regularizer: Any = None,
        activity_regularizer: Any = None,
        depthwise_constraint: Any = None,
        bias_constraint: Any = None,
        **kwargs: Any,
    ) -> None:
        kernel = WeightArguments(depthwise_initializer, depthwise_regularizer, depthwise_constraint)
        bias = WeightArguments(bias_initializer, bias_regularizer, bias_constraint)
        super().__init__(activation, kernel, bias, activity_regularizer=activity_regularizer, **kwargs)
        check_windows("DepthwiseConv2D", padding, data_format, dilation_rate)
        self._layer = shoal_nn.DepthwiseConv2D(
            depth_multiplier, window=pair(kernel_size), strides=pair(strides), padding=padding, bias=use_bias
        )

    def core(self) -> shoal_nn.Layer:
        return self._layer

    def stored_shape(self, name: str, shape: Shape, /) -> Shape:
        multiplier = self._layer.multiplier
        return shape if name != "kernel" else (*shape[:2], shape[3] // multiplier, multiplier)


def pair(given: Any) -> tuple[int, int]:
    """Returns height and width, which may be given as one number or as a list."""
    height, width = (given, given) if isinstance(given, int) else given
    return int(height), int(width)


def check_windows(layer: str, padding: str, data_format: str | None, dilation_rate: Any = 1) -> None:
    """Checks settings of windows.

    Args:
        layer: name of the layer's class.
        padding: must be "valid" or "same".
        data_format: must be None or "channels_last".
        dilation_rate: must be 1.

    Raises:
        InvalidLayer: a setting is another one.
    """
    check_channels_last(layer, data_format)
    if padding not in {"valid", "same"}:
        raise errors.InvalidLayer(f"{layer}: padding is {padding!r}; it must be 'valid' or 'same'", kind=layer)
    if pair(dilation_rate) != (1, 1):
        raise errors.InvalidLayer(f"{layer}(dilation_rate={dilation_rate}) is not supported; leave it at 1", kind=layer)


__all__ = ["Conv2D", "DepthwiseConv2D", "PaddingName", "SizePair", "check_windows", "pair"]
