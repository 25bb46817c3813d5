"""Pooling and padding of images [batch, height, width, channels]."""

from typing import Any, ClassVar

import shoal_nn
from shoal_distribute.keras.layers.convolution import PaddingName, SizePair, check_windows, pair
from shoal_distribute.keras.layers.core import check_channels_last
from shoal_distribute.keras.layers.core_layer import CoreLayer


class MaxPooling2D(CoreLayer):
    """Maximum of each window of a channel.

    Args:
        pool_size: height and width, or one number for both.
        strides: distance between windows; None means the pool's size.
        padding: "valid" or "same".
        data_format: must be None or "channels_last".
        **kwargs: see `Layer`.
    """

    pooling: ClassVar[Any] = shoal_nn.MaxPool

    def __init__(
        self,
        pool_size: SizePair = (2, 2),
        strides: SizePair | None = None,
        padding: PaddingName = "valid",
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_windows(type(self).__name__, padding, data_format)
        self._layer = self.pooling(pair(pool_size), None if strides is None else pair(strides), padding)

    def core(self) -> shoal_nn.Layer:
        found: shoal_nn.Layer = self._layer
        return found


class AveragePooling2D(MaxPooling2D):
    """Mean of each window of a channel, without the padding's zeros.

    Args:
        pool_size: height and width, or one number for both.
        strides: see `MaxPooling2D`.
        padding: see `MaxPooling2D`.
        data_format: see `MaxPooling2D`.
        **kwargs: see `Layer`.
    """

    pooling = shoal_nn.AvgPool

    def __init__(
        self,
        pool_size: SizePair,
        strides: SizePair | None = None,
        padding: PaddingName = "valid",
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(pool_size, strides, padding, data_format, **kwargs)


class GlobalAveragePooling2D(CoreLayer):
    """Mean of each channel.

    Args:
        data_format: must be None or "channels_last".
        keepdims: whether the output is [batch, 1, 1, channels].
        **kwargs: see `Layer`.
    """

    pooling: ClassVar[shoal_nn.Layer] = shoal_nn.GlobalAvgPool()

    def __init__(self, data_format: str | None = None, keepdims: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_channels_last(type(self).__name__, data_format)
        reshaped = shoal_nn.Sequential([self.pooling, shoal_nn.Reshape((1, 1, -1))])
        self._layer = reshaped if keepdims else self.pooling

    def core(self) -> shoal_nn.Layer:
        return self._layer


class GlobalMaxPooling2D(GlobalAveragePooling2D):
    """Maximum of each channel. The arguments are those of `GlobalAveragePooling2D`."""

    pooling = shoal_nn.GlobalMaxPool()


class ZeroPadding2D(CoreLayer):
    """Adds rows and columns of zeros.

    Args:
        padding: a number for all sides, (rows, columns), or ((above, below), (left, right)).
        data_format: must be None or "channels_last".
        **kwargs: see `Layer`.
    """

    def __init__(self, padding: Any = (1, 1), data_format: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_channels_last("ZeroPadding2D", data_format)
        rows, columns = (padding, padding) if isinstance(padding, int) else padding
        self._layer = shoal_nn.ZeroPad((pair(rows), pair(columns)))

    def core(self) -> shoal_nn.Layer:
        return self._layer


__all__ = ["AveragePooling2D", "GlobalAveragePooling2D", "GlobalMaxPooling2D", "MaxPooling2D", "ZeroPadding2D"]
