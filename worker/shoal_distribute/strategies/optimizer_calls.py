"""The calls of a strategy about optimizers, whose state belongs to the strategy and not to the settings."""

from abc import ABC, abstractmethod

import numpy as np

from shoal import optim


class OptimizerCalls(ABC):
    """The calls of a strategy about an optimizer and its state."""

    def adopt_optimizer(self, optimizer: optim.Optimizer) -> None:
        """Tells the strategy of an optimizer that was made in its scope, before it is applied.

        Args:
            optimizer: the optimizer.

        Raises:
            InvalidOptimizer: the strategy has another optimizer already, and takes only one.
        """
        del optimizer  # most strategies make its state when it is first applied

    @abstractmethod
    def iterations(self, optimizer: optim.Optimizer) -> int:
        """Returns how often an optimizer has been applied."""

    @abstractmethod
    def set_learning_rate(self, optimizer: optim.Optimizer, learning_rate: float | optim.Schedule) -> None:
        """Replaces an optimizer's learning rate. Its state stays. Servers use the new rate shortly after this call.

        Args:
            optimizer: the optimizer.
            learning_rate: a number or a schedule.
        """

    @abstractmethod
    def optimizer_state(self, optimizer: optim.Optimizer) -> dict[str, np.ndarray]:
        """Returns an optimizer's slots by "variable/slot", on the host."""

    @abstractmethod
    def restore_optimizer(self, optimizer: optim.Optimizer, iterations: int, state: dict[str, np.ndarray]) -> None:
        """Sets an optimizer's slots.

        Args:
            optimizer: the optimizer.
            iterations: how often it has been applied.
            state: as `optimizer_state` returned it.
        """


__all__ = ["OptimizerCalls"]
