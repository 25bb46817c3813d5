"""Variables of a pipeline: each has one value, on the device of the first stage that uses it."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal import errors
from shoal.program import Array
from shoal_distribute.devices import LogicalDevice
from shoal_distribute.replica_context import Replicated, current_replica
from shoal_distribute.tensor_parallel import SplitArray, SplitPlace
from shoal_distribute.values import DistributedVariable


class StageVariable(DistributedVariable):
    """A variable with one value, which is on the host until its model is cut into stages.

    Args:
        strategy, name, initial, trainable: see `DistributedVariable`.
        split: where its parts are, if it is split over devices of its stage.

    Attributes:
        stage: the stage that owns it; 0 until the model is cut.
        is_placed: whether its model is cut.
    """

    def __init__(
        self,
        strategy: Replicated,
        name: str,
        initial: np.ndarray,
        *,
        trainable: bool,
        split: SplitPlace | None = None,
    ) -> None:
        super().__init__(strategy, name, initial, trainable=trainable)
        self._split = split
        self._device: LogicalDevice | None = None
        self._value: Any = self.placed(np.array(initial))
        self.stage = 0

    @property
    def is_placed(self) -> bool:
        return self._device is not None

    @property
    def nbytes(self) -> int:
        """The bytes of the value, on all its devices in this process."""
        if isinstance(self._value, SplitArray):
            return sum(int(it.nbytes) for it in self._value.parts)
        return math.prod(self.shape) * int(self.dtype.itemsize)

    def place(self, stages: Sequence[int], devices: Sequence[LogicalDevice]) -> None:
        """Moves the value to the first stage that uses it, unless another model has placed it.

        Args:
            stages: numbers of the stages that use it, in order.
            devices: the devices of all stages.

        Raises:
            InvalidLayer: another model has placed it where these stages cannot read it, or it is split, and several
                stages use it.
        """
        if self._split and len(stages) > 1:
            raise errors.InvalidLayer(
                f"variable {self.name} is split over devices, but is used in the stages "
                f"{' and '.join(map(str, stages))}; choose a cut that leaves all its layers in one stage"
            )
        if not self.is_placed:
            self.stage, self._device = stages[0], devices[stages[0]]
            self._value = self._value if self._split else self._device.put(self._value)

    def placed(self, array: np.ndarray) -> Array:
        """Returns an array of the variable's shape where its value is: on its device, or in parts.

        Args:
            array: an array of its own on the host.
        """
        if self._split:
            return SplitArray.split(*self._split, array, copy=True)
        return self._device.put(array) if self._device else array

    @property
    def updaters(self) -> Sequence[int]:
        """Numbers of the stages that update its value, in order. They need the gradients of all stages that use it."""
        return (self.stage,)

    @property
    def values(self) -> tuple[Array, ...]:
        return (self._value,)

    def storage(self) -> Array:
        return self._value if self._split else self.read()

    def gradient(self, given: Array, device: LogicalDevice) -> Array:
        if self._split:
            return self._value.like(given).astype(self.dtype, copy=False)
        return super().gradient(given, device)

    def read(self) -> Array:
        if isinstance(self._value, SplitArray):
            return self._value.gathered()
        replica = current_replica()
        here = replica.device if replica and replica.strategy is self.strategy else self.strategy.devices[0]
        return here.put(self._value)  # a copy only in another stage, for a layer that both have

    def _set(self, value: np.ndarray) -> None:
        self._value = self.placed(np.array(value, self.dtype))


__all__ = ["StageVariable"]
