"""CentralStorageStrategy: variables on the host, computation on all devices of one process."""

from collections.abc import Sequence

import numpy as np

from shoal import optim
from shoal.program import Array
from shoal_distribute.collectives import ReduceOp
from shoal_distribute.cross_device_ops import ReductionToOneDevice, RingAllReduce
from shoal_distribute.devices import logical_device, logical_devices
from shoal_distribute.replica_context import ReplicaContext, current_replica
from shoal_distribute.strategies.local import LocalStrategy
from shoal_distribute.values import DistributedVariable, MirroredVariable


class CentralVariable(DistributedVariable):
    """A trainable variable with one value, on the parameter device. Replicas on other devices read copies.

    Args:
        strategy, name, initial, trainable: see `DistributedVariable`.
    """

    def __init__(self, strategy: "CentralStorageStrategy", name: str, initial: np.ndarray, *, trainable: bool) -> None:
        super().__init__(strategy, name, initial, trainable=trainable)
        self._device = strategy.parameter_device
        self._value = self._device.put(np.array(initial))

    @property
    def values(self) -> tuple[Array, ...]:
        return (self._value,)

    @property
    def value(self) -> Array:
        """The value, on the parameter device."""
        return self._value

    def read(self) -> Array:
        replica = current_replica()
        return replica.device.put(self._value) if replica and replica.strategy is self.strategy else self._value

    def _set(self, value: np.ndarray) -> None:
        self._value = self._device.put(np.array(value, self.dtype))


class CentralStorageStrategy(LocalStrategy):
    """One process, several devices: the variables are on one device, and each replica computes on its own.

    The replicas' gradients are added up on the parameter device, where the optimizer and its slots are. So a GPU needs
    no memory for slots.

    Args:
        compute_devices: their names. None means all GPUs of this machine, or "/cpu:0" if it has none.
        parameter_device: where the variables are; by default the host.

    Raises:
        DeviceUnavailable: there is no such device.
    """

    def __init__(self, compute_devices: Sequence[str] | None = None, parameter_device: str | None = None) -> None:
        devices, place = logical_devices(compute_devices), logical_device(parameter_device or "/cpu:0")
        # On the host, all replicas add a part each; otherwise one of them adds on the parameter device.
        on_host = not any(device.is_gpu for device in (*devices, place))
        super().__init__(devices, RingAllReduce() if on_host else ReductionToOneDevice(place.name), places=[place])
        self.parameter_device = place

    def create_variable(self, name: str, initial: np.ndarray, *, trainable: bool = True) -> DistributedVariable:
        return (CentralVariable if trainable else MirroredVariable)(self, name, initial, trainable=trainable)

    def _apply(
        self,
        replica: ReplicaContext,
        optimizer: optim.Optimizer,
        variables: list[DistributedVariable],
        arrays: list[Array],
    ) -> None:
        joined = self.join(replica, ReduceOp.SUM, arrays)
        if replica.local_replica == 0:
            place = self.parameter_device
            place.activate()
            parts = [
                (it.name, it.values[0], place.put(gradient)) for it, gradient in zip(variables, joined, strict=True)
            ]
            self._states.of(optimizer).update(parts)
            for variable in variables:
                variable.constrain(variable.values[0])
            replica.device.activate()
        replica.exchange("the end of apply_gradients", None)  # the others read the new values


__all__ = ["CentralStorageStrategy", "CentralVariable"]
