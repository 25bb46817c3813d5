"""Variables of a pipeline: each has one value, on the device of the first stage that uses it."""

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
        return int(self._value.nbytes)

    def place(self, stage: int, device: LogicalDevice) -> None:
        """Moves the value to the stage that owns it.

        Args:
            stage: number of the stage.
            device: its device.
        """
        self.stage, self._device, self._value = stage, device, device.put(self._value)

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
