"""Variables of a pipeline: each has one value, on the device of the first stage that uses it."""

import math
from collections.abc import Sequence

import numpy as np

from shoal.program import Array
from shoal_distribute.devices import LogicalDevice
from shoal_distribute.replica_context import Replicated, current_replica
from shoal_distribute.values import DistributedVariable


class StageVariable(DistributedVariable):
    """A variable with one value, which is on the host until its model is cut into stages.

    Args:
        strategy, name, initial, trainable: see `DistributedVariable`.

    Attributes:
        stage: the stage that owns it; 0 until the model is cut.
        is_placed: whether its model is cut.
    """

    def __init__(self, strategy: Replicated, name: str, initial: np.ndarray, *, trainable: bool) -> None:
        super().__init__(strategy, name, initial, trainable=trainable)
        self._value: Array = np.array(initial)
        self._device: LogicalDevice | None = None
        self.stage = 0

    @property
    def is_placed(self) -> bool:
        return self._device is not None

    @property
    def nbytes(self) -> int:
        """The bytes of the value."""
        return math.prod(self.shape) * int(self.dtype.itemsize)

    def place(self, stages: Sequence[int], devices: Sequence[LogicalDevice]) -> None:
        """Moves the value to the first stage that uses it, unless another model has placed it.

        Args:
            stages: numbers of the stages that use it, in order.
            devices: the devices of all stages.

        Raises:
            InvalidLayer: another model has placed it where these stages cannot read it.
        """
        if not self.is_placed:
            self.stage, self._device = stages[0], devices[stages[0]]
            self._value = self._device.put(self._value)

    @property
    def updaters(self) -> Sequence[int]:
        """Numbers of the stages that update its value, in order. They need the gradients of all stages that use it."""
        return (self.stage,)

    @property
    def values(self) -> tuple[Array, ...]:
        return (self._value,)

    def read(self) -> Array:
        replica = current_replica()
        here = replica.device if replica and replica.strategy is self.strategy else self.strategy.devices[0]
        return here.put(self._value)  # a copy only in another stage, for a layer that both have

    def _set(self, value: np.ndarray) -> None:
        given = np.array(value, self.dtype)
        self._value = self._device.put(given) if self._device else given


__all__ = ["StageVariable"]
