"""Metrics of a model's outputs. Losses are in `losses`."""

from dataclasses import dataclass

import numpy as np

from shoal import errors
from shoal.program import Array
from shoal_nn._ops import widened
from shoal_nn._shape_errors import shape_error
from shoal_worker.arrays import namespace_of, on_host


def accuracy(logits: Array, labels: Array) -> Array:
    """Returns the share of samples whose label has the largest logit, from 0 to 1.

    Args:
        logits: [..., classes], with two classes or more.
        labels: [...], class numbers as integers.

    Returns:
        The share, a 0-d array on the same device. If logits are equal, the lowest of their class numbers wins. A
        sample with NaN in its logits counts as wrong.

    Raises:
        InvalidShape: the shapes do not match, or there is only one class.
    """
    return top_k_accuracy(logits, labels, 1)


def top_k_accuracy(logits: Array, labels: Array, k: int) -> Array:
    """Returns the share of samples whose label is among the k largest logits, from 0 to 1.

    Args:
        logits: [..., classes], with two classes or more.
        labels: [...], class numbers as integers.
        k: 1 or more.

    Returns:
        As for `accuracy`.

    Raises:
        InvalidShape: the shapes do not match, or there is only one class.
    """
    if logits.ndim == 0 or logits.shape[-1] < 2 or labels.shape != logits.shape[:-1] or labels.dtype.kind not in "iu":
        wants = "[...] of integers, and logits of shape [..., classes] for two classes or more"
        raise _label_error("top_k_accuracy", logits.shape, labels, wants)
    xp, wide, which = namespace_of(logits), widened(logits), labels[..., None]
    own = xp.take_along_axis(wide, which, axis=-1)
    ahead = ~(wide <= own)  # larger, or NaN
    ahead |= (wide == own) & (xp.arange(logits.shape[-1]) < which)
    return (ahead.sum(axis=-1) < k).mean()


@dataclass(frozen=True, eq=False)
class AreaUnderCurve:
    """Area under the ROC curve: the probability that a positive sample has a higher score than a negative one.

    Ties count half. The value is exact: it follows from the ranks of all scores (Mann and Whitney, "On a test of
    whether one of two random variables is stochastically larger than the other", 1947). It is therefore a
    `shoal.program.AggregateMetric` and not a mean over batches. It holds 5 bytes per sample on the host, or 9 bytes for
    float64 logits.

    Args:
        scores: one array [samples] for each batch.
        labels: one array [samples] for each batch: whether a sample is positive.
    """

    scores: tuple[np.ndarray, ...]
    labels: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, logits: Array, labels: Array) -> "AreaUnderCurve":
        """Returns the metric of a batch.

        Args:
            logits: [batch] or [batch, 1], or any scores that increase with them.
            labels: [batch] or [batch, 1], 0 or 1.

        Raises:
            InvalidShape: the logits or the labels have another shape.
            InvalidData: a label is neither 0 nor 1.
        """
        column = (len(logits), 1) if logits.ndim else ()
        if logits.ndim == 0 or not {logits.shape, labels.shape} <= {column[:1], column}:
            raise _label_error(
                "AreaUnderCurve", logits.shape, labels, "[batch] or [batch, 1], and logits of the same size"
            )
        given = on_host(labels).reshape(-1)
        positive = given == 1
        if not (positive | (given == 0)).all():
            raise errors.InvalidData("AreaUnderCurve got labels that are neither 0 nor 1; it needs two classes")
        return cls((on_host(widened(logits)).reshape(-1).copy(),), (positive,))

    def merged_with(self, other: "AreaUnderCurve") -> "AreaUnderCurve":
        """Returns the metric of both sets together, without copies."""
        return AreaUnderCurve(self.scores + other.scores, self.labels + other.labels)

    def value(self) -> float:
        """Returns a number from 0 to 1; NaN if all samples have one class or a score is NaN."""
        xp = namespace_of(self.labels[0])
        scores, positive = xp.concatenate(self.scores), xp.concatenate(self.labels)
        _, group = xp.unique(scores, return_inverse=True)  # groups of equal scores, in ascending order
        of_group = xp.bincount(group)
        positives = xp.bincount(group[positive], minlength=len(of_group))
        negatives = of_group - positives
        pairs = int(positives.sum()) * int(negatives.sum())
        if pairs == 0 or bool(xp.isnan(scores).any()):
            return float("nan")
        below = negatives.cumsum() - negatives
        # Twice the number of ordered pairs, as an integer, so that it does not depend on the batches.
        return int((positives * (2 * below + negatives)).sum()) / (2 * pairs)


def _label_error(metric: str, logits: tuple[int, ...], labels: Array, wants: str) -> errors.InvalidShape:
    got = f"{labels.shape} and {labels.dtype} for logits of shape {logits}"
    return shape_error(metric, metric, "labels of shape", got, wants, "the labels, or the model's last layer")


__all__ = ["AreaUnderCurve", "accuracy", "top_k_accuracy"]
