"""Losses: what a model's outputs are worth, and the gradient by them, with which a pullback begins."""

import numpy as np

from shoal import errors
from shoal.program import Array
from shoal_nn._ops import is_float, widened
from shoal_nn._shape_errors import shape_error
from shoal_nn.activations import sigmoid
from shoal_worker.arrays import namespace_of


def softmax_cross_entropy(logits: Array, labels: Array) -> tuple[Array, Array]:
    """The mean of -sum(labels * log(softmax(logits))), over all axes but the last.

    Args:
        logits: [..., classes].
        labels: of the same shape, probabilities of classes; or [...], whole numbers of classes. On a GPU nothing looks
            for numbers of no class, since that would wait for the device: CuPy takes the loss of some class for them.

    Returns:
        The loss, an array of no dimension on their device, and its gradient by the logits, of their dtype. Halves are
        computed in float32, and the loss is of it.

    Raises:
        InvalidShape: the shapes do not go together, or logits are not floats.
        InvalidData: a label is of no class.
    """
    labels = _taken("softmax_cross_entropy", logits, labels)
    xp, wide = namespace_of(logits), widened(logits)
    sparse = labels.dtype.kind in "iu" and labels.shape == logits.shape[:-1]
    if logits.ndim == 0 or not (sparse or labels.shape == logits.shape):
        wants = f"{logits.shape} of probabilities, or {logits.shape[:-1]} of whole numbers"
        raise _misfit("softmax_cross_entropy", labels, wants)
    classes = logits.shape[-1]
    if sparse and xp is np:
        _check_classes(labels, classes)
    shifted = (wide - wide.max(axis=-1, keepdims=True)).reshape(-1, classes)  # so that no exponential overflows
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
    """The mean of -labels * log(p) - (1 - labels) * log(1 - p), p = sigmoid(logits), over all elements.

    Args:
        logits: of any shape.
        labels: of the same shape, from 0 to 1.

    Returns:
        As of `softmax_cross_entropy`.

    Raises:
        InvalidShape: the shapes differ, or what the model gave is not of floats.
    """
    labels = _taken("sigmoid_cross_entropy", logits, labels)
    if labels.shape != logits.shape:
        raise _misfit("sigmoid_cross_entropy", labels, str(logits.shape))
    xp, wide = namespace_of(logits), widened(logits)
    wanted = labels.astype(wide.dtype, copy=False)
    loss = (xp.maximum(wide, 0) - wide * wanted + xp.log1p(xp.exp(-xp.abs(wide)))).mean()
    gradient = (sigmoid(wide) - wanted) / wide.size
    return loss, gradient.astype(logits.dtype, copy=False)


def mean_squared_error(outputs: Array, targets: Array) -> tuple[Array, Array]:
    """The mean of (outputs - targets)^2, over all elements.

    Args:
        outputs: of any shape.
        targets: of the same shape.

    Returns:
        As of `softmax_cross_entropy`.

    Raises:
        InvalidShape: the shapes differ, or what the model gave is not of floats.
    """
    targets = _taken("mean_squared_error", outputs, targets)
    if targets.shape != outputs.shape:
        raise _misfit("mean_squared_error", targets, str(outputs.shape))
    wide = widened(outputs)
    error = wide - targets.astype(wide.dtype, copy=False)
    return (error * error).mean(), (error * (2 / error.size)).astype(outputs.dtype, copy=False)


def _taken(loss: str, outputs: Array, labels: Array) -> Array:
    """The labels as an array; raises unless outputs are of floats."""
    if not is_float(outputs.dtype):
        wants, change = "floats", "what the model is fed: shoal.data.augment.ToFloat makes floats of images"
        raise shape_error(loss, loss, "outputs of", str(outputs.dtype), wants, change)
    return namespace_of(outputs).asarray(labels)


def _misfit(loss: str, labels: Array, wants: str) -> errors.InvalidShape:
    got = f"{labels.shape} and {labels.dtype}"
    return shape_error(loss, loss, "labels of shape", got, wants, "the labels, or the model's last layer")


def _check_classes(labels: np.ndarray, classes: int) -> None:
    low, high = int(labels.min(initial=0)), int(labels.max(initial=0))
    if low < 0 or high >= classes:
        raise errors.InvalidData(
            f"softmax_cross_entropy got the label {low if low < 0 else high} for logits of {classes} classes, 0 to "
            f"{classes - 1}; mend the labels, or give the model more outputs"
        )


__all__ = ["mean_squared_error", "sigmoid_cross_entropy", "softmax_cross_entropy"]
