"""How good a model's outputs are, in figures that people read. What it learns from is in `losses`."""

from dataclasses import dataclass

import numpy as np

from shoal import errors
from shoal.program import Array
from shoal_nn._ops import widened
from shoal_nn._shape_errors import shape_error
from shoal_worker.arrays import namespace_of, on_host


def accuracy(logits: Array, labels: Array) -> Array:
    """How many of a batch have their label's logit as the largest, from 0 to 1.

    Args:
        logits: [..., classes], two or more.
        labels: [...], whole numbers of classes.

    Returns:
        The mean, an array of no dimension on their device. Of equal logits that of the lower class counts as the
        larger; a sample with NaN among its logits counts as wrong.

    Raises:
        InvalidShape: the shapes do not go together, or there is one class only.
    """
    return top_k_accuracy(logits, labels, 1)


def top_k_accuracy(logits: Array, labels: Array, k: int) -> Array:
    """How many of a batch have their label's logit among the k largest, from 0 to 1.

    Args:
        logits: as of `accuracy`.
        labels: as of `accuracy`.
        k: > 0.

    Returns:
        As of `accuracy`.

    Raises:
        InvalidShape: as of `accuracy`.
    """
    if logits.ndim == 0 or logits.shape[-1] < 2 or labels.shape != logits.shape[:-1] or labels.dtype.kind not in "iu":
        wants = "[...] of whole numbers, and logits of shape [..., classes] for two classes or more"
        raise _misfit("top_k_accuracy", logits.shape, labels, wants)
    xp, wide, which = namespace_of(logits), widened(logits), labels[..., None]
    own = xp.take_along_axis(wide, which, axis=-1)
    ahead = ~(wide <= own)  # larger, or not to be compared
    ahead |= (wide == own) & (xp.arange(logits.shape[-1]) < which)
    return (ahead.sum(axis=-1) < k).mean()


@dataclass(frozen=True, eq=False)
class AreaUnderCurve:
    """The area under the ROC curve: how likely a positive sample has a higher score than a negative one; ties half.

    It is exact, by the ranks of all scores (Mann and Whitney, "On a test of whether one of two random variables is
    stochastically larger than the other", 1947), so it is no mean of batches but a `shoal.program.AggregateMetric`, which holds
    5 bytes a sample on the host, 9 where logits are float64.

    Args:
        scores: of batches, each [samples].
        labels: of the same batches, each [samples], whether they are positive.
    """

    scores: tuple[np.ndarray, ...]
    labels: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, logits: Array, labels: Array) -> "AreaUnderCurve":
        """That of a batch.

        Args:
            logits: [batch], or [batch, 1] as a model gives them; anything that rises with them does as well.
            labels: of the same size, 0 or 1.

        Raises:
            InvalidShape: these are not their shapes.
            InvalidData: a label is neither 0 nor 1.
        """
        column = (len(logits), 1) if logits.ndim else ()
        if logits.ndim == 0 or not {logits.shape, labels.shape} <= {column[:1], column}:
            raise _misfit("AreaUnderCurve", logits.shape, labels, "[batch] or [batch, 1], and logits of the same size")
        given = on_host(labels).reshape(-1)
        positive = given == 1
        if not (positive | (given == 0)).all():
            raise errors.InvalidData("AreaUnderCurve got labels that are neither 0 nor 1; it is of two classes")
        return cls((on_host(widened(logits)).reshape(-1).copy(),), (positive,))

    def joined(self, other: "AreaUnderCurve") -> "AreaUnderCurve":
        """That of both sets together; nothing is copied."""
        return AreaUnderCurve(self.scores + other.scores, self.labels + other.labels)

    def value(self) -> float:
        """From 0 to 1; NaN where all samples are of one class, or a score is NaN."""
        xp = namespace_of(self.labels[0])
        scores, positive = xp.concatenate(self.scores), xp.concatenate(self.labels)
        _, group = xp.unique(scores, return_inverse=True)  # equal scores are a group, from the lowest
        of_group = xp.bincount(group)
        positives = xp.bincount(group[positive], minlength=len(of_group))
        negatives = of_group - positives
        pairs = int(positives.sum()) * int(negatives.sum())
        if pairs == 0 or bool(xp.isnan(scores).any()):
            return float("nan")
        below = negatives.cumsum() - negatives
        # Twice the pairs that are in order, in whole numbers: whatever the batches were, it is the same.
        return int((positives * (2 * below + negatives)).sum()) / (2 * pairs)


def _misfit(metric: str, logits: tuple[int, ...], labels: Array, wants: str) -> errors.InvalidShape:
    got = f"{labels.shape} and {labels.dtype} for logits of shape {logits}"
    return shape_error(metric, metric, "labels of shape", got, wants, "the labels, or the model's last layer")


__all__ = ["AreaUnderCurve", "accuracy", "top_k_accuracy"]
