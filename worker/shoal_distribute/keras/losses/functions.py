"""Losses of samples, as functions of labels and outputs."""

from collections.abc import Callable
from typing import Any

from shoal import errors
from shoal.program import Array
from shoal_distribute.keras.layers.base import as_tensor
from shoal_distribute.keras.tensor import Tensor, array_of, recorded
from shoal_nn import losses
from shoal_worker.arrays import namespace_of


def _computed(loss: Callable[..., Any], y_true: Any, y_pred: Any, axis: int = -1, **options: Any) -> Tensor:
    """Returns the loss of each sample, recorded. Labels and outputs may differ by a last axis of length 1.

    Args:
        loss: a loss of shoal_nn, over the last axis.
        y_true: labels.
        y_pred: outputs of a model.
        axis: the axis to take in place of the last one. Labels with fewer axes than outputs do not have it.
        **options: arguments of the loss.
    """
    y = as_tensor(y_pred)
    labels = namespace_of(y.array).asarray(array_of(as_tensor(y_true)))
    if axis not in {-1, y.ndim - 1}:
        if labels.ndim == y.ndim:
            labels = namespace_of(labels).moveaxis(labels, axis, -1)
        y = _moved(y, axis, -1)
    values, pull = loss(y.array, _aligned(labels, y.array), **options)
    return recorded(values, (y,), lambda dy: [pull(dy)])


def _aligned(labels: Array, outputs: Array) -> Array:
    if labels.ndim + 1 == outputs.ndim and outputs.shape[-1] == 1:
        return labels[..., None]
    return labels[..., 0] if labels.ndim == outputs.ndim + 1 and labels.shape[-1] == 1 else labels


def _moved(y: Tensor, source: int, target: int) -> Tensor:
    xp = namespace_of(y.array)
    return recorded(xp.moveaxis(y.array, source, target), (y,), lambda dy: [xp.moveaxis(dy, target, source)])


def mean_squared_error(y_true: Any, y_pred: Any) -> Tensor:
    """Returns mean((y_true - y_pred)^2) over the last axis."""
    return _computed(losses.squared_errors, y_true, y_pred)


def mean_absolute_error(y_true: Any, y_pred: Any) -> Tensor:
    """Returns mean(|y_true - y_pred|) over the last axis."""
    return _computed(losses.absolute_errors, y_true, y_pred)


def mean_absolute_percentage_error(y_true: Any, y_pred: Any) -> Tensor:
    """Returns 100 * mean(|(y_true - y_pred) / y_true|) over the last axis."""
    return _computed(losses.absolute_percentage_errors, y_true, y_pred)


def mean_squared_logarithmic_error(y_true: Any, y_pred: Any) -> Tensor:
    """Returns mean((log(y_true + 1) - log(y_pred + 1))^2) over the last axis."""
    return _computed(losses.squared_logarithmic_errors, y_true, y_pred)


def huber(y_true: Any, y_pred: Any, delta: float = 1.0) -> Tensor:
    """Returns Huber's loss, averaged over the last axis.

    Args:
        y_true: labels.
        y_pred: outputs of a model.
        delta: the error where the loss changes from a square to a line.
    """
    return _computed(losses.huber_losses, y_true, y_pred, delta=delta)


def log_cosh(y_true: Any, y_pred: Any) -> Tensor:
    """Returns mean(log(cosh(y_pred - y_true))) over the last axis."""
    return _computed(losses.log_cosh_losses, y_true, y_pred)


def hinge(y_true: Any, y_pred: Any) -> Tensor:
    """Returns mean(max(1 - y_true * y_pred, 0)) over the last axis; labels are -1 and 1, or 0 and 1."""
    return _computed(losses.hinge_losses, y_true, y_pred)


def poisson(y_true: Any, y_pred: Any) -> Tensor:
    """Returns mean(y_pred - y_true * log(y_pred)) over the last axis."""
    return _computed(losses.poisson_losses, y_true, y_pred)


def kl_divergence(y_true: Any, y_pred: Any) -> Tensor:
    """Returns sum(y_true * log(y_true / y_pred)) over the last axis."""
    return _computed(losses.divergences, y_true, y_pred)


def binary_crossentropy(
    y_true: Any, y_pred: Any, from_logits: bool = False, label_smoothing: float = 0.0, axis: int = -1
) -> Tensor:
    """Returns the cross entropy of two classes, averaged over an axis.

    Args:
        y_true: labels, 0 or 1.
        y_pred: probabilities, or logits.
        from_logits: whether they are logits.
        label_smoothing: weight of 1/2 in the labels.
        axis: the axis.
    """
    options = {"from_logits": from_logits, "smoothing": label_smoothing}
    return _computed(losses.binary_cross_entropies, y_true, y_pred, axis, **options)


def categorical_crossentropy(
    y_true: Any, y_pred: Any, from_logits: bool = False, label_smoothing: float = 0.0, axis: int = -1
) -> Tensor:
    """Returns the cross entropy of several classes.

    Args:
        y_true: labels, one-hot. Class numbers as integers are converted.
        y_pred: probabilities, or logits, [..., classes].
        from_logits: whether they are logits.
        label_smoothing: weight of the uniform distribution in the labels.
        axis: axis of the classes.
    """
    options = {"from_logits": from_logits, "smoothing": label_smoothing}
    return _computed(losses.categorical_cross_entropies, y_true, y_pred, axis, **options)


def sparse_categorical_crossentropy(
    y_true: Any, y_pred: Any, from_logits: bool = False, ignore_class: int | None = None, axis: int = -1
) -> Tensor:
    """Returns the cross entropy of several classes.

    Args:
        y_true: class numbers, [...] or [..., 1].
        y_pred: probabilities, or logits, [..., classes].
        from_logits: whether they are logits.
        ignore_class: a class number whose samples have the loss 0; None means none.
        axis: axis of the classes.

    Raises:
        InvalidShape: the labels are one-hot.
    """
    y = as_tensor(y_pred)
    labels = namespace_of(y.array).asarray(array_of(as_tensor(y_true)))
    if labels.ndim == y.ndim and labels.shape[-1] == 1:
        labels = labels[..., 0]
    if labels.ndim == y.ndim:
        raise errors.InvalidShape(
            f"sparse_categorical_crossentropy got labels of the shape {labels.shape} for outputs {y.shape}; give class "
            "numbers, or use categorical_crossentropy for one-hot labels"
        )
    labels = labels.astype("int64", copy=False)
    counted = None if ignore_class is None else labels != ignore_class
    given = labels if counted is None else labels * counted
    found = _computed(losses.categorical_cross_entropies, given, y, axis, from_logits=from_logits)
    return found if counted is None else found * counted.astype(found.dtype)


__all__ = [
    "binary_crossentropy",
    "categorical_crossentropy",
    "hinge",
    "huber",
    "kl_divergence",
    "log_cosh",
    "mean_absolute_error",
    "mean_absolute_percentage_error",
    "mean_squared_error",
    "mean_squared_logarithmic_error",
    "poisson",
    "sparse_categorical_crossentropy",
]
