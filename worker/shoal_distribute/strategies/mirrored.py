"""Strategies whose replicas have a copy of all variables: on one device, and on several devices of one process."""

from collections.abc import Iterator, Sequence

import numpy as np

from shoal import errors, optim
from shoal.program import Array
from shoal_distribute.collectives import ReduceOp
from shoal_distribute.cross_device_ops import CrossDeviceOps, default_cross_device_ops
from shoal_distribute.devices import logical_devices
from shoal_distribute.replica_context import ReplicaContext, current_replica
from shoal_distribute.strategies.local import LocalStrategy
from shoal_distribute.values import DistributedVariable, MirroredVariable


class MirroredStrategy(LocalStrategy):
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
        found = logical_devices(devices)
        super().__init__(found, cross_device_ops or default_cross_device_ops(found), places=found)
        self.keeps_split_variables = len(found) == 1

    def create_variable(self, name: str, initial: np.ndarray, *, trainable: bool = True) -> DistributedVariable:
        return MirroredVariable(self, name, initial, trainable=trainable)

    def _collected(
        self, replica: ReplicaContext, gradients: Iterator[tuple[DistributedVariable, Array]]
    ) -> tuple[list[DistributedVariable], list[Array]]:
        """Returns the variables, and the sums of their gradients over all replicas."""
        variables, arrays = super()._collected(replica, gradients)
        return variables, self.join(replica, ReduceOp.SUM, arrays)

    def _apply(
        self,
        replica: ReplicaContext,
        optimizer: optim.Optimizer,
        variables: list[DistributedVariable],
        arrays: list[Array],
    ) -> None:
        parts = [(it.name, it.storage(), gradient) for it, gradient in zip(variables, arrays, strict=True)]
        self._states.of(optimizer, replica.local_replica).update(parts)
        for variable, (_, value, _) in zip(variables, parts, strict=True):
            variable.constrain(value)


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
