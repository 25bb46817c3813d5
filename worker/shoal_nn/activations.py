"""Activations: layers that apply a function to each element."""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shoal.program import Array
from shoal_nn._ops import erf, is_half, widened
from shoal_nn.layer import Shape, StatelessLayer, Train
from shoal_worker.arrays import Namespace, fused, namespace_of

_STEEPNESS = math.sqrt(2 / math.pi)


class Activation(StatelessLayer):
    """Base class of activations. They accept samples of any shape."""

    def output_shape(self, shape: Shape) -> Shape:
        return shape

    def _value(self, x: Array, train: Train) -> tuple[Array, Callable[[Array], Array]]:  # noqa: ARG002 - acts the same
        y, slope = self._curve(widened(x))

        def pull(dy: Array) -> Array:
            return (dy * slope()).astype(x.dtype, copy=False)

        return y.astype(x.dtype, copy=False), pull

    @abstractmethod
    def _curve(self, x: Array) -> tuple[Array, Callable[[], Array]]:
        """Returns the value at each element, and a function that returns the derivative there."""


@dataclass(frozen=True)
class ReLU(Activation):
    """y = max(x, 0), with derivative 0 at 0."""

    def _value(self, x: Array, train: Train) -> tuple[Array, Callable[[Array], Array]]:
        if namespace_of(x) is np or is_half(x.dtype):  # a fused function would return bfloat16 as float32
            return super()._value(x, train)
        y = _positive_part(x)
        return y, lambda dy: _where_positive(dy, y)

    def _curve(self, x: Array) -> tuple[Array, Callable[[], Array]]:
        y = namespace_of(x).maximum(x, 0)
        return y, lambda: y > 0


@dataclass(frozen=True)
class ReLU6(Activation):
    """y = min(max(x, 0), 6), with derivative 0 at both ends.

    Krizhevsky, "Convolutional deep belief networks", 2010.
    """

    def _curve(self, x: Array) -> tuple[Array, Callable[[], Array]]:
        y = namespace_of(x).clip(x, 0, 6)
        return y, lambda: _within(y, 0, 6)


@dataclass(frozen=True)
class Sigmoid(Activation):
    """y = 1 / (1 + exp(-x))."""

    def _curve(self, x: Array) -> tuple[Array, Callable[[], Array]]:
        y = sigmoid(x)
        return y, lambda: y * (1 - y)


@dataclass(frozen=True)
class Tanh(Activation):
    """y = tanh(x)."""

    def _curve(self, x: Array) -> tuple[Array, Callable[[], Array]]:
        y = namespace_of(x).tanh(x)
        return y, lambda: 1 - y * y


@dataclass(frozen=True)
class GELU(Activation):
    """y = x Phi(x), where Phi is the normal distribution function.

    Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.

    Args:
        approximate: whether to use Phi(x) = (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2.
    """

    approximate: bool = False

    def _curve(self, x: Array) -> tuple[Array, Callable[[], Array]]:
        return _gelu_by_tanh(x) if self.approximate else _gelu(x)


@dataclass(frozen=True)
class LeakyReLU(Activation):
    """y = x for x > 0, and y = slope * x otherwise (Maas et al., 2013).

    Args:
        slope: slope below 0.
    """

    slope: float = 0.01

    def _curve(self, x: Array) -> tuple[Array, Callable[[], Array]]:
        xp = namespace_of(x)
        return xp.where(x > 0, x, self.slope * x), lambda: xp.where(x > 0, x.dtype.type(1), x.dtype.type(self.slope))


@dataclass(frozen=True)
class ELU(Activation):
    """y = scale * x for x > 0, and y = scale * alpha * (exp(x) - 1) otherwise (Clevert et al., ICLR 2016).

    Args:
        alpha: for large negative x, y approaches -scale * alpha.
        scale: factor of all values.
    """

    alpha: float = 1.0
    scale: float = 1.0

    def _curve(self, x: Array) -> tuple[Array, Callable[[], Array]]:
        xp, (one, scale) = namespace_of(x), (x.dtype.type(1), x.dtype.type(self.scale))
        below = self.alpha * xp.expm1(xp.minimum(x, 0))
        return scale * xp.where(x > 0, x, below), lambda: scale * xp.where(x > 0, one, below + self.alpha)


