"""Metrics of `fit` for the job."""

from collections.abc import Mapping
from typing import Any

import keras

from shoal.keras._optimizer import DistributedOptimizer


class ReportMetrics(keras.callbacks.Callback):
    """Reports the metrics that `fit` shows, such as its loss, as metrics of the job, which the page shows.

        model.fit(x, y, callbacks=[shoal.keras.ReportMetrics()])

    Keras knows the metrics of a step after the step, so they are reported with the push of the next one.
    """

    def on_train_batch_end(self, _: int, logs: Mapping[str, Any] | None = None) -> None:
        """Keras calls it after each step, with means over the epoch so far."""
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)  # of mixed_float16
        if isinstance(optimizer, DistributedOptimizer):
            optimizer.report(**{name: float(value) for name, value in (logs or {}).items()})


__all__ = ["ReportMetrics"]
