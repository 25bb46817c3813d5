"""Metrics whose kind depends on the shapes of labels and outputs."""

import threading
from collections.abc import Callable
from typing import Any

from shoal.program import Array
from shoal_distribute.keras.losses import Loss
from shoal_distribute.keras.metrics.base import Mean, Metric
from shoal_distribute.keras.metrics.classes import (
    BinaryAccuracy,
    BinaryCrossentropy,
    CategoricalAccuracy,
    CategoricalCrossentropy,
    SparseCategoricalAccuracy,
    SparseCategoricalCrossentropy,
)


class MatchingMetric(Mean):
    """Accuracy or cross entropy whose kind depends on the shapes of the first labels and outputs, as in Keras.

    Another metric has the sums as soon as its kind is known. Before, this one has none, but takes part in `result`:
    other processes may have had samples already.

    Args:
        kind: "accuracy", "acc", "crossentropy" or "ce", which is also its name.
        loss: the model's loss: whether outputs are logits.
    """

    def __init__(self, kind: str, loss: Loss | None = None) -> None:
        super().__init__(kind)
        self._kind, self._loss = kind, loss
        self._choice = threading.Lock()  # guards _metric: the replicas bring their first batches at the same time
        self._metric: Metric | None = None

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:  # type: ignore[override]
        """Adds the values of a batch.

        Args:
            y_true: labels.
            y_pred: outputs of a model.
            sample_weight: weights of the samples; None means 1.
        """
        with self._choice:
            self._metric = self._metric or self._chosen(tuple(y_true.shape), tuple(y_pred.shape))
        self._metric.update_state(y_true, y_pred, sample_weight)

    def result(self) -> Any:
        return self._metric.result() if self._metric else super().result()

    def local_result(self) -> Any:
        return self._metric.local_result() if self._metric else super().local_result()

    def snapshot(self) -> dict[int, list[Array]]:
        return self._metric.snapshot() if self._metric else {}

    def restore_snapshot(self, sums: dict[int, list[Array]]) -> None:
        if self._metric:
            self._metric.restore_snapshot(sums)

    def value_since(self, sums: dict[int, list[Array]]) -> float:
        return self._metric.value_since(sums) if self._metric else 0.0

    def reset_state(self) -> None:
        if self._metric:
            self._metric.reset_state()

    def _chosen(self, labels: tuple[int, ...], outputs: tuple[int, ...]) -> Metric:
        binary = outputs[-1] == 1
        sparse = len(labels) < len(outputs) or (labels[-1] == 1 and outputs[-1] > 1)
        kinds: dict[str, tuple[Callable[..., Metric], ...]] = {
            "accuracy": (BinaryAccuracy, SparseCategoricalAccuracy, CategoricalAccuracy),
            "crossentropy": (BinaryCrossentropy, SparseCategoricalCrossentropy, CategoricalCrossentropy),
        }
        kind = {"acc": "accuracy", "ce": "crossentropy"}.get(self._kind, self._kind)
        options = {"from_logits": True} if kind == "crossentropy" and self._from_logits else {}
        made = kinds[kind][0 if binary else 1 if sparse else 2](**options)
        made.strategy = self.strategy
        return made

    @property
    def _from_logits(self) -> bool:
        return bool(self._loss is not None and self._loss.arguments().get("from_logits"))


__all__ = ["MatchingMetric"]
