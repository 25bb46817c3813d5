"""LocalStrategy: the base class of strategies that apply optimizers in the worker's process, without servers."""

from collections.abc import Sequence

import numpy as np

from shoal import optim
from shoal_distribute.collectives import GroupTimings
from shoal_distribute.cross_device_ops import CrossDeviceOps
from shoal_distribute.devices import LogicalDevice
from shoal_distribute.strategies.base import Strategy
from shoal_distribute.strategies.local_state import OptimizerStates


class LocalStrategy(Strategy):
    """A strategy that keeps the state of its optimizers.

    Args:
        devices: a replica runs on each.
        ops: how the replicas join their arrays.
        places: the device of each copy of an optimizer's slots.
    """

    def __init__(self, devices: Sequence[LogicalDevice], ops: CrossDeviceOps, places: Sequence[LogicalDevice]) -> None:
        super().__init__(devices, ops)
        self._places, self._states = places, OptimizerStates(len(places))

    def timings(self) -> GroupTimings:
        """Returns the times of all processes over the last minute, by rank: local reduce, wait and transfer.

            print(strategy.timings())

        One process has no wait and no transfer. Its local reduce is how long its replicas joined arrays.
        """
        return self._timings()

    def iterations(self, optimizer: optim.Optimizer) -> int:
        return self._states.of(optimizer).version

    def set_learning_rate(self, optimizer: optim.Optimizer, learning_rate: float | optim.Schedule) -> None:
        self._states.set_learning_rate(optimizer, learning_rate)

    def optimizer_state(self, optimizer: optim.Optimizer) -> dict[str, np.ndarray]:
        return self._states.arrays(optimizer)

    def restore_optimizer(self, optimizer: optim.Optimizer, iterations: int, state: dict[str, np.ndarray]) -> None:
        self._states.restore(optimizer, iterations, state, lambda copy, array: self._places[copy].put(array))


__all__ = ["LocalStrategy"]
