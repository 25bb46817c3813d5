"""Layers shared by several models."""

from shoal_nn.convolution import Conv2D


def convolution(filters: int, window: int, strides: int = 1, *, input_gradient: bool = True) -> Conv2D:
    """Returns a convolution without bias, padded as in PyTorch's models; a normalization follows it.

    Args:
        filters: number of output channels.
        window: height and width of the window, odd.
        strides: distance between windows.
        input_gradient: whether to compute dx.
    """
    return Conv2D(
        filters, window=window, strides=strides, padding=window // 2, bias=False, input_gradient=input_gradient
    )


__all__ = ["convolution"]
