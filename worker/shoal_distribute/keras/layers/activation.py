"""Activations as layers."""

from typing import Any

import shoal_nn
from shoal import errors
from shoal_distribute.keras import activations
from shoal_distribute.keras.layers.core_layer import CoreLayer


class Activation(CoreLayer):
    """An activation as a layer.

    Args:
        activation: name or function of the activation.
        **kwargs: see `Layer`.
    """

    def __init__(self, activation: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._layer = activations.layer_of(activation) or shoal_nn.Identity()

    def core(self) -> shoal_nn.Layer:
        return self._layer


class ReLU(CoreLayer):
    """y = max(x, 0), at most `max_value`, or with a slope below 0.

    Args:
        max_value: largest value: None, or 6 as in `relu6`.
        negative_slope: slope below 0.
        threshold: must be 0.
        **kwargs: see `Layer`.

    Raises:
        InvalidLayer: the combination is not supported.
    """

    def __init__(
        self, max_value: float | None = None, negative_slope: float = 0.0, threshold: float = 0.0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if threshold or max_value not in {None, 6} or (max_value and negative_slope):
            raise errors.InvalidLayer(
                f"ReLU(max_value={max_value}, negative_slope={negative_slope}, threshold={threshold}) is not "
                "supported; use max_value=6 or a negative_slope alone",
                kind="ReLU",
            )
        self._layer: shoal_nn.Layer = shoal_nn.LeakyReLU(negative_slope) if negative_slope else shoal_nn.ReLU()
        if max_value:
            self._layer = shoal_nn.ReLU6()

    def core(self) -> shoal_nn.Layer:
        return self._layer


class LeakyReLU(CoreLayer):
    """y = x above 0, and negative_slope * x below.

    Args:
        negative_slope: the slope below 0.
        **kwargs: see `Layer`.
    """

    def __init__(self, negative_slope: float = 0.3, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._layer = shoal_nn.LeakyReLU(negative_slope)

    def core(self) -> shoal_nn.Layer:
        return self._layer


class ELU(CoreLayer):
    """y = x above 0, and alpha * (exp(x) - 1) below.

    Args:
        alpha: minus the limit for small x.
        **kwargs: see `Layer`.
    """

    def __init__(self, alpha: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._layer = shoal_nn.ELU(alpha)

    def core(self) -> shoal_nn.Layer:
        return self._layer


class Softmax(CoreLayer):
    """exp(x) / sum(exp(x)) over the last axis.

    Args:
        axis: must be -1.
        **kwargs: see `Layer`.

    Raises:
        InvalidLayer: `axis` is another one.
    """

    def __init__(self, axis: int = -1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if axis != -1:
            raise errors.InvalidLayer(f"Softmax(axis={axis}) is not supported; the axis must be -1", kind="Softmax")

    def core(self) -> shoal_nn.Layer:
        return shoal_nn.Softmax()


__all__ = ["ELU", "Activation", "LeakyReLU", "ReLU", "Softmax"]
