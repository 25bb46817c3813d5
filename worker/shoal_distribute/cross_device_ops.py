"""Cross-device ops: how the replicas of one process join their arrays.

All replicas call `all_reduce` at the same time. Each gets the sum or the mean on its own device, with the same bits
for all. The arrays of a call have the same shapes and dtypes in all replicas. A replica must not change the arrays
that it gets: on CPU devices, all replicas may get the same ones.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal import errors
from shoal.program import Array
from shoal_distribute.collectives import ReduceOp, start_sums
from shoal_distribute.devices import LogicalDevice, logical_device
from shoal_distribute.replica_context import ReplicaContext


class CrossDeviceOps(ABC):
    """How replicas join their arrays: the base class."""

    @abstractmethod
    def all_reduce(self, replica: ReplicaContext, op: ReduceOp, arrays: Sequence[Array]) -> list[Array]:
        """Returns the sum or the mean of each array over all replicas of this process. All replicas call it.

        Args:
            replica: the calling replica.
            op: how the arrays are joined.
            arrays: this replica's arrays, on its device.

        Returns:
            New arrays on the replica's device.

        Raises:
            RanksDisagree: the replicas have other shapes or dtypes, or one has ended.
        """

    def check(self, devices: Sequence[LogicalDevice]) -> None:
        """Raises DeviceUnavailable if the devices cannot be joined in this way."""
        del devices  # most ways join any


class ReductionToOneDevice(CrossDeviceOps):
    """Adds all arrays on one device, in the order of the replicas, and copies the sums to the others.

    Args:
        reduce_to_device: name of the device; None means that of the first replica.
    """

    def __init__(self, reduce_to_device: str | None = None) -> None:
        self._device = None if reduce_to_device is None else logical_device(reduce_to_device)

    def all_reduce(self, replica: ReplicaContext, op: ReduceOp, arrays: Sequence[Array]) -> list[Array]:
        given = _exchanged(replica, op, arrays)
        sums: list[Array] = []
        if replica.local_replica == 0:
            device = self._device or replica.device
            device.activate()
            columns = zip(*given, strict=True)
            sums = [_finished(op, _sum([device.put(it) for it in parts]), len(given)) for parts in columns]
            replica.device.activate()
        return _copied(replica, _shared(replica, sums)[0])


class HierarchicalCopyAllReduce(CrossDeviceOps):
    """Adds arrays in pairs of devices, then the sums of the pairs, and so on; the last sum returns the same way.

    With n devices, it takes log2(n) rounds up and as many down, instead of the n copies to one device.

    Args:
        num_packs: accepted for TensorFlow's sake; the arrays of a call travel together.
    """

    def __init__(self, num_packs: int = 1) -> None:
        del num_packs

    def all_reduce(self, replica: ReplicaContext, op: ReduceOp, arrays: Sequence[Array]) -> list[Array]:
        count, own = replica.strategy.local_replicas, replica.local_replica
        given = _exchanged(replica, op, arrays)
        held = list(arrays)
        step = 1
        while step < count:
            if own % (2 * step) == 0 and own + step < count:
                held = [_sum(pair) for pair in zip(held, _put(replica, given[own + step]), strict=True)]
            given = _shared(replica, held)
            step *= 2
        if own == 0:
            held = [_finished(op, it if count > 1 else it.copy(), count) for it in held]
        while step > 1:
            step //= 2
            given = _shared(replica, held)
            if own % (2 * step) == step:
                held = _put(replica, given[own - step])
        return _copied(replica, held)


class RingAllReduce(CrossDeviceOps):
    """Each replica adds one slice of all arrays, then all exchange the slices: the two phases of a ring.

    CPU devices share memory, so that no slice is copied. Elements are added in the order of the replicas.
    """

    def all_reduce(self, replica: ReplicaContext, op: ReduceOp, arrays: Sequence[Array]) -> list[Array]:
        given = _exchanged(replica, op, arrays)
        count, own = len(given), replica.local_replica
        if any(device.is_gpu for device in replica.strategy.devices):
            sliced = [_slice_of(parts, own, count, op, replica) for parts in zip(*given, strict=True)]
            slices = _shared(replica, sliced)
            gathered = [_put(replica, parts) for parts in zip(*slices, strict=True)]
            shaped = zip(gathered, arrays, strict=True)
            return _copied(replica, [replica.xp.concatenate(parts).reshape(like.shape) for parts, like in shaped])
        made = [np.empty(it.shape, it.dtype) for it in arrays] if own == 0 else []
        whole = _shared(replica, made)[0]
        for out, parts in zip(whole, zip(*given, strict=True), strict=True):
            part = _bounds(out.size, own, count)
            target = out.reshape(-1)[part]
            np.add(parts[0].reshape(-1)[part], parts[1].reshape(-1)[part], out=target)
            for other in parts[2:]:
                target += other.reshape(-1)[part]
            op.finish(target, count)
        _shared(replica, None)  # all slices are there
        return list(whole)


class NcclAllReduce(CrossDeviceOps):
    """NCCL's all-reduce, through CuPy. Every replica needs a GPU of its own.

    Args:
        num_packs: accepted for TensorFlow's sake; the arrays of a call travel in one NCCL group.
    """

    def __init__(self, num_packs: int = 1) -> None:
        del num_packs
        self._made = threading.local()  # each replica's communicator

    def check(self, devices: Sequence[LogicalDevice]) -> None:
        cpus = [device.name for device in devices if not device.is_gpu]
        if cpus:
            raise errors.DeviceUnavailable(
                f"NcclAllReduce joins GPUs only, not {', '.join(cpus)}; use HierarchicalCopyAllReduce or RingAllReduce"
            )

    def all_reduce(self, replica: ReplicaContext, op: ReduceOp, arrays: Sequence[Array]) -> list[Array]:
        nccl = replica.xp.cuda.nccl
        _exchanged(replica, op, arrays)
        if getattr(self._made, "communicator", None) is None:
            made = nccl.get_unique_id() if replica.local_replica == 0 else None
            identity = _shared(replica, made)[0]
            count = replica.strategy.local_replicas
            self._made.communicator = nccl.NcclCommunicator(count, identity, replica.local_replica)
        xp = replica.xp
        pairs = [(xp.ascontiguousarray(it), xp.empty(it.shape, it.dtype)) for it in arrays]
        start_sums(nccl, self._made.communicator, pairs, xp.cuda.get_current_stream().ptr)
        return [_finished(op, it, replica.strategy.local_replicas) for _, it in pairs]


def default_cross_device_ops(devices: Sequence[LogicalDevice]) -> CrossDeviceOps:
    """Returns the best way to join these devices: NCCL for several GPUs if CuPy has it, otherwise a ring."""
    if len(devices) > 1 and all(device.is_gpu for device in devices) and devices[0].xp.cuda.nccl.available:
        return NcclAllReduce()
    return RingAllReduce()


def _exchanged(replica: ReplicaContext, op: ReduceOp, arrays: Sequence[Array]) -> list[list[Array]]:
    """Returns the arrays of all replicas, which have agreed on shapes and dtypes."""
    shapes = ", ".join(f"{it.dtype}{list(it.shape)}" for it in arrays[:3])
    more = f" and {len(arrays) - 3} more" if len(arrays) > 3 else ""
    what = f"all_reduce {op.value} of {shapes}{more}"
    return _ordered(replica, replica.exchange(what, list(arrays)), what)


def _ordered(replica: ReplicaContext, given: list[list[Array]], what: str) -> list[list[Array]]:
    own = [(it.shape, it.dtype) for it in given[replica.local_replica]]
    for number, others in enumerate(given):
        if [(it.shape, it.dtype) for it in others] != own:
            raise errors.RanksDisagree(f"replica {number} gives other shapes or dtypes than {what}")
    if replica.device.is_gpu:
        replica.xp.cuda.get_current_stream().synchronize()  # the others read these arrays on their own streams
    return given


def _shared(replica: ReplicaContext, value: Any) -> list[Any]:
    if replica.device.is_gpu:
        replica.xp.cuda.get_current_stream().synchronize()
    return replica.exchange("a part of all_reduce", value)


def _put(replica: ReplicaContext, arrays: Sequence[Array]) -> list[Array]:
    return [replica.device.put(it) for it in arrays]


def _copied(replica: ReplicaContext, arrays: Sequence[Array]) -> list[Array]:
    """Returns the arrays on the replica's device, when no replica reads another one's memory any more."""
    own = _put(replica, arrays)
    if any(device.is_gpu for device in replica.strategy.devices):
        _shared(replica, None)
    return own


def _sum(parts: Sequence[Array]) -> Array:
    total = parts[0] + parts[1] if len(parts) > 1 else parts[0].copy()
    for part in parts[2:]:
        total += part
    return total


def _finished(op: ReduceOp, total: Array, count: int) -> Array:
    if op is ReduceOp.MEAN and count > 1:
        total *= total.dtype.type(1 / count)
    return total


def _bounds(size: int, own: int, count: int) -> slice:
    return slice(size * own // count, size * (own + 1) // count)


def _slice_of(parts: Sequence[Array], own: int, count: int, op: ReduceOp, replica: ReplicaContext) -> Array:
    bounds = _bounds(parts[0].size, own, count)
    return _finished(op, _sum(_put(replica, [it.reshape(-1)[bounds] for it in parts])), count)


__all__ = [
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "NcclAllReduce",
    "ReductionToOneDevice",
    "RingAllReduce",
    "default_cross_device_ops",
]
