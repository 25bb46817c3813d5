"""Devices by the names that TensorFlow uses: "/cpu:0", "/gpu:1"."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shoal import errors
from shoal.program import Array
from shoal_worker.arrays import Device, Namespace, choose_device, namespace_of, on_host

# "gpu:0", "/gpu:0", "/device:GPU:0", "/job:localhost/replica:0/task:0/device:GPU:0"
_NAME = re.compile(r"(?:/job:\w+)?(?:/replica:\d+)?(?:/task:\d+)?/?(?:device:)?(cpu|gpu):(\d{1,4})", re.IGNORECASE)


@dataclass(frozen=True)
class LogicalDevice:
    """A GPU, or a share of the CPU: the replica of each logical CPU device has a thread of its own.

    Attributes:
        kind: "cpu" or "gpu".
        index: its number among those of its kind.
        device: computes for it.
    """

    kind: str
    index: int
    device: Device

    @property
    def name(self) -> str:
        """Its name: "/cpu:0", "/gpu:1"."""
        return f"/{self.kind}:{self.index}"

    @property
    def xp(self) -> Namespace:
        """The namespace of its arrays: NumPy or CuPy."""
        return self.device.xp

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU."""
        return self.kind == "gpu"

    def activate(self) -> None:
        """Makes it the current device of this thread."""
        self.device.activate()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Makes it the current device of this thread in a block. At the end, waits until everything is computed.

        After that, other devices can read the results, and what they were computed from can be freed.
        """
        if not self.is_gpu:
            yield
            return
        with self.xp.cuda.Device(self.index):
            yield
            self.xp.cuda.get_current_stream().synchronize()

    def put(self, array: Array) -> Array:
        """Returns the array on this device; the array itself if it is there."""
        if not self.is_gpu:
            return on_host(array)
        xp = self.xp
        with xp.cuda.Device(self.index):
            here = namespace_of(array) is xp and array.device.id == self.index
            return array if here else xp.array(array)

    def __str__(self) -> str:
        return self.name


def logical_device(name: object) -> LogicalDevice:
    """Returns the device of this name.

    Args:
        name: such as "/gpu:0", "/cpu:1" or "/device:GPU:0". Any number of CPU devices exist.

    Raises:
        DeviceUnavailable: the name is not one of a device, or this machine has no such GPU.
    """
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if not match:
        raise errors.DeviceUnavailable(
            f'device {name!r} is unknown; give names such as "/gpu:0" or "/cpu:0"', device=str(name)
        )
    kind, index = match[1].lower(), int(match[2])
    device = choose_device(f"cuda:{index}" if kind == "gpu" else "cpu")
    return LogicalDevice(kind, index, device)


def logical_devices(names: Sequence[str] | None) -> tuple[LogicalDevice, ...]:
    """Returns the devices of these names, in order.

    Args:
        names: the names; None means all GPUs of this machine, or "/cpu:0" if it has none.

    Raises:
        DeviceUnavailable: there is no such device, no name is given, or a name is given twice.
    """
    if names is None:
        return _all_gpus() or (logical_device("/cpu:0"),)
    given: Any = names  # of any type: `logical_device` refuses what is no name
    found = tuple(map(logical_device, given if isinstance(given, Iterable) and not isinstance(given, str) else [given]))
    if not found:
        raise errors.DeviceUnavailable('devices is empty; give at least one, such as ["/cpu:0"], or None for all')
    twice = sorted({it.name for it in found if [other.name for other in found].count(it.name) > 1})
    if twice:
        raise errors.DeviceUnavailable(f"{', '.join(twice)} is given more than once; give each device once")
    return found


def _all_gpus() -> tuple[LogicalDevice, ...]:
    gpus: list[LogicalDevice] = []
    while True:
        try:
            gpus.append(logical_device(f"/gpu:{len(gpus)}"))
        except errors.DeviceUnavailable:
            return tuple(gpus)


__all__ = ["LogicalDevice", "logical_device", "logical_devices"]
