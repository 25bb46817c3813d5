"""Losses, and their gradients with respect to a model's outputs."""

import numpy as np

from shoal import errors
from shoal.program import Array
from shoal_nn._ops import is_float, widened
from shoal_nn._shape_errors import shape_error
from shoal_nn.activations import sigmoid
from shoal_worker.arrays import namespace_of


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


__all__ = ["mean_squared_error", "sigmoid_cross_entropy", "softmax_cross_entropy"]
