"""Parts shared by several models, and the differences between the models as libraries publish them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shoal import errors
from shoal_nn._ops import Padding
from shoal_nn.convolution import Conv2D
from shoal_nn.normalization import BatchNorm

# The library whose model is built, so that its published weights fit.
StyleName = Literal["torchvision", "keras"]


@dataclass(frozen=True)
class Style:
    """The properties of a library's models that the shapes of their variables do not show.

    Attributes:
        mobilenet_norm: normalization of MobileNetV2.
        resnet_norm: normalization of ResNets.
        same: whether MobileNetV2 pads below and on the right if the number of zeros is odd, as TensorFlow does.
        strides_first: whether the first convolution of a bottleneck has the stride, as in the paper. Otherwise the 3x3
            convolution has it (version 1.5).
    """

    mobilenet_norm: BatchNorm
    resnet_norm: BatchNorm
    same: bool
    strides_first: bool

    @property
    def epsilons(self) -> set[float]:
        """The epsilons of the normalizations."""
        return {self.mobilenet_norm.epsilon, self.resnet_norm.epsilon}


STYLES: Mapping[str, Style] = {
    "torchvision": Style(BatchNorm(), BatchNorm(), same=False, strides_first=False),
    "keras": Style(
        BatchNorm(momentum=0.001, epsilon=1e-3),
        BatchNorm(momentum=0.01, epsilon=1.001e-5),
        same=True,
        strides_first=True,
    ),
}


def style_named(name: str, model: str) -> Style:
    """Returns the style of this name.

    Args:
        name: "torchvision" or "keras".
        model: the function that was given the name.

    Raises:
        InvalidLayer: there is no such style.
    """
    if name not in STYLES:
        raise errors.InvalidLayer(f"{model}: there is no style {name!r}; choose {' or '.join(STYLES)}", kind=model)
    return STYLES[name]


def convolution(
    filters: int, window: int, strides: int = 1, *, input_gradient: bool = True, padding: Padding | None = None
) -> Conv2D:
    """Returns a convolution without bias; a normalization follows it.

    Args:
        filters: number of output channels.
        window: height and width of the window, odd.
        strides: distance between windows.
        input_gradient: whether to compute dx.
        padding: zeros around the image; None means half a window on all sides, as in PyTorch's models.
    """
    return Conv2D(
        filters,
        window=window,
        strides=strides,
        padding=window // 2 if padding is None else padding,
        bias=False,
        input_gradient=input_gradient,
    )


__all__ = ["STYLES", "Style", "StyleName", "convolution", "style_named"]
