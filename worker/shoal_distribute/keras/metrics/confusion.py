"""Metrics of two classes that count true and false answers: precision, recall and the area under the ROC curve."""

from typing import Any

import numpy as np

from shoal.program import Array
from shoal_distribute.keras.metrics.base import Metric
from shoal_distribute.keras.metrics.functions import pair_of
from shoal_distribute.keras.tensor import array_of


class _Confusion(Metric):
    """Base class: counts answers at thresholds.

    Args:
        name: see `Metric`.
        thresholds: outputs above a threshold count as positive.
    """

    def __init__(self, name: str | None, thresholds: np.ndarray, /) -> None:
        super().__init__(name)
        self._thresholds = thresholds

    def empty(self) -> list[np.ndarray]:
        return [np.zeros(len(self._thresholds)) for _ in range(4)]

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
        positive, flat = labels.reshape(-1).astype(bool), weights.reshape(-1)
        above = y.reshape(-1) > xp.asarray(self._thresholds)[:, None]
        yes, no = flat * positive, flat * ~positive
        self.add((above * yes).sum(1), (above * no).sum(1), (~above * yes).sum(1), (~above * no).sum(1))


class Precision(_Confusion):
    """Share of the samples taken as positive that are positive.

    Args:
        thresholds: outputs above it count as positive. None means 0.5.
        name: see `Metric`.
    """

    def __init__(self, thresholds: float | None = None, name: str | None = None) -> None:
        super().__init__(name, np.array([0.5 if thresholds is None else thresholds]))

    def value(self, *sums: np.ndarray) -> Any:
        true, false, _, _ = sums
        return _share(true, true + false)[0]


class Recall(_Confusion):
    """Share of the positive samples that are taken as positive.

    Args:
        thresholds: outputs above it count as positive. None means 0.5.
        name: see `Metric`.
    """

    def __init__(self, thresholds: float | None = None, name: str | None = None) -> None:
        super().__init__(name, np.array([0.5 if thresholds is None else thresholds]))

    def value(self, *sums: np.ndarray) -> Any:
        true, _, missed, _ = sums
        return _share(true, true + missed)[0]


class AUC(_Confusion):
    """Area under the ROC curve, from the answers at evenly spaced thresholds. `shoal_nn` has the exact one.

    Args:
        num_thresholds: number of thresholds, 2 or more.
        name: see `Metric`.
    """

    def __init__(self, num_thresholds: int = 200, name: str | None = None) -> None:
        inner = np.arange(1, num_thresholds - 1) / (num_thresholds - 1)
        super().__init__(name, np.array([-1e-7, *inner, 1 + 1e-7]))

    def value(self, *sums: np.ndarray) -> Any:
        true, false, missed, right = sums
        rate, wrong = _share(true, true + missed), _share(false, false + right)
        return ((rate[:-1] + rate[1:]) / 2 * (wrong[:-1] - wrong[1:])).sum()


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    shares: np.ndarray = np.divide(part, whole, out=np.zeros(part.shape), where=whole > 0)
    return shares


__all__ = ["AUC", "Precision", "Recall"]
