"""Losses of batches with their gradients, and losses of single samples with pullbacks.

`softmax_cross_entropy`, `sigmoid_cross_entropy` and `mean_squared_error` return the mean over a batch, and its gradient
with respect to the model's outputs.

The other functions take outputs [..., n] and targets, and return the losses [...] with their pullback. The pullback
takes the gradient with respect to the losses and returns the gradient with respect to the outputs, in their dtype.
16-bit floats are computed in float32. The values equal those of Keras, which clips probabilities to [1e-7, 1 - 1e-7].
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from shoal import errors
from shoal.program import Array
from shoal_nn._ops import is_float, widened
from shoal_nn._shape_errors import shape_error
from shoal_nn.activations import sigmoid
from shoal_worker.arrays import Namespace, namespace_of

LossPullback = Callable[[Array], Array]
# Smallest probability, and smallest number whose logarithm is taken.
EPSILON = 1e-7


def softmax_cross_entropy(logits: Array, labels: Array) -> tuple[Array, Array]:
    """Returns the mean of -sum(labels * log(softmax(logits))), over all axes but the last, and its gradient.

    Args:
        logits: [..., classes].
        labels: class probabilities of the same shape, or class numbers [...] as integers. On a GPU, class numbers are
            not checked, because a check would wait for the device. For an invalid number, the loss is that of an
            arbitrary class.

    Returns:
        The loss, a 0-d array on the same device, and its gradient with respect to the logits, in their dtype. For
        16-bit floats, the loss is computed and returned in float32.

    Raises:
        InvalidShape: the shapes do not match, or the logits are not floats.
        InvalidData: a label is not a class number.
    """
    labels = _as_labels("softmax_cross_entropy", logits, labels)
    xp, wide = namespace_of(logits), widened(logits)
    sparse = labels.dtype.kind in "iu" and labels.shape == logits.shape[:-1]
    if logits.ndim == 0 or not (sparse or labels.shape == logits.shape):
        wants = f"{logits.shape} of probabilities, or {logits.shape[:-1]} of integers"
        raise _label_error("softmax_cross_entropy", labels, wants)
    classes = logits.shape[-1]
    if sparse and xp is np:
        _check_classes(labels, classes)
    shifted = (wide - wide.max(axis=-1, keepdims=True)).reshape(-1, classes)  # avoids overflow of the exponential
    powers = xp.exp(shifted)
    sums = powers.sum(axis=1, keepdims=True)
    count = len(shifted)
    if sparse:
        which = xp.arange(count), labels.reshape(-1)
        loss = (xp.log(sums[:, 0]) - shifted[which]).mean()
        gradient = powers / sums
        gradient[which] -= 1
    else:
        wanted = labels.reshape(-1, classes).astype(wide.dtype, copy=False)
        loss = (wanted * (xp.log(sums) - shifted)).sum() / count
        gradient = powers / sums * wanted.sum(axis=1, keepdims=True) - wanted
    gradient /= count
    return loss, gradient.reshape(logits.shape).astype(logits.dtype, copy=False)


def sigmoid_cross_entropy(logits: Array, labels: Array) -> tuple[Array, Array]:
    """Returns the mean of -labels * log(p) - (1 - labels) * log(1 - p), where p = sigmoid(logits), and its gradient.

    Args:
        logits: any shape.
        labels: the same shape, in [0, 1].

    Returns:
        As for `softmax_cross_entropy`.

    Raises:
        InvalidShape: the shapes differ, or the outputs are not floats.
    """
    labels = _as_labels("sigmoid_cross_entropy", logits, labels)
    if labels.shape != logits.shape:
        raise _label_error("sigmoid_cross_entropy", labels, str(logits.shape))
    xp, wide = namespace_of(logits), widened(logits)
    wanted = labels.astype(wide.dtype, copy=False)
    loss = (xp.maximum(wide, 0) - wide * wanted + xp.log1p(xp.exp(-xp.abs(wide)))).mean()
    gradient = (sigmoid(wide) - wanted) / wide.size
    return loss, gradient.astype(logits.dtype, copy=False)


def mean_squared_error(outputs: Array, targets: Array) -> tuple[Array, Array]:
    """Returns the mean of (outputs - targets)^2 over all elements, and its gradient.

    Args:
        outputs: any shape.
        targets: the same shape.

    Returns:
        As for `softmax_cross_entropy`.

    Raises:
        InvalidShape: the shapes differ, or the outputs are not floats.
    """
    targets = _as_labels("mean_squared_error", outputs, targets)
    if targets.shape != outputs.shape:
        raise _label_error("mean_squared_error", targets, str(outputs.shape))
    wide = widened(outputs)
    error = wide - targets.astype(wide.dtype, copy=False)
    return (error * error).mean(), (error * (2 / error.size)).astype(outputs.dtype, copy=False)


def squared_errors(outputs: Array, targets: Array) -> tuple[Array, LossPullback]:
    """Returns the means of (outputs - targets)^2 over the last axis, and their pullback."""
    _, y, t = _checked("squared_errors", outputs, targets)
    error = y - t
    return _mean(outputs, error * error, 2 * error)


def absolute_errors(outputs: Array, targets: Array) -> tuple[Array, LossPullback]:
    """Returns the means of |outputs - targets| over the last axis, and their pullback. The slope at 0 is 0."""
    xp, y, t = _checked("absolute_errors", outputs, targets)
    error = y - t
    return _mean(outputs, xp.abs(error), xp.sign(error))


def absolute_percentage_errors(outputs: Array, targets: Array) -> tuple[Array, LossPullback]:
    """Returns 100 times the means of |(outputs - targets) / targets| over the last axis, and their pullback."""
    xp, y, t = _checked("absolute_percentage_errors", outputs, targets)
    weight = 100 / xp.maximum(xp.abs(t), EPSILON)
    error = y - t
    return _mean(outputs, xp.abs(error) * weight, xp.sign(error) * weight)


def squared_logarithmic_errors(outputs: Array, targets: Array) -> tuple[Array, LossPullback]:
    """Returns the means of (log(1 + outputs) - log(1 + targets))^2 over the last axis, and their pullback."""
    xp, y, t = _checked("squared_logarithmic_errors", outputs, targets)
    above = xp.maximum(y, EPSILON)
    error = xp.log(above + 1) - xp.log(xp.maximum(t, EPSILON) + 1)
    return _mean(outputs, error * error, 2 * error / (above + 1) * (y > EPSILON))


def huber_losses(outputs: Array, targets: Array, delta: float = 1.0) -> tuple[Array, LossPullback]:
    """Returns Huber's losses (1964), averaged over the last axis, and their pullback.

    Args:
        outputs: [..., n].
        targets: of the same shape.
        delta: the error where the loss changes from a square to a line, > 0.
    """
    xp, y, t = _checked("huber_losses", outputs, targets)
    error = y - t
    size = xp.abs(error)
    value = xp.where(size <= delta, error * error / 2, delta * size - delta * delta / 2)
    return _mean(outputs, value, xp.clip(error, -delta, delta))


def log_cosh_losses(outputs: Array, targets: Array) -> tuple[Array, LossPullback]:
    """Returns the means of log(cosh(outputs - targets)) over the last axis, and their pullback."""
    xp, y, t = _checked("log_cosh_losses", outputs, targets)
    error = y - t
    size = xp.abs(error)
    return _mean(outputs, size + xp.log1p(xp.exp(-2 * size)) - math.log(2), xp.tanh(error))


def hinge_losses(outputs: Array, targets: Array) -> tuple[Array, LossPullback]:
    """Returns the means of max(1 - targets * outputs, 0) over the last axis, and their pullback.

    Targets are -1 or 1. If all are 0 or 1, 0 means -1.
    """
    xp, y, t = _checked("hinge_losses", outputs, targets)
    if bool(((t == 0) | (t == 1)).all()):
        t = 2 * t - 1
    margin = 1 - t * y
    return _mean(outputs, xp.maximum(margin, 0), -t * (margin > 0))


def poisson_losses(outputs: Array, targets: Array) -> tuple[Array, LossPullback]:
    """Returns the means of outputs - targets * log(outputs) over the last axis, and their pullback."""
    xp, y, t = _checked("poisson_losses", outputs, targets)
    return _mean(outputs, y - t * xp.log(y + EPSILON), 1 - t / (y + EPSILON))


def divergences(outputs: Array, targets: Array) -> tuple[Array, LossPullback]:
    """Returns the sums of targets * log(targets / outputs) over the last axis, and their pullback.

    Kullback and Leibler, "On information and sufficiency", 1951.
    """
    xp, y, t = _checked("divergences", outputs, targets)
    t, p = xp.clip(t, EPSILON, 1), xp.clip(y, EPSILON, 1)
    return _sum(outputs, t * xp.log(t / p), -t / p * (p == y))


def binary_cross_entropies(
    outputs: Array, targets: Array, *, from_logits: bool = False, smoothing: float = 0.0
) -> tuple[Array, LossPullback]:
    """Returns the means of -targets * log(p) - (1 - targets) * log(1 - p) over the last axis, and their pullback.

    Args:
        outputs: [..., n], the probabilities p, or logits.
        targets: of the same shape, in [0, 1].
        from_logits: whether p = sigmoid(outputs).
        smoothing: weight of 1/2 in the targets, in [0, 1].

    Raises:
        InvalidShape: the shapes differ, or the outputs are not floats.
    """
    xp, y, t = _checked("binary_cross_entropies", outputs, targets)
    t = t * (1 - smoothing) + smoothing / 2
    if from_logits:
        return _mean(outputs, xp.maximum(y, 0) - y * t + xp.log1p(xp.exp(-xp.abs(y))), sigmoid(y) - t)
    p = xp.clip(y, EPSILON, 1 - EPSILON)
    return _mean(outputs, -t * xp.log(p) - (1 - t) * xp.log(1 - p), (p - t) / (p * (1 - p)) * (p == y))


def categorical_cross_entropies(
    outputs: Array, targets: Array, *, from_logits: bool = False, smoothing: float = 0.0
) -> tuple[Array, LossPullback]:
    """Returns -sum(targets * log(p)) over the last axis, and the pullback.

    Args:
        outputs: [..., classes], the probabilities p, which are divided by their sum, or logits.
        targets: class probabilities of the same shape, or class numbers [...] as integers. Class numbers are checked on
            a CPU only, because a check would wait for a GPU.
        from_logits: whether p = softmax(outputs).
        smoothing: weight of the uniform distribution in the targets, in [0, 1].

    Raises:
        InvalidShape: the shapes do not match, or the outputs are not floats.
        InvalidData: a target is not a class number.
    """
    xp, y, t = _classes("categorical_cross_entropies", outputs, targets)
    if smoothing:
        t = t * (1 - smoothing) + smoothing / y.shape[-1]
    if from_logits:
        shifted = y - y.max(axis=-1, keepdims=True)
        powers = xp.exp(shifted)
        sums = powers.sum(axis=-1, keepdims=True)
        return _sum(outputs, t * (xp.log(sums) - shifted), powers / sums * t.sum(axis=-1, keepdims=True) - t)
    total = y.sum(axis=-1, keepdims=True)
    share = y / total
    p = xp.clip(share, EPSILON, 1 - EPSILON)
    slope = -t / p * (p == share)  # with respect to the share
    return _sum(outputs, -t * xp.log(p), (slope - (slope * share).sum(axis=-1, keepdims=True)) / total)


def _mean(outputs: Array, values: Array, slopes: Array) -> tuple[Array, LossPullback]:
    count = values.shape[-1]
    losses, pull = _sum(outputs, values, slopes)
    return losses / count, lambda dlosses: pull(dlosses / count)


def _sum(outputs: Array, values: Array, slopes: Array) -> tuple[Array, LossPullback]:
    """Returns the sums over the last axis, and the pullback for the derivatives of each value by its output."""

    def pull(dlosses: Array) -> Array:
        return (dlosses[..., None] * slopes).astype(outputs.dtype, copy=False)

    return values.sum(axis=-1), pull


def _checked(loss: str, outputs: Array, targets: Any) -> tuple[Namespace, Array, Array]:
    """Returns the namespace, and both arrays in the same dtype. Raises InvalidShape if they do not match."""
    if not is_float(outputs.dtype):
        raise shape_error(loss, loss, "outputs of", str(outputs.dtype), "floats", "the model's last layer")
    xp, wide = namespace_of(outputs), widened(outputs)
    targets = xp.asarray(targets)
    if outputs.ndim == 0 or targets.shape != outputs.shape:
        raise _label_error(loss, targets, str(outputs.shape))
    return xp, wide, targets.astype(wide.dtype, copy=False)


def _classes(loss: str, outputs: Array, targets: Any) -> tuple[Namespace, Array, Array]:
    """Does the same as `_checked`, but also takes class numbers, which it converts to probabilities."""
    xp = namespace_of(outputs)
    targets = xp.asarray(targets)
    if outputs.ndim == 0 or targets.shape != outputs.shape[:-1]:
        return _checked(loss, outputs, targets)
    if targets.dtype.kind not in "iu":
        raise _label_error(loss, targets, f"{outputs.shape} of probabilities, or {outputs.shape[:-1]} of integers")
    classes = outputs.shape[-1]
    if xp is np and targets.size and not 0 <= targets.min() <= targets.max() < classes:
        wrong = int(targets.min() if targets.min() < 0 else targets.max())
        raise errors.InvalidData(
            f"{loss} got the label {wrong} for outputs of {classes} classes, 0 to {classes - 1}; correct the labels, "
            "or give the model more outputs"
        )
    return _checked(loss, outputs, targets[..., None] == xp.arange(classes))


def _as_labels(loss: str, outputs: Array, labels: Array) -> Array:
    """Returns the labels as an array. Raises InvalidShape unless the outputs are floats."""
    if not is_float(outputs.dtype):
        wants, change = "floats", "the model's input: shoal.data.augment.ToFloat converts images to floats"
        raise shape_error(loss, loss, "outputs of", str(outputs.dtype), wants, change)
    return namespace_of(outputs).asarray(labels)


def _label_error(loss: str, labels: Array, wants: str) -> errors.InvalidShape:
    got = f"{labels.shape} and {labels.dtype}"
    return shape_error(loss, loss, "labels of shape", got, wants, "the labels, or the model's last layer")


def _check_classes(labels: np.ndarray, classes: int) -> None:
    low, high = int(labels.min(initial=0)), int(labels.max(initial=0))
    if low < 0 or high >= classes:
        raise errors.InvalidData(
            f"softmax_cross_entropy got the label {low if low < 0 else high} for logits of {classes} classes, 0 to "
            f"{classes - 1}; correct the labels, or give the model more outputs"
        )


__all__ = [
    "EPSILON",
    "LossPullback",
    "absolute_errors",
    "absolute_percentage_errors",
    "binary_cross_entropies",
    "categorical_cross_entropies",
    "divergences",
    "hinge_losses",
    "huber_losses",
    "log_cosh_losses",
    "mean_squared_error",
    "poisson_losses",
    "sigmoid_cross_entropy",
    "softmax_cross_entropy",
    "squared_errors",
    "squared_logarithmic_errors",
]
