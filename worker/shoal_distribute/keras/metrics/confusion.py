"""Metrics of two classes that count true and false answers: precision, recall and areas under curves."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal import errors
from shoal.program import Array
from shoal_distribute.keras.metrics.base import Metric
from shoal_distribute.keras.metrics.functions import pair_of
from shoal_distribute.keras.names import advice
from shoal_distribute.keras.tensor import array_of
from shoal_worker.arrays import Namespace

_LOWEST = -1e10  # below all outputs, as in Keras
_CURVES = ("ROC", "PR", "PRGAIN")
_SUMMATIONS = ("interpolation", "minoring", "majoring")


class _Confusion(Metric):
    """Base class: counts answers at thresholds.

    Args:
        thresholds: outputs above a threshold count as positive.
        name: see `Metric`.
        dtype: see `Metric`.
    """

    def __init__(self, thresholds: np.ndarray, name: str | None, dtype: str | None, /) -> None:
        super().__init__(dtype, name)
        self._thresholds = thresholds
        self._by_label: int | None = None  # the number of labels that are counted apart; None means none

    def empty(self) -> list[np.ndarray]:
        shape = (len(self._thresholds),) if self._by_label is None else (len(self._thresholds), self._by_label)
        return [np.zeros(shape) for _ in range(4)]

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds the answers of a batch.

        Args:
            y_true: labels, 0 or 1.
            y_pred: probabilities.
            sample_weight: weights of the samples; None means 1.
        """
        xp, labels, y = pair_of(y_true, y_pred)
        weights: Array = xp.ones(y.shape)
        if sample_weight is not None:
            given = xp.asarray(array_of(sample_weight)).astype("float64")
            weights = weights * given.reshape(*given.shape, *(1 for _ in range(y.ndim - given.ndim)))
        labels, y, weights = self.chosen(xp, labels, y, weights)
        shape = (-1,) if self._by_label is None else (-1, self._by_label)
        positive, weights, y = labels.reshape(shape).astype(bool), weights.reshape(shape), y.reshape(shape)
        above = y > xp.asarray(self._thresholds).reshape(-1, *(1 for _ in range(y.ndim)))
        yes, no = weights * positive, weights * ~positive
        self.add((above * yes).sum(1), (above * no).sum(1), (~above * yes).sum(1), (~above * no).sum(1))

    def chosen(self, xp: Namespace, labels: Array, y: Array, weights: Array) -> tuple[Array, Array, Array]:
        """Returns what is counted of the labels, the outputs and their weights. A subclass may define it.

        Args:
            xp: the namespace of the arrays.
            labels: labels.
            y: outputs.
            weights: weights, in the shape of the outputs.
        """
        del xp
        return labels, y, weights


class _AtThresholds(_Confusion):
    """Base class of metrics that have a value for each threshold.

    Args:
        thresholds: outputs above it count as positive: a number, or a list for a result for each. None means 0.5, or
            with `top_k` that all of the largest outputs count.
        top_k: number of the largest outputs of a sample that may count as positive; None means all.
        class_id: the class that is counted alone; None means all.
        name: see `Metric`.
        dtype: see `Metric`.

    Raises:
        BadRequest: a threshold is not from 0 to 1.
    """

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        top_k: int | None = None,
        class_id: int | None = None,
        name: str | None = None,
        dtype: str | None = None,
    ) -> None:
        if thresholds is not None and not all(0 <= it <= 1 for it in np.ravel(thresholds)):
            raise errors.BadRequest(f"{type(self).__name__}: thresholds is {thresholds!r}; give numbers from 0 to 1")
        default = 0.5 if top_k is None else _LOWEST
        super().__init__(np.ravel(default if thresholds is None else thresholds), name, dtype)
        self._top, self._class = top_k, class_id

    def chosen(self, xp: Namespace, labels: Array, y: Array, weights: Array) -> tuple[Array, Array, Array]:
        if self._top is not None:
            rank = (-y).argsort(axis=-1, kind="stable").argsort(axis=-1, kind="stable")
            y = xp.where(rank < self._top, y, y.dtype.type(_LOWEST))
        if self._class is None:
            return labels, y, weights
        if y.ndim < 2 or not -y.shape[-1] <= self._class < y.shape[-1]:
            raise errors.InvalidShape(
                f"metric {self.name} counts the class {self._class}, but got outputs of the shape {y.shape}; give "
                "outputs [samples, classes]"
            )
        return labels[..., self._class], y[..., self._class], weights[..., self._class]

    def shares(self, part: np.ndarray, whole: np.ndarray) -> Any:
        """Returns part / whole for each threshold, or one number if there is one threshold."""
        found = _share(part, whole)
        return found[0] if len(found) == 1 else found


class Precision(_AtThresholds):
    """Share of the samples taken as positive that are positive.

    Args:
        thresholds: outputs above it count as positive: a number, or a list for a result for each. None means 0.5, or
            with `top_k` that all of the largest outputs count.
        top_k: number of the largest outputs of a sample that may count as positive; None means all.
        class_id: the class that is counted alone; None means all.
        name: see `Metric`.
        dtype: see `Metric`.

    Raises:
        BadRequest: a threshold is not from 0 to 1.
    """

    def value(self, *sums: np.ndarray) -> Any:
        true, false, _, _ = sums
        return self.shares(true, true + false)


