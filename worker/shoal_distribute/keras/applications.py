"""Published models by Keras' names. They start from the weights of a file; networks of `shoal_nn` compute them."""

import os
from collections.abc import Sequence
from typing import Any

import shoal_nn
from shoal import errors
from shoal._system import docs_url
from shoal_distribute.keras import layers
from shoal_distribute.keras.models import Model
from shoal_nn.models import load_weights, mobilenet_v2, resnet

_POOLINGS = {None: None, "avg": layers.GlobalAveragePooling2D, "max": layers.GlobalMaxPooling2D}
_IMAGES = (224, 224, 3)


def MobileNetV2(
    input_shape: Sequence[int] | None = None,
    alpha: float = 1.0,
    include_top: bool = True,
    weights: str | os.PathLike[str] | None = None,
    pooling: str | None = None,
    classes: int = 1000,
    classifier_activation: Any = "softmax",
    style: str = "keras",
) -> Model:
    """Returns MobileNetV2. It takes images from -1 to 1 if `style` is "keras".

    Args:
        input_shape: shape of an image; None means (224, 224, 3).
        alpha: multiplier of each layer's channels.
        include_top: whether the model ends with the classes; otherwise with the features of the last convolution.
        weights: path of a file that `shoal_nn.models.load_weights` reads; None means random initial values.
        pooling: without the top, "avg" or "max" pools the features over the image.
        classes: number of classes.
        classifier_activation: activation of the classes; None means logits.
        style: "keras" or "torchvision": whose weights the file has.

    Raises:
        InvalidLayer: `weights` is no path, or an argument is out of range.
        InvalidData: the file does not exist, or does not fit the model.
    """
    dropout = 0.2 if style == "torchvision" else 0.0  # Keras has none
    net = mobilenet_v2(classes, alpha, dropout=dropout, style=style)  # type: ignore[arg-type] # it checks the name
    return _model("mobilenetv2", net, 3, input_shape, include_top, weights, pooling, classifier_activation)


def ResNet50(
    include_top: bool = True,
    weights: str | os.PathLike[str] | None = None,
    input_shape: Sequence[int] | None = None,
    pooling: str | None = None,
    classes: int = 1000,
    classifier_activation: Any = "softmax",
    style: str = "keras",
) -> Model:
    """Returns ResNet-50.

    Args:
        include_top: as for `MobileNetV2`.
        weights: as for `MobileNetV2`.
        input_shape: as for `MobileNetV2`.
        pooling: as for `MobileNetV2`.
        classes: as for `MobileNetV2`.
        classifier_activation: as for `MobileNetV2`.
        style: as for `MobileNetV2`.

    Raises:
        InvalidLayer: as for `MobileNetV2`.
        InvalidData: as for `MobileNetV2`.
    """
    net = resnet(50, classes, style=style)  # type: ignore[arg-type] # it checks the name
    return _model("resnet50", net, 2, input_shape, include_top, weights, pooling, classifier_activation)


def preprocess_input(x: Any) -> Any:
    """Returns images from 0 to 255 as MobileNetV2 in Keras' style takes them: from -1 to 1."""
    return x / 127.5 - 1.0


def _model(
    name: str,
    net: shoal_nn.Sequential,
    top: int,
    input_shape: Sequence[int] | None,
    include_top: bool,
    weights: Any,
    pooling: str | None,
    activation: Any,
) -> Model:
    """Returns a network as a model; `top` is the number of its last parts that include_top leaves out."""
    if pooling not in _POOLINGS:
        raise errors.InvalidLayer(f"{name}: pooling is {pooling!r}; it must be None, 'avg' or 'max'", kind=name)
    if weights == "imagenet":
        raise errors.InvalidLayer(
            f"{name}: nothing is downloaded, so weights cannot be 'imagenet'; give the path of a file that Keras or "
            f"torchvision publishes ({docs_url('how-to/models')})",
            kind=name,
        )
    shape = tuple(input_shape or _IMAGES)
    values = {} if weights is None else load_weights(net, weights, head=include_top, shape=shape)
    inputs = layers.Input(shape)
    kept = net if include_top else shoal_nn.Sequential(dict(net.layers[:-top]))
    outputs = layers.WrappedLayer(kept, values, name=name)(inputs)
    pooled = None if include_top else _POOLINGS[pooling]
    if pooled is not None:
        outputs = pooled()(outputs)
    if include_top and activation is not None:
        outputs = layers.Activation(activation)(outputs)
    return Model(inputs, outputs)


__all__ = ["MobileNetV2", "ResNet50", "preprocess_input"]
