"""What more than one model is made of."""

from shoal_nn.convolution import Conv2D


def convolution(filters: int, window: int, strides: int = 1, *, input_gradient: bool = True) -> Conv2D:
    """Of an odd window, padded as PyTorch's models are, and without a bias, since a normalization follows."""
    return Conv2D(
        filters, window=window, strides=strides, padding=window // 2, bias=False, input_gradient=input_gradient
    )


__all__ = ["convolution"]