class Recall(_AtThresholds):
    """Share of the positive samples that are taken as positive. The arguments are those of `Precision`."""

    def value(self, *sums: np.ndarray) -> Any:
        true, _, missed, _ = sums
        return self.shares(true, true + missed)


class AUC(_Confusion):
    """Area under a curve, from the answers at thresholds. `shoal_nn` has the exact one under the ROC curve.

    Args:
        num_thresholds: number of evenly spaced thresholds, 2 or more.
        curve: "ROC", "PR" (precision and recall) or "PRGAIN".
        summation_method: height between two thresholds: "interpolation", "minoring" (the lower one) or "majoring".
        name: see `Metric`.
        dtype: see `Metric`.
        thresholds: thresholds between 0 and 1, in place of evenly spaced ones.
        multi_label: whether each label of the last axis has a curve of its own. The result is the mean of the areas.
        num_labels: number of labels, for `multi_label`. None means that of the first batch; in several processes, each
            must have one.
        label_weights: weights of the labels: for the mean of the areas, or for the answers. None means 1.
        from_logits: whether outputs are logits instead of probabilities.

    Raises:
        BadRequest: an argument is out of range, or the curve or the method is unknown.
    """

    def __init__(
        self,
        num_thresholds: int = 200,
        curve: str = "ROC",
        summation_method: str = "interpolation",
        name: str | None = None,
        dtype: str | None = None,
        thresholds: Sequence[float] | None = None,
        multi_label: bool = False,
        num_labels: int | None = None,
        label_weights: Any = None,
        from_logits: bool = False,
    ) -> None:
        for what, given, known in (("curve", curve, _CURVES), ("summation_method", summation_method, _SUMMATIONS)):
            if given not in known:
                raise errors.BadRequest(f"AUC: {what} is {given!r}; {advice(str(given), known)}")
        if num_thresholds < 2:
            raise errors.BadRequest(f"AUC: num_thresholds is {num_thresholds}; give 2 or more")
        if num_labels is not None and not multi_label:
            raise errors.BadRequest("AUC: num_labels is given without multi_label=True; leave it out")
        even = np.arange(1, num_thresholds - 1) / (num_thresholds - 1)
        inner = even if thresholds is None else sorted(thresholds)
        super().__init__(np.array([-1e-7, *inner, 1 + 1e-7]), name, dtype)
        self._curve, self._summation = curve, summation_method
        self._multi_label, self._by_label = multi_label, num_labels
        self._label_weights = None if label_weights is None else np.asarray(label_weights, float)
        self._from_logits = from_logits

    def chosen(self, xp: Namespace, labels: Array, y: Array, weights: Array) -> tuple[Array, Array, Array]:
        if self._from_logits:
            y = (1 + xp.tanh(y / 2)) / 2
        if self._multi_label:
            if y.ndim != 2 or y.shape[1] != (self._by_label or y.shape[1]):
                wants = f"[samples, {self._by_label or 'labels'}]"
                raise errors.InvalidShape(f"metric {self.name} got outputs of the shape {y.shape}; give {wants}")
            self._by_label = y.shape[1]
        elif self._label_weights is not None:
            weights = weights * xp.asarray(self._label_weights)
        return labels, y, weights

    def value(self, *sums: np.ndarray) -> Any:
        areas = self._areas(*sums)
        if areas.ndim == 0:  # one curve, or no batch yet
            return areas
        return np.average(areas, weights=self._label_weights)

    def _areas(self, true: np.ndarray, false: np.ndarray, missed: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Returns the area, or that of each label, for the answers at each threshold."""
        if (self._curve, self._summation) == ("PR", "interpolation"):
            return _interpolated(true, false, missed)
        recall = _share(true, true + missed)
        if self._curve == "ROC":
            x, y = _share(false, false + right), recall
        elif self._curve == "PR":
            x, y = recall, _share(true, true + false)
        else:
            odds = _share(true + missed, right + false)
            x = np.where(true > 0, np.maximum(1 - odds * _share(missed, true), 0), 0)
            y = np.where(true > 0, 1 - odds * _share(false, true), 1)
        lower, upper = np.minimum(y[:-1], y[1:]), np.maximum(y[:-1], y[1:])
        heights = {"minoring": lower, "majoring": upper}.get(self._summation, (lower + upper) / 2)
        areas: np.ndarray = (heights * (x[:-1] - x[1:])).sum(axis=0)
        return areas


def _interpolated(true: np.ndarray, false: np.ndarray, missed: np.ndarray) -> np.ndarray:
    """Returns the area under the curve of precision and recall (Davis and Goadrich, ICML 2006, section 4).

    Between two thresholds, the counts of true and of all positive answers are linear.

    Args:
        true: positive answers that are right, at each threshold.
        false: positive answers that are wrong.
        missed: negative answers that are wrong.
    """
    positive = true + false
    more, slope = true[:-1] - true[1:], _share(true[:-1] - true[1:], positive[:-1] - positive[1:])
    ratio = np.where(positive[1:] > 0, _share(positive[:-1], positive[1:]), 1)
    ratio = np.where(ratio > 0, ratio, 1)
    parts = slope * (more + (true[1:] - slope * positive[1:]) * np.log(ratio))
    areas: np.ndarray = _share(parts, true[1:] + missed[1:]).sum(axis=0)
    return areas


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    shares: np.ndarray = np.divide(part, whole, out=np.zeros(part.shape), where=whole > 0)
    return shares


__all__ = ["AUC", "Precision", "Recall"]
