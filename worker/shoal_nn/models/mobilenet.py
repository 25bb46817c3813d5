"""MobileNetV2 (Sandler et al., "Inverted residuals and linear bottlenecks", CVPR 2018)."""

from shoal import errors
from shoal_nn._ops import Padding
from shoal_nn.activations import ReLU6
from shoal_nn.containers import Residual, Sequential
from shoal_nn.convolution import DepthwiseConv2D
from shoal_nn.dense import Dense
from shoal_nn.dropout import Dropout
from shoal_nn.layer import Layer
from shoal_nn.models._parts import Style, StyleName, convolution, style_named
from shoal_nn.pooling import GlobalAvgPool

# For each stage: expansion factor, channels, blocks, and stride of the first block (table 2 of the paper).
_STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
_STEM, _LAST = 32, 1280


def mobilenet_v2(
    classes: int = 1000,
    width: float = 1.0,
    *,
    stem_strides: int = 2,
    dropout: float = 0.2,
    style: StyleName = "torchvision",
) -> Sequential:
    """Returns MobileNetV2. With the same weights, its outputs equal those of the library that `style` names.

    Its parts are "stem", "block0" to "block16", "last" and "head". Only the head depends on the number of classes. For
    another number, give the head a new name; a partial restore then takes all other values from a checkpoint.

    Args:
        classes: number of outputs.
        width: multiplier of each layer's channels, which are rounded to multiples of 8. The last convolution has at
            least 1,280 channels.
        stem_strides: strides of the first convolution; 1 suits images of 32x32.
        dropout: rate of the dropout before the head.
        style: "torchvision" or "keras": the library whose model it equals. They pad and normalize differently.
            `load_weights` loads published weights of the same library. Keras' model has no dropout.

    Returns:
        A model from images [batch, height, width, channels] to logits [batch, classes].

    Raises:
        InvalidLayer: an argument is out of range.
    """
    if width <= 0:
        raise errors.InvalidLayer(f"mobilenet_v2: width is {width}; give more than 0", kind="mobilenet_v2")
    built = style_named(style, "mobilenet_v2")
    padding: Padding = "same" if built.same else 1
    channels = _rounded(_STEM * width)
    stem = convolution(channels, 3, stem_strides, input_gradient=False, padding=padding)
    layers: dict[str, Layer] = {"stem": _activated(stem, built)}
    number = 0
    for expansion, base, count, first in _STAGES:
        filters = _rounded(base * width)
        for index in range(count):
            layers[f"block{number}"] = _block(channels, filters, expansion, first if index == 0 else 1, built)
            channels, number = filters, number + 1
    layers["last"] = _activated(convolution(_rounded(_LAST * max(1.0, width)), 1), built)
    return Sequential({**layers, "pool": GlobalAvgPool(), "dropout": Dropout(dropout), "head": Dense(classes)})


def _block(channels: int, filters: int, expansion: int, strides: int, style: Style) -> Layer:
    hidden = channels * expansion
    layers: dict[str, Layer] = {}
    if expansion > 1:
        layers["expand"] = _activated(convolution(hidden, 1), style)
    depthwise = DepthwiseConv2D(window=3, strides=strides, padding="same" if style.same else 1, bias=False)
    layers |= {
        "depthwise": _activated(depthwise, style),
        "project": convolution(filters, 1),
        "bn": style.mobilenet_norm,
    }
    block = Sequential(layers)
    return Residual(block) if strides == 1 and channels == filters else block


def _activated(conv: Layer, style: Style) -> Sequential:
    return Sequential({"conv": conv, "bn": style.mobilenet_norm, "relu": ReLU6()})


def _rounded(channels: float) -> int:
    """Rounds to a multiple of 8, as the authors' code does: down by a tenth at most."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


__all__ = ["mobilenet_v2"]
