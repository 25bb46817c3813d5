"""Values of metrics for single samples, as functions of labels and outputs. None of them is recorded by tapes."""

from typing import Any

from shoal.program import Array
from shoal_distribute.keras.layers.base import as_tensor
from shoal_distribute.keras.tensor import array_of
from shoal_worker.arrays import Namespace, namespace_of


def pair_of(y_true: Any, y_pred: Any) -> tuple[Namespace, Array, Array]:
    """Returns the namespace, the labels and the outputs, with the same number of axes if only a last 1 differs."""
    y = as_tensor(y_pred).array
    xp = namespace_of(y)
    labels = xp.asarray(array_of(as_tensor(y_true)))
    if labels.ndim + 1 == y.ndim and y.shape[-1] == 1:
        labels = labels[..., None]
    elif labels.ndim == y.ndim + 1 and labels.shape[-1] == 1:
        labels = labels[..., 0]
    return xp, labels, y


def accuracy(y_true: Any, y_pred: Any) -> Array:
    """Returns how many of the last axis' values are equal, as a share."""
    _, labels, y = pair_of(y_true, y_pred)
    return _over_last(labels == y)


def binary_accuracy(y_true: Any, y_pred: Any, threshold: float = 0.5) -> Array:
    """Returns the share of the last axis' outputs on the same side of the threshold as the labels.

    Args:
        y_true: labels, 0 or 1.
        y_pred: probabilities.
        threshold: outputs above it count as 1.
    """
    _, labels, y = pair_of(y_true, y_pred)
    return _over_last(labels == (y > threshold))


def categorical_accuracy(y_true: Any, y_pred: Any) -> Array:
    """Returns whether the largest output is at the label's place; labels are one-hot."""
    _, labels, y = pair_of(y_true, y_pred)
    return labels.argmax(axis=-1) == y.argmax(axis=-1)


def sparse_categorical_accuracy(y_true: Any, y_pred: Any) -> Array:
    """Returns whether the largest output is at the label's place; labels are class numbers, [...] or [..., 1]."""
    labels, y = class_numbers(y_true, y_pred)
    return labels == y.argmax(axis=-1)


def top_k_categorical_accuracy(y_true: Any, y_pred: Any, k: int = 5) -> Array:
    """Returns whether the label is among the largest outputs.

    Args:
        y_true: labels, one-hot.
        y_pred: outputs.
        k: number of the largest outputs.
    """
    _, labels, y = pair_of(y_true, y_pred)
    return _in_top(labels.argmax(axis=-1), y, k)


def sparse_top_k_categorical_accuracy(y_true: Any, y_pred: Any, k: int = 5) -> Array:
    """Returns whether the label is among the largest outputs.

    Args:
        y_true: labels, class numbers.
        y_pred: outputs.
        k: number of the largest outputs.
    """
    labels, y = class_numbers(y_true, y_pred)
    return _in_top(labels, y, k)


def class_numbers(y_true: Any, y_pred: Any) -> tuple[Array, Array]:
    """Returns class numbers without a last axis of length 1, and the outputs."""
    y = as_tensor(y_pred).array
    labels = namespace_of(y).asarray(array_of(as_tensor(y_true)))
    if labels.ndim == y.ndim and labels.shape[-1] == 1:
        labels = labels[..., 0]
    return labels.astype("int64"), y


def _over_last(hits: Array) -> Array:
    return hits.mean(axis=-1) if hits.ndim > 1 else hits


def _in_top(labels: Array, y: Array, k: int) -> Array:
    own = namespace_of(y).take_along_axis(y, labels[..., None], axis=-1)
    return (y > own).sum(axis=-1) < k


__all__ = [
    "accuracy",
    "binary_accuracy",
    "categorical_accuracy",
    "class_numbers",
    "pair_of",
    "sparse_categorical_accuracy",
    "sparse_top_k_categorical_accuracy",
    "top_k_categorical_accuracy",
]
