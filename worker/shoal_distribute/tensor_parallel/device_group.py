"""Device group: a thread for each of the devices that compute the parts of a layer at the same time."""

import threading
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from shoal.program import Array
from shoal_distribute.device_threads import DeviceThreads
from shoal_distribute.devices import LogicalDevice, logical_devices
from shoal_distribute.replica_context import current_replica
from shoal_worker.arrays import on_host


class DeviceGroup:
    """The `PartGroup` of devices of one process, each on a thread of its own. `group_of_devices` returns it.

    Its tasks never wait for each other, so several threads may call `map` at the same time. The threads end when no
    layer and no array uses the group any more.

    Args:
        devices: the devices.

    Attributes:
        devices: the devices.
        size: number of parts: one for each device.
        own: which of them this process has: all.
        names: the names of the devices.
    """

    def __init__(self, devices: Sequence[LogicalDevice]) -> None:
        self.devices: Sequence[LogicalDevice] = tuple(devices)
        self.size, self.own = len(self.devices), slice(None)
        self.names: Sequence[str] = tuple(it.name for it in self.devices)
        self._threads = DeviceThreads(self.devices, "part", activates=False)

    @property
    def home(self) -> LogicalDevice:
        """The device of whole arrays: that of the replica that runs, otherwise the first one of the group."""
        replica = current_replica()
        return replica.device if replica else self.devices[0]

    def map(self, function: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
        """Calls a function on the thread of each device, at the same time.

        Args:
            function: the function. It gets the device, and one value of each column.
            *columns: values, one for each device.

        Returns:
            The results, in the order of the devices. If calls raise, the first error is raised.
        """
        gpu = next((it for it in self.devices if it.is_gpu), None)
        if gpu is not None:  # the threads read arrays that this thread has computed
            gpu.xp.cuda.get_current_stream().synchronize()
        calls = zip(self.devices, *columns, strict=True)
        return self._threads.run([partial(_call, function, *call) for call in calls])

    def total(self, device: LogicalDevice, parts: Sequence[Array]) -> Array:
        """Returns the sum of arrays on one device, added in the order of the parts.

        Args:
            device, parts: see `PartGroup.total`.
        """
        with device.computing():
            return reduce(lambda total, part: total + device.put(part), parts[1:], device.put(parts[0]))

    def joined(self, parts: Sequence[Array], axis: int, length: int, device: LogicalDevice | None) -> Array:  # noqa: ARG002
        """Returns arrays one after the other, on one device or on the host.

        Args:
            parts, axis, length, device: see `PartGroup.joined`.
        """
        if device is None:
            return np.concatenate([on_host(it) for it in parts], axis)
        with device.computing():
            return device.xp.concatenate([device.put(it) for it in parts], axis)

    def numbers(self, own: list[float]) -> list[float]:
        """Returns the numbers of all parts, which this process has.

        Args:
            own: see `PartGroup.numbers`.
        """
        return own


def _call(function: Callable[..., Any], device: LogicalDevice, *values: Any) -> Any:
    try:
        with device.computing():
            return function(device, *values)
    except Exception as error:
        error.add_note(f"raised on {device}")
        raise


_lock = threading.Lock()  # guards _groups
# Layers on the same devices share the threads. A group lasts as long as its users.
_groups: "WeakValueDictionary[tuple[str, ...], DeviceGroup]" = WeakValueDictionary()


def group_of_devices(names: Sequence[str]) -> DeviceGroup:
    """Returns the group of these devices.

    Args:
        names: names of devices.

    Raises:
        DeviceUnavailable: there is no such device, or one is given twice.
    """
    devices = logical_devices(names)
    key = tuple(it.name for it in devices)
    with _lock:
        group = _groups.get(key)
        if group is None:
            group = _groups[key] = DeviceGroup(devices)
        return group


__all__ = ["DeviceGroup", "group_of_devices"]
