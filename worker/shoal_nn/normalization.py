"""Normalization layers: BatchNorm over the batch, LayerNorm over the features of a sample."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.initializers import Ones, Zeros
from shoal.program import Array
from shoal.variables import Variable
from shoal_nn._ops import (
    Moving,
    batch_statistics,
    centered_squares,
    column_sums,
    gradient_sums,
    input_gradient,
    scaled,
    slope_and_shift,
    widened,
)
from shoal_nn.layer import Layer, Pullback, Shape, Train, Values, statistic, trainable
from shoal_worker.arrays import namespace_of

_ONES, _ZEROS = Ones(), Zeros()


@dataclass(frozen=True)
class BatchNorm(Layer):
    """y = (x - mean) / sqrt(var + epsilon) * scale + bias, for each index of the last axis.

    In training, mean and variance are those of the batch. The variance has the divisor n, the number of values of a
    channel. The running statistics are updated: running = (1 - momentum) * running + momentum * batch. Here, the
    batch's variance has the divisor n - 1. In evaluation, the running statistics are used. This is the same as in
    PyTorch. The momentum of Keras is 1 - momentum, and both variances of Keras have the divisor n. A batch with one
    value for each channel has no variance with the divisor n - 1. It is normalized by the running statistics, as in
    evaluation, and does not update them. Ioffe and Szegedy, "Batch normalization" (ICML 2015).

    Variables: "scale" and "bias" [channels], and as state "mean" and "var" [channels].

    Args:
        momentum: weight of the batch in the running statistics, in [0, 1].
        epsilon: above 0.
        unbiased: whether the batch's variance has the divisor n - 1 in the running variance, as in PyTorch, instead of
            n, as in Keras.

    Raises:
        InvalidLayer: an argument is out of range.
    """

    momentum: float = 0.1
    epsilon: float = 1e-5
    unbiased: bool = True

    def __post_init__(self) -> None:
        self._demand(0 <= self.momentum <= 1, f"momentum is {self.momentum}; it must be from 0 to 1")
        self._demand(self.epsilon > 0, f"epsilon is {self.epsilon}; it must be more than 0")

    def output_shape(self, shape: Shape) -> Shape:
        self._require(len(shape) > 0, shape, "at least one axis: (..., channels)")
        return shape

    def variables(self, shape: Shape) -> dict[str, Variable]:
        self.output_shape(shape)
        channels = shape[-1:]
        return {
            "scale": trainable(channels, _ONES),
            "bias": trainable(channels, _ZEROS),
            "mean": statistic(channels, _ZEROS),
            "var": statistic(channels, _ONES),
        }

    def apply(self, params: Values, state: Values, x: Array, train: Train) -> tuple[Array, dict[str, Array], Pullback]:
        channels = self._kept(params, "scale", None).shape[0]
        for arrays, name in ((params, "bias"), (state, "mean"), (state, "var")):
            self._kept(arrays, name, channels)
        self._require_floats(x)
        self._require(x.ndim > 1 and x.shape[-1] == channels, x.shape[1:], f"(..., {channels})")
        if not self._trains(train):
            return self._by_running(params, state, x, widened(x).reshape(-1, channels))
        totals, samples = self._whole(column_sums(x), math.prod(x.shape[:-1]))
        count = int(samples)  # an array, with its dtype, if parts elsewhere were added
        if count < (2 if self.unbiased else 1):
            return self._by_running(params, state, x, widened(x).reshape(-1, channels))
        mean = totals / count
        [squares] = self._whole(centered_squares(x, mean))
        moving = Moving(count, count - 1 if self.unbiased else count, self.momentum, self.epsilon)
        inverse, factor, *running = batch_statistics(
            squares, mean, params["scale"], (state["mean"], state["var"]), moving
        )
        moved = {
            name: value.astype(state[name].dtype, copy=False)
            for name, value in zip(("mean", "var"), running, strict=True)
        }

        def pullback(dy: Array) -> tuple[dict[str, Array], Array]:
            by_bias, products = gradient_sums(dy, x, mean)
            by_scale = products * inverse
            # The statistics depend on the whole batch, but the gradients of the parameters are those of this part.
            products, sums = self._whole(products, by_bias)
            slope, shift = slope_and_shift(products, sums, inverse, count)
            return _like(params, by_scale, by_bias), input_gradient(dy, x, mean, slope, shift, factor)

        return scaled(x, mean, factor, params["bias"]), moved, pullback

    def _whole(self, *sums: Any) -> Sequence[Any]:
        """Returns sums over the whole batch. A subclass whose batch has parts elsewhere adds theirs.

        Each part calls it equally often: twice in a forward pass and once in a backward pass.

        Args:
            *sums: sums over this part of the batch: arrays and numbers.
        """
        return sums

    def _by_running(
        self, params: Values, state: Values, x: Array, rows: Array
    ) -> tuple[Array, dict[str, Array], Pullback]:
        mean, var = (state[name].astype(rows.dtype, copy=False) for name in ("mean", "var"))
        inverse = 1 / namespace_of(x).sqrt(var + self.epsilon)
        factor = inverse * params["scale"].astype(rows.dtype, copy=False)

        def pullback(dy: Array) -> tuple[dict[str, Array], Array]:
            flat = widened(dy).reshape(rows.shape)
            found = _like(params, column_sums(flat * (rows - mean)) * inverse, column_sums(flat))
            return found, (flat * factor).astype(x.dtype, copy=False).reshape(x.shape)

        y = (rows - mean) * factor
        y += params["bias"].astype(rows.dtype, copy=False)
        return y.astype(x.dtype, copy=False).reshape(x.shape), dict(state), pullback


@dataclass(frozen=True)
class LayerNorm(Layer):
    """y = (x - mean) / sqrt(var + epsilon) * scale + bias, over the last axis (Ba et al., 2016).

    Variables: "scale" and "bias" [features].

    Args:
        epsilon: above 0.

    Raises:
        InvalidLayer: epsilon is out of range.
    """

    epsilon: float = 1e-5

    def __post_init__(self) -> None:
        self._demand(self.epsilon > 0, f"epsilon is {self.epsilon}; it must be more than 0")

    def output_shape(self, shape: Shape) -> Shape:
        self._require(len(shape) > 0, shape, "at least one axis: (..., features)")
        return shape

    def variables(self, shape: Shape) -> dict[str, Variable]:
        self.output_shape(shape)
        return {"scale": trainable(shape[-1:], _ONES), "bias": trainable(shape[-1:], _ZEROS)}

    def apply(self, params: Values, state: Values, x: Array, train: Train) -> tuple[Array, dict[str, Array], Pullback]:  # noqa: ARG002
        features = self._kept(params, "scale", None).shape[0]
        self._kept(params, "bias", features)
        self._require_floats(x)
        self._require(x.ndim > 1 and x.shape[-1] == features, x.shape[1:], f"(..., {features})")
        wide = widened(x)
        centered = wide - wide.mean(axis=-1, keepdims=True)
        inverse = 1 / namespace_of(x).sqrt((centered * centered).mean(axis=-1, keepdims=True) + self.epsilon)
        normal = centered * inverse
        scale, bias = (params[name].astype(wide.dtype, copy=False) for name in ("scale", "bias"))

        def pullback(dy: Array) -> tuple[dict[str, Array], Array]:
            flat = widened(dy)
            found = _like(params, column_sums(flat * normal), column_sums(flat))
            scaled = flat * scale
            shared = (scaled * normal).mean(axis=-1, keepdims=True)
            dx = (scaled - scaled.mean(axis=-1, keepdims=True) - normal * shared) * inverse
            return found, dx.astype(x.dtype, copy=False)

        return (normal * scale + bias).astype(x.dtype, copy=False), {}, pullback


def _like(params: Values, scale: Array, bias: Array) -> dict[str, Array]:
    return {
        "scale": scale.astype(params["scale"].dtype, copy=False),
        "bias": bias.astype(params["bias"].dtype, copy=False),
    }


__all__ = ["BatchNorm", "LayerNorm"]
