"""Weights of samples by their classes: the argument `class_weight` of `fit`."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal import errors
from shoal_distribute.keras.tensor import array_of
from shoal_distribute.keras.training.data import BatchTuple, arrays_of
from shoal_distribute.values import PerReplica
from shoal_worker.arrays import on_host


def weighted_by_class(batch: BatchTuple, class_weight: Mapping[int, float] | None) -> BatchTuple:
    """Returns a batch with the weights of its samples' classes. A class without an entry has the weight 1.

    Args:
        batch: inputs, labels and weights. It may be divided between replicas.
        class_weight: weights by class number; None returns the batch as it is.

    Raises:
        BadRequest: the batch has weights already.
        InvalidData: the batch has no labels, or several.
    """
    if class_weight is None:
        return batch
    x, y, weights = batch
    if weights is not None:
        raise errors.BadRequest("class_weight and sample_weight are both given; give only one of them")
    if isinstance(y, PerReplica):
        return x, y, PerReplica([_weights_of(part, class_weight) for part in y.values])
    return x, y, _weights_of(y, class_weight)


def _weights_of(y: Any, class_weight: Mapping[int, float]) -> np.ndarray:
    given = arrays_of(y)
    if given is None or isinstance(given, list):
        raise errors.InvalidData("class_weight needs one array of labels; give y, or use sample_weight")
    labels = on_host(array_of(given))
    if labels.ndim > 1:
        labels = labels[..., 0] if labels.shape[-1] == 1 else labels.argmax(axis=-1)
    found = np.ones(labels.shape, np.float32)
    for number, weight in class_weight.items():
        found[np.round(labels) == number] = weight
    return found


__all__ = ["weighted_by_class"]
