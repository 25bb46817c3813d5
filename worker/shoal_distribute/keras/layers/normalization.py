"""Normalization layers with Keras' defaults."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

import shoal_nn
from shoal import errors
from shoal_distribute.collectives import ReduceOp
from shoal_distribute.keras.layers.base import Shape
from shoal_distribute.keras.layers.core_layer import CoreLayer, WeightArguments
from shoal_distribute.replica_context import current_replica

_NO_RENORM = "there is no batch renormalization"


class _Normalizing(CoreLayer):
    """Base class of layers that scale and shift what they have normalized. The arguments are those of subclasses."""

    weight_names: ClassVar = {"scale": "gamma", "bias": "beta", "mean": "moving_mean", "var": "moving_variance"}

    def __init__(
        self, layer: shoal_nn.Layer, axis: int, without: set[str], found: dict[str, WeightArguments], **kwargs: Any
    ) -> None:
        super().__init__(found, **kwargs)
        self._layer, self._axis, self._without = layer, axis, without

    def core(self) -> shoal_nn.Layer:
        return self._layer

    def constants(self, shape: Shape, /) -> dict[str, np.ndarray]:
        if self._axis not in {-1, len(shape)}:
            raise errors.InvalidLayer(
                f"layer {self.name}: axis is {self._axis}; it must be the last one, -1 or {len(shape)}",
                kind=type(self).__name__,
            )
        kept = {"scale": np.ones(shape[-1:]), "bias": np.zeros(shape[-1:])}
        return {name: values for name, values in kept.items() if name in self._without}


class BatchNormalization(_Normalizing):
    """Normalization by the mean and the variance of the batch; in evaluation, by their moving averages.

    Each replica normalizes by its own part of the batch, unless `synchronized`. The moving averages of the replicas are
    averaged when they are read outside of `run`.

    Args:
        axis: the axis of the features; it must be the last one.
        momentum: weight of the old moving average.
        epsilon: what is added to the variance.
        center: whether to add beta.
        scale: whether to multiply by gamma.
        beta_initializer: name or object.
        gamma_initializer: name or object.
        moving_mean_initializer: name or object.
        moving_variance_initializer: name or object.
        beta_regularizer: name, object or function; None means none.
        gamma_regularizer: as `beta_regularizer`.
        beta_constraint: name, object or function; None means none.
        gamma_constraint: as `beta_constraint`.
        synchronized: whether all replicas normalize by the mean and the variance of the whole batch, as one replica
            would. `ReplicaContext.all_reduce` adds up their sums: twice in the forward pass and once in the backward
            pass, so all replicas need samples.
        **kwargs: see `Layer`.
    """

    refused: ClassVar = {
        "renorm": (False, _NO_RENORM),
        "renorm_clipping": (None, _NO_RENORM),
        "renorm_momentum": (0.99, _NO_RENORM),
    }

    def __init__(
        self,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        center: bool = True,
        scale: bool = True,
        beta_initializer: Any = "zeros",
        gamma_initializer: Any = "ones",
        moving_mean_initializer: Any = "zeros",
        moving_variance_initializer: Any = "ones",
        beta_regularizer: Any = None,
        gamma_regularizer: Any = None,
        beta_constraint: Any = None,
        gamma_constraint: Any = None,
        *,
        synchronized: bool = False,
        **kwargs: Any,
    ) -> None:
        kind = _SynchronizedBatchNorm if synchronized else shoal_nn.BatchNorm
        layer = kind(1 - momentum, epsilon, unbiased=False)
        found = {
            "bias": WeightArguments(beta_initializer, beta_regularizer, beta_constraint),
            "scale": WeightArguments(gamma_initializer, gamma_regularizer, gamma_constraint),
            "mean": WeightArguments(moving_mean_initializer),
            "var": WeightArguments(moving_variance_initializer),
        }
        super().__init__(layer, axis, _without(center, scale), found, **kwargs)
        self.joins_replicas = synchronized


class LayerNormalization(_Normalizing):
    """Normalization by the mean and the variance of each sample's features.

    Args:
        axis: the axis of the features; it must be the last one.
        epsilon: what is added to the variance.
        center: whether to add beta.
        scale: whether to multiply by gamma.
        beta_initializer: name or object.
        gamma_initializer: name or object.
        beta_regularizer: name, object or function; None means none.
        gamma_regularizer: as `beta_regularizer`.
        beta_constraint: name, object or function; None means none.
        gamma_constraint: as `beta_constraint`.
        **kwargs: see `Layer`.
    """

    def __init__(
        self,
        axis: int = -1,
        epsilon: float = 1e-3,
        center: bool = True,
        scale: bool = True,
        beta_initializer: Any = "zeros",
        gamma_initializer: Any = "ones",
        beta_regularizer: Any = None,
        gamma_regularizer: Any = None,
        beta_constraint: Any = None,
        gamma_constraint: Any = None,
        **kwargs: Any,
    ) -> None:
        found = {
            "bias": WeightArguments(beta_initializer, beta_regularizer, beta_constraint),
            "scale": WeightArguments(gamma_initializer, gamma_regularizer, gamma_constraint),
        }
        super().__init__(shoal_nn.LayerNorm(epsilon), axis, _without(center, scale), found, **kwargs)


@dataclass(frozen=True)
class _SynchronizedBatchNorm(shoal_nn.BatchNorm):
    """Batch normalization whose batch is that of all replicas. All replicas call it in the same order."""

    def _whole(self, *sums: Any) -> Sequence[Any]:
        replica = current_replica()
        if replica is None:
            return sums
        joined: Sequence[Any] = replica.all_reduce(ReduceOp.SUM, sums)
        return joined


def _without(center: bool, scale: bool) -> set[str]:
    """Returns the names in shoal_nn of the variables that a layer does not have."""
    return {name for name, has in {"bias": center, "scale": scale}.items() if not has}


__all__ = ["BatchNormalization", "LayerNormalization"]
