"""Residual networks (He et al., "Deep residual learning for image recognition", CVPR 2016)."""

from collections.abc import Callable, Mapping

from shoal import errors
from shoal_nn.activations import ReLU
from shoal_nn.containers import Identity, Residual, Sequential
from shoal_nn.dense import Dense
from shoal_nn.layer import Layer
from shoal_nn.models._parts import Style, StyleName, convolution, style_named
from shoal_nn.pooling import GlobalAvgPool, MaxPool

# Channels inside the blocks of each of the four stages.
_WIDTHS = (64, 128, 256, 512)


def resnet(
    depth: int, classes: int = 1000, *, small_images: bool = False, style: StyleName = "torchvision"
) -> Sequential:
    """Returns ResNet-18, 34 or 50. With the same weights, its outputs equal those of the library that `style` names.

    Names follow torchvision: "conv1", "bn1", "layer1" to "layer4" with blocks "0", "1" and so on, and "fc".

    Args:
        depth: 18, 34 or 50.
        classes: number of outputs.
        small_images: whether to start with a 3x3 convolution without stride and pooling, as in the paper for CIFAR's
            images of 32x32. Otherwise the model suits images of 224x224.
        style: "torchvision" or "keras": the library whose model it equals. In torchvision's ResNet-50, the 3x3
            convolution of a block has the stride (version 1.5); in Keras', the first convolution has it. Keras'
            convolutions also have biases, which the BatchNorm after each cancels. `load_weights` loads published
            weights of the same library.

    Returns:
        A model from images [batch, height, width, channels] to logits [batch, classes].

    Raises:
        InvalidLayer: the depth is unknown, or `classes` is out of range.
    """
    if depth not in _DEPTHS:
        raise errors.InvalidLayer(f"resnet: there is no ResNet-{depth}; choose 18, 34 or 50", kind="resnet")
    built = style_named(style, "resnet")
    block, expansion, counts = _DEPTHS[depth]
    window, strides = (3, 1) if small_images else (7, 2)
    stem = convolution(64, window, strides, input_gradient=False)
    layers: dict[str, Layer] = {"conv1": stem, "bn1": built.resnet_norm, "relu": ReLU()}
    if not small_images:
        layers["maxpool"] = MaxPool(3, strides=2, padding=1)
    channels = 64
    for number, (width, count) in enumerate(zip(_WIDTHS, counts, strict=True), 1):
        blocks = []
        for index in range(count):
            strides = 2 if number > 1 and index == 0 else 1
            shortcut = _shortcut(channels, width * expansion, strides, built)
            blocks.append(Sequential({"sum": Residual(block(width, strides, built), shortcut), "relu": ReLU()}))
            channels = width * expansion
        layers[f"layer{number}"] = Sequential(blocks)
    return Sequential({**layers, "avgpool": GlobalAvgPool(), "fc": Dense(classes)})


def _basic(width: int, strides: int, style: Style) -> Sequential:
    return Sequential(
        {
            "conv1": convolution(width, 3, strides),
            "bn1": style.resnet_norm,
            "relu": ReLU(),
            "conv2": convolution(width, 3),
            "bn2": style.resnet_norm,
        }
    )


def _bottleneck(width: int, strides: int, style: Style) -> Sequential:
    first, second = (strides, 1) if style.strides_first else (1, strides)
    return Sequential(
        {
            "conv1": convolution(width, 1, first),
            "bn1": style.resnet_norm,
            "relu1": ReLU(),
            "conv2": convolution(width, 3, second),
            "bn2": style.resnet_norm,
            "relu2": ReLU(),
            "conv3": convolution(4 * width, 1),
            "bn3": style.resnet_norm,
        }
    )


def _shortcut(channels: int, filters: int, strides: int, style: Style) -> Layer:
    if channels == filters and strides == 1:
        return Identity()
    return Sequential({"conv": convolution(filters, 1, strides), "bn": style.resnet_norm})


# By depth: the block, its ratio of output channels to inner channels, and the number of blocks of each stage.
_DEPTHS: Mapping[int, tuple[Callable[[int, int, Style], Sequential], int, tuple[int, ...]]] = {
    18: (_basic, 1, (2, 2, 2, 2)),
    34: (_basic, 1, (3, 4, 6, 3)),
    50: (_bottleneck, 4, (3, 4, 6, 3)),
}

__all__ = ["resnet"]
