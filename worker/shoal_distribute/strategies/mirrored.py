"""Strategies whose replicas have a copy of all variables: on one device, and on several devices of one process."""

from collections.abc import Sequence

import numpy as np

from shoal import errors, optim
from shoal.program import Array
from shoal_distribute.collectives import ReduceOp
from shoal_distribute.cross_device_ops import CrossDeviceOps, default_cross_device_ops
from shoal_distribute.devices import logical_devices
from shoal_distribute.replica_context import ReplicaContext, current_replica
from shoal_distribute.strategies.base import Strategy
from shoal_distribute.strategies.local_state import OptimizerStates
from shoal_distribute.values import DistributedVariable, MirroredVariable


class MirroredStrategy(Strategy):
    """One process, several devices: each has a replica with a copy of all variables.

    A batch is divided between the replicas. They add up their gradients, and each applies the sum to its copy, so that
    the copies stay equal, bit by bit.

    Args:
        devices: their names, such as ["/gpu:0", "/gpu:1"] or ["/cpu:0", "/cpu:1"]. None means all GPUs of this machine,
            or "/cpu:0" if it has none.
        cross_device_ops: how the replicas add up their gradients. None means NCCL for GPUs, otherwise a ring.

    Raises:
        DeviceUnavailable: there is no such device, or the devices do not fit the cross-device ops.
    """

    def __init__(self, devices: Sequence[str] | None = None, cross_device_ops: CrossDeviceOps | None = None) -> None:
        super().__init__(logical_devices(devices))
        self._ops = cross_device_ops or default_cross_device_ops(self.devices)
        self._ops.check(self.devices)
        self._states = OptimizerStates(len(self.devices))

    def create_variable(self, name: str, initial: np.ndarray, *, trainable: bool = True) -> DistributedVariable:
        return MirroredVariable(self, name, initial, trainable=trainable)

    def join(self, replica: ReplicaContext, op: ReduceOp, arrays: list[Array]) -> list[Array]:
        return self._ops.all_reduce(replica, op, arrays) if self.local_replicas > 1 else arrays

    def iterations(self, optimizer: optim.Optimizer) -> int:
        return self._states.of(optimizer).version

    def set_learning_rate(self, optimizer: optim.Optimizer, learning_rate: float | optim.Schedule) -> None:
        self._states.set_learning_rate(optimizer, learning_rate)

    def optimizer_state(self, optimizer: optim.Optimizer) -> dict[str, np.ndarray]:
        return self._states.arrays(optimizer)

    def restore_optimizer(self, optimizer: optim.Optimizer, iterations: int, state: dict[str, np.ndarray]) -> None:
        self._states.restore(optimizer, iterations, state, lambda copy, array: self.devices[copy].put(array))

    def _apply(
        self,
        replica: ReplicaContext,
        optimizer: optim.Optimizer,
        variables: list[DistributedVariable],
        arrays: list[Array],
    ) -> None:
        joined = self.join(replica, ReduceOp.SUM, arrays)
        parts = [(it.name, it.read(), gradient) for it, gradient in zip(variables, joined, strict=True)]
        self._states.of(optimizer, replica.local_replica).update(parts)


class OneDeviceStrategy(MirroredStrategy):
    """One replica on one device.

    Args:
        device: its name.

    Raises:
        DeviceUnavailable: there is no such device.
    """

    def __init__(self, device: str) -> None:
        if not isinstance(device, str):
            raise errors.DeviceUnavailable(f'device is {device!r}; give one name, such as "/cpu:0"', device=str(device))
        super().__init__([device])


class DefaultStrategy(MirroredStrategy):
    """The strategy outside of any scope: one replica on the first GPU, or on the CPU, so that the same code runs alone.

    Attributes:
        only_replica: its replica. Outside of any scope, all code is this replica's.
    """

    is_default = True

    def __init__(self) -> None:
        super().__init__([logical_devices(None)[0].name])
        self.only_replica = ReplicaContext(self, 0, self.devices[0], None)

    def _own_replica(self) -> ReplicaContext:
        return self.only_replica if current_replica() is None else super()._own_replica()


__all__ = ["DefaultStrategy", "MirroredStrategy", "OneDeviceStrategy"]
