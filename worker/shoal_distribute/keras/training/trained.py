"""Protocol of the models that the loops and the callbacks get."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from shoal_distribute.keras.layers.base import Layer
from shoal_distribute.keras.metrics import Metric
from shoal_distribute.keras.optimizers import Optimizer
from shoal_distribute.keras.tensor import Tensor
from shoal_distribute.strategies import Strategy
from shoal_distribute.values import DistributedVariable


class Trained(Protocol):
    """A model, as the loops and the callbacks see it: `keras.Model`."""

    name: str
    strategy: Strategy
    optimizer: Optimizer | None
    stop_training: bool
    first_epoch: int

    @property
    def metrics(self) -> list[Metric]:
        """See `Trainer`."""

    @property
    def losses(self) -> list[Tensor]:
        """See `Layer`."""

    @property
    def trainable_variables(self) -> list[DistributedVariable]:
        """See `Layer`."""

    @property
    def non_trainable_variables(self) -> list[DistributedVariable]:
        """See `Layer`."""

    def all_layers(self, *, trained: bool = False) -> Iterator[Layer]:
        """See `Layer`."""

    def train_step(self, data: Any) -> None:
        """See `Trainer`."""

    def test_step(self, data: Any) -> None:
        """See `Trainer`."""

    def predict_step(self, data: Any) -> Any:
        """See `Trainer`."""

    def reset_metrics(self) -> None:
        """See `Trainer`."""

    def get_metrics_result(self) -> dict[str, float]:
        """See `Trainer`."""

    def get_weights(self) -> list[np.ndarray]:
        """See `Layer`."""

    def set_weights(self, weights: Sequence[Any]) -> None:
        """See `Layer`."""

    def save(self, filepath: str) -> None:
        """See `Model`."""

    def save_weights(self, filepath: str) -> None:
        """See `Model`."""


__all__ = ["Trained"]