@dataclass(frozen=True)
class SELU(ELU):
    """`ELU` whose outputs tend to mean 0 and variance 1 (Klambauer et al., NeurIPS 2017).

    Args:
        alpha: see `ELU`.
        scale: see `ELU`.
    """

    alpha: float = 1.6732632423543772
    scale: float = 1.0507009873554805


@dataclass(frozen=True)
class SiLU(Activation):
    """y = x * sigmoid(x), also called swish (Elfwing et al., 2017)."""

    def _curve(self, x: Array) -> tuple[Array, Callable[[], Array]]:
        probability = sigmoid(x)
        y = x * probability
        return y, lambda: probability + y * (1 - probability)


@dataclass(frozen=True)
class Softplus(Activation):
    """y = log(1 + exp(x)), without overflow."""

    def _curve(self, x: Array) -> tuple[Array, Callable[[], Array]]:
        xp = namespace_of(x)
        return xp.maximum(x, 0) + xp.log1p(xp.exp(-xp.abs(x))), lambda: sigmoid(x)


@dataclass(frozen=True)
class Softmax(StatelessLayer):
    """y = exp(x) / sum(exp(x)), over the last axis."""

    def output_shape(self, shape: Shape) -> Shape:
        self._require(len(shape) > 0, shape, "at least one axis: (..., classes)")
        return shape

    def _value(self, x: Array, train: Train) -> tuple[Array, Callable[[Array], Array]]:  # noqa: ARG002 - acts the same
        self._require_floats(x)
        wide = widened(x)
        y = namespace_of(x).exp(wide - wide.max(axis=-1, keepdims=True))
        y /= y.sum(axis=-1, keepdims=True)

        def pull(dy: Array) -> Array:
            scaled = y * dy
            return (scaled - y * scaled.sum(axis=-1, keepdims=True)).astype(x.dtype, copy=False)

        return y.astype(x.dtype, copy=False), pull


@fused
def sigmoid(xp: Namespace, x: Array) -> Array:
    """Returns 1 / (1 + exp(-x)) without overflow."""
    small = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, 1, small) / (1 + small)


def _gelu(x: Array) -> tuple[Array, Callable[[], Array]]:
    probability = _normal_probability(x)
    return x * probability, lambda: _gelu_slope(x, probability)


def _gelu_by_tanh(x: Array) -> tuple[Array, Callable[[], Array]]:
    tanh = _gelu_tanh(x)
    return 0.5 * x * (1 + tanh), lambda: _gelu_by_tanh_slope(x, tanh)


@fused
def _positive_part(xp: Namespace, x: Array) -> Array:
    return xp.maximum(x, 0)


@fused
def _where_positive(xp: Namespace, dy: Array, y: Array) -> Array:
    return xp.where(y > 0, dy, 0)


@fused
def _within(xp: Namespace, y: Array, low: float, high: float) -> Array:  # noqa: ARG001 - by operators alone
    return (y > low) & (y < high)


@fused
def _normal_probability(xp: Namespace, x: Array) -> Array:
    return 0.5 * (1 + erf(xp, x * math.sqrt(0.5)))


@fused
def _gelu_slope(xp: Namespace, x: Array, probability: Array) -> Array:
    return probability + x * (xp.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi)))


@fused
def _gelu_tanh(xp: Namespace, x: Array) -> Array:
    return xp.tanh(_STEEPNESS * (x + 0.044715 * x * x * x))


@fused
def _gelu_by_tanh_slope(xp: Namespace, x: Array, tanh: Array) -> Array:  # noqa: ARG001 - by operators alone
    inner = _STEEPNESS * (1 + 3 * 0.044715 * x * x)
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * inner


__all__ = [
    "ELU",
    "GELU",
    "SELU",
    "Activation",
    "LeakyReLU",
    "ReLU",
    "ReLU6",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "Tanh",
    "sigmoid",
]
