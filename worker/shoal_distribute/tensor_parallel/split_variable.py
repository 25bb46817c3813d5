"""Split variables: one variable of which each device of a group has a part."""

import numpy as np

from shoal import errors
from shoal.program import Array
from shoal_distribute.devices import LogicalDevice
from shoal_distribute.replica_context import Replicated
from shoal_distribute.tensor_parallel.split_array import SplitArray, SplitPlace
from shoal_distribute.values import DistributedVariable


class SplitVariable(DistributedVariable):
    """A variable in parts along an axis. Its name, its shape and its value are those of the whole.

    Checkpoints, `numpy` and `assign` know only the whole, so a file fits any number of devices.

    Args:
        strategy: the strategy that updates it.
        name: its name.
        initial: its initial value, whole.
        trainable: whether it gets gradients.
        place: where its parts are.

    Raises:
        InvalidShape: the axis has fewer elements than there are devices.
        WrongContext: the strategy has several replicas, or its variables are on servers.
    """

    def __init__(
        self,
        strategy: Replicated,
        name: str,
        initial: np.ndarray,
        *,
        trainable: bool,
        place: SplitPlace,
    ) -> None:
        if not strategy.keeps_split_variables:
            kind, devices = type(strategy).__name__, ", ".join(it.name for it in strategy.devices)
            raise errors.WrongContext(
                f"variable {name} is split over devices, but a {kind} on {devices} keeps no split variables; make the "
                "model outside of any scope, or in that of OneDeviceStrategy, PipelineStrategy or "
                "MultiWorkerPipelineStrategy, or use layers that are not split"
            )
        super().__init__(strategy, name, initial, trainable=trainable)
        self._value = SplitArray.split(*place, initial, copy=True)

    @property
    def values(self) -> tuple[Array, ...]:
        return (self.read(),)

    def read(self) -> Array:
        """Returns the whole value, gathered on the group's `home`."""
        return self._value.gathered()

    def storage(self) -> SplitArray:
        return self._value

    def numpy(self) -> np.ndarray:
        return np.asarray(self._value)

    def gradient(self, given: Array, device: LogicalDevice) -> SplitArray:  # noqa: ARG002 - the parts have their devices
        return self._value.like(given).astype(self.dtype, copy=False)

    def _set(self, value: np.ndarray) -> None:
        whole = np.asarray(value, self.dtype)
        self._value = SplitArray.split(self._value.group, self._value.axis, whole, copy=True)


__all__ = ["SplitVariable"]
