"""Split arrays: one array in parts along an axis, each part on a device of a group."""

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple, Self

import numpy as np

from shoal import errors
from shoal.program import Array
from shoal_distribute.devices import LogicalDevice
from shoal_distribute.tensor_parallel.device_group import DeviceGroup
from shoal_distribute.tensor_parallel.split_bounds import part_bounds
from shoal_worker.arrays import on_host


class SplitPlace(NamedTuple):
    """Where the parts of a variable are.

    Attributes:
        group: the devices.
        axis: the axis that is split.
    """

    group: DeviceGroup
    axis: int


class SplitArray:
    """One array, of which each device of a group has a part. Do not change the parts, unless they are of a variable.

    It adds to other arrays of its shape, and NumPy converts it to a whole array on the host.

    Args:
        group: the devices.
        axis: the axis that is split.
        parts: the parts, each on its device, in the order of the devices. `part_bounds` has their lengths.

    Attributes:
        group: the devices.
        axis: the axis that is split, 0 or more.
        parts: the parts.
        shape: the shape of the whole.
    """

    __array_ufunc__ = None  # an operator of NumPy's arrays leaves the work to this class

    def __init__(self, group: DeviceGroup, axis: int, parts: Sequence[Array]) -> None:
        self.group, self.parts = group, tuple(parts)
        self.axis = axis % self.parts[0].ndim
        before, after = self.parts[0].shape[: self.axis], self.parts[0].shape[self.axis + 1 :]
        self.shape: tuple[int, ...] = (*before, sum(it.shape[self.axis] for it in self.parts), *after)

    @classmethod
    def split(cls, group: DeviceGroup, axis: int, whole: Array, *, copy: bool = False) -> Self:
        """Returns an array in parts.

        Args:
            group: the devices.
            axis: the axis to split.
            whole: the array.
            copy: whether parts on the host have memory of their own, instead of the array's.

        Raises:
            InvalidShape: the axis has fewer elements than there are devices.
        """

        def placed(device: LogicalDevice, view: Array) -> Array:
            return device.put(np.array(view, order="C") if copy and isinstance(view, np.ndarray) else view)

        return cls(group, axis, group.map(placed, views_of(whole, axis, len(group.devices))))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the elements."""
        found: np.dtype[Any] = self.parts[0].dtype
        return found

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def bounds(self) -> tuple[slice, ...]:
        """The part of the axis that each device has."""
        return part_bounds(self.shape[self.axis], len(self.parts))

    def gathered(self, device: LogicalDevice | None = None) -> Array:
        """Returns the whole array on one device.

        Args:
            device: the device; None means the group's `home`.
        """
        home = device or self.group.home
        with home.computing():
            return home.xp.concatenate([home.put(it) for it in self.parts], self.axis)

    def mapped(self, function: Callable[..., Array], *others: "SplitArray") -> "SplitArray":
        """Returns what a function computes from each part, on the device of the part.

        Args:
            function: takes a part of this array and one of each other array.
            *others: arrays that are split in the same way.
        """
        columns = [self.parts, *(it.parts for it in others)]
        return SplitArray(self.group, self.axis, self.group.map(lambda _, *parts: function(*parts), *columns))

    def like(self, array: Any) -> "SplitArray":
        """Returns another array of this shape, split in the same way.

        Args:
            array: a whole array, or one in parts.

        Raises:
            InvalidShape: it has another shape.
        """
        if tuple(array.shape) != self.shape:
            raise errors.InvalidShape(f"an array of the shape {array.shape} is to be split as one of {self.shape}")
        if not isinstance(array, SplitArray):
            return SplitArray.split(self.group, self.axis, array)
        same = array.group is self.group and array.axis == self.axis
        return array if same else SplitArray.split(self.group, self.axis, array.gathered())

    def astype(self, dtype: Any, copy: bool = True) -> "SplitArray":
        """Returns the array in another dtype.

        Args:
            dtype: the dtype.
            copy: as for NumPy's arrays.
        """
        if self.dtype == dtype and not copy:
            return self
        return self.mapped(lambda part: part.astype(dtype))

    def __add__(self, other: Any) -> "SplitArray":
        return self.mapped(lambda own, others: own + others, self.like(other))

    __radd__ = __add__

    def __iadd__(self, other: Any) -> "SplitArray":
        self.mapped(operator.iadd, self.like(other))  # changes the parts in place
        return self

    def __truediv__(self, divisor: Any) -> "SplitArray":
        return self.mapped(lambda part: part / divisor)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(np.concatenate([on_host(it) for it in self.parts], self.axis), dtype)

    def __repr__(self) -> str:
        devices = ", ".join(it.name for it in self.group.devices)
        return f"SplitArray(shape={self.shape}, dtype={self.dtype}, axis={self.axis}, devices=[{devices}])"


def views_of(array: Array, axis: int, devices: int) -> Sequence[Array]:
    """Returns the parts of an array for devices. Those of a whole array are still where the array is.

    Args:
        array: a whole array, or one that is split along this axis over these devices.
        axis: the axis.
        devices: number of devices.

    Raises:
        InvalidShape: the axis has fewer elements than there are devices.
    """
    if isinstance(array, SplitArray):
        return array.parts
    axis = axis % array.ndim
    return [array[(slice(None),) * axis + (part,)] for part in part_bounds(array.shape[axis], devices)]


def total_on(device: LogicalDevice, parts: Sequence[Array]) -> Array:
    """Returns the sum of arrays on one device, added in their order.

    Args:
        device: the device.
        parts: arrays of one shape, on any devices.
    """
    with device.computing():
        return reduce(lambda total, part: total + device.put(part), parts[1:], device.put(parts[0]))


__all__ = ["SplitArray", "SplitPlace", "total_on", "views_of"]
