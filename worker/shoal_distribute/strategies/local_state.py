"""Optimizer state of strategies without servers: a `LocalOptimizer` for each copy of the variables."""

import copy as copying
import functools
import weakref
from collections.abc import Callable

import numpy as np

from shoal import optim
from shoal.program import Array
from shoal_distribute.local_optimizers import LocalOptimizer
from shoal_worker.arrays import on_host


class OptimizerStates:
    """The state of each optimizer, by the identity of the object: two with equal settings are two optimizers.

    The state lasts as long as the optimizer: nothing here keeps it alive.

    Args:
        copies: number of copies of the variables; each has its slots.
    """

    def __init__(self, copies: int) -> None:
        self._copies = copies
        self._states: dict[int, tuple[weakref.ref[optim.Optimizer], list[LocalOptimizer]]] = {}

    @property
    def optimizers(self) -> list[optim.Optimizer]:
        """The optimizers that have state, in the order in which it was made."""
        found = [optimizer() for optimizer, _ in list(self._states.values())]
        return [it for it in found if it is not None]

    def of(self, optimizer: optim.Optimizer, copy: int = 0) -> LocalOptimizer:
        """Returns the state of one copy.

        Args:
            optimizer: the optimizer.
            copy: number of the copy.

        Raises:
            InvalidOptimizer: it is not an optimizer of `shoal.optim`.
        """
        known = self._states.get(id(optimizer))
        if known is None:
            settings = copying.copy(optimizer)  # the state would keep the optimizer itself alive
            states = [LocalOptimizer(settings) for _ in range(self._copies)]
            # The entry goes before another object can get the id.
            made = weakref.ref(optimizer, functools.partial(self._drop, id(optimizer))), states
            known = self._states.setdefault(id(optimizer), made)  # of several replicas, one makes it
        return known[1][copy]

    def set_learning_rate(self, optimizer: optim.Optimizer, learning_rate: float | optim.Schedule) -> None:
        """Replaces the learning rate in all copies.

        Args:
            optimizer: the optimizer.
            learning_rate: a number or a schedule.
        """
        schedule = learning_rate if isinstance(learning_rate, optim.Schedule) else optim.ConstantLR(learning_rate)
        for copy in range(self._copies):
            self.of(optimizer, copy).learning_rate = schedule

    def arrays(self, optimizer: optim.Optimizer) -> dict[str, np.ndarray]:
        """Returns copies of the slots by "variable/slot", on the host."""
        return {path: np.array(on_host(array)) for path, array in self.of(optimizer).state().items()}

    def restore(
        self,
        optimizer: optim.Optimizer,
        iterations: int,
        state: dict[str, np.ndarray],
        put: Callable[[int, np.ndarray], Array],
    ) -> None:
        """Sets the slots of all copies.

        Args:
            optimizer: the optimizer.
            iterations: how often it has been applied.
            state: as `arrays` returned it.
            put: returns an array on the device of a copy.
        """
        for copy in range(self._copies):
            arrays = {path: np.array(array) for path, array in state.items()}
            self.of(optimizer, copy).restore(iterations, arrays, functools.partial(put, copy))

    def _drop(self, identity: int, _gone: object) -> None:
        self._states.pop(identity, None)


__all__ = ["OptimizerStates"]
