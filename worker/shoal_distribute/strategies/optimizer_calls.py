"""The calls of a strategy about optimizers, whose state belongs to the strategy and not to the settings.

`JobOptimizer` is the optimizer of a strategy whose variables are on servers.
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Protocol

import numpy as np

from shoal import errors, optim


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


class _TakesRates(Protocol):
    """What sets the learning rate of a job: a session."""

    def set_learning_rate(self, learning_rate: float | optim.Schedule) -> None:
        """Sets the learning rate."""


class JobOptimizer:
    """The optimizer that the servers of a job apply. A strategy has one, from the first that is made in its scope.

    Args:
        owner: who has one optimizer, for errors, such as "a ParameterServerStrategy has".
        scope: the strategy, for errors, such as "this ParameterServerStrategy".
        first: what the optimizer must be made before.

    Attributes:
        settings: the optimizer, as it was made. None before.
    """

    def __init__(self, owner: str, scope: str, first: str) -> None:
        self._owner, self._scope, self._first = owner, scope, first
        self.settings: optim.Optimizer | None = None
        self._first_rate: float | optim.Schedule | None = None  # set before the session opens

    def adopt(self, optimizer: optim.Optimizer) -> None:
        """Takes the optimizer.

        Raises:
            InvalidOptimizer: there is another one.
        """
        if self.settings is not None and self.settings is not optimizer:
            raise errors.InvalidOptimizer(
                f"{self._owner} one optimizer, which the servers apply, but a second one was made; use VariableGroup "
                "to give variables settings of their own"
            )
        self.settings = optimizer

    def check_adopted(self, optimizer: optim.Optimizer) -> None:
        """Raises InvalidOptimizer if an optimizer is another one."""
        if optimizer is not self.settings:
            raise errors.InvalidOptimizer(
                f"the optimizer was not made in the scope of {self._scope}; make it there, before the first "
                f"{self._first}"
            )

    def set_learning_rate(self, session: _TakesRates | None, learning_rate: float | optim.Schedule) -> None:
        """Sets the learning rate of the job.

        Args:
            session: the session of the job; None before it opens.
            learning_rate: a number or a schedule.
        """
        if session:
            session.set_learning_rate(learning_rate)
        else:
            self._first_rate = learning_rate

    def at_start(self) -> optim.Optimizer:
        """Returns the optimizer for a new session, with the learning rate that was set last."""
        assert self.settings is not None
        rate = self._first_rate
        return self.settings if rate is None else replace(self.settings, learning_rate=rate)


__all__ = ["JobOptimizer", "OptimizerCalls"]
