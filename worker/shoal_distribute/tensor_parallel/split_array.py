"""Split arrays: one array in parts along an axis, each part on a device or in a rank of a group."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from shoal import errors
from shoal.program import Array
from shoal_distribute.devices import LogicalDevice
from shoal_distribute.tensor_parallel.part_group import PartGroup
from shoal_distribute.tensor_parallel.split_bounds import part_bounds


class SplitPlace(NamedTuple):
    """Where the parts of a variable are.

    Attributes:
        group: the devices or ranks.
        axis: the axis that is split.
    """

    group: PartGroup
    axis: int


class SplitArray:
    """One array, of which each device of a group has a part. Do not change the parts, unless they are of a variable.

    It adds to other arrays of its shape, and NumPy converts it to a whole array on the host. If the parts are in
    several processes, this object has the part of this process, and all processes must gather it at the same time.

    Args:
        group: the devices or ranks.
        axis: the axis that is split.
        parts: the parts of this process, each on its device, in order. `part_bounds` has their lengths.
        length: the length of the axis in the whole. None means that all parts are in this process.

    Attributes:
        group: the devices or ranks.
        axis: the axis that is split, 0 or more.
        parts: the parts of this process.
        shape: the shape of the whole.
    """

    __array_ufunc__ = None  # an operator of NumPy's arrays leaves the work to this class

    def __init__(self, group: PartGroup, axis: int, parts: Sequence[Array], length: int | None = None) -> None:
        self.group, self.parts = group, tuple(parts)
        self.axis = axis % self.parts[0].ndim
        before, after = self.parts[0].shape[: self.axis], self.parts[0].shape[self.axis + 1 :]
        whole = sum(it.shape[self.axis] for it in self.parts) if length is None else length
        self.shape: tuple[int, ...] = (*before, whole, *after)

    @classmethod
    def split(cls, group: PartGroup, axis: int, whole: Array, *, copy: bool = False) -> Self:
        """Returns an array in parts.

        Args:
            group: the devices or ranks.
            axis: the axis to split.
            whole: the array.
            copy: whether parts on the host have memory of their own, instead of the array's.

        Raises:
            InvalidShape: the axis has fewer elements than there are parts.
        """

        def placed(device: LogicalDevice, view: Array) -> Array:
            return device.put(np.array(view, order="C") if copy and isinstance(view, np.ndarray) else view)

        return cls(group, axis, group.map(placed, views_of(whole, axis, group)), whole.shape[axis])

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
        """The part of the axis that each part of this process has."""
        return part_bounds(self.shape[self.axis], self.group.size)[self.group.own]

    def gathered(self, device: LogicalDevice | None = None) -> Array:
        """Returns the whole array on one device.

        Args:
            device: the device; None means the group's `home`.
        """
        return self.group.joined(self.parts, self.axis, self.shape[self.axis], device or self.group.home)

    def with_parts(self, parts: Sequence[Array]) -> "SplitArray":
        """Returns an array of this shape, split in the same way, with other parts.

        Args:
            parts: the parts of this process.
        """
        return SplitArray(self.group, self.axis, parts, self.shape[self.axis])

    def mapped(self, function: Callable[..., Array], *others: "SplitArray") -> "SplitArray":
        """Returns what a function computes from each part, on the device of the part.

        Args:
            function: takes a part of this array and one of each other array.
            *others: arrays that are split in the same way.
        """
        columns = [self.parts, *(it.parts for it in others)]
        return self.with_parts(self.group.map(lambda _, *parts: function(*parts), *columns))

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
        return np.asarray(self.group.joined(self.parts, self.axis, self.shape[self.axis], None), dtype)

    def __repr__(self) -> str:
        devices = ", ".join(self.group.names)
        return f"SplitArray(shape={self.shape}, dtype={self.dtype}, axis={self.axis}, devices=[{devices}])"


def views_of(array: Array, axis: int, group: PartGroup) -> Sequence[Array]:
    """Returns the parts of an array for this process. Those of a whole array are still where the array is.

    Args:
        array: a whole array, or one that is split along this axis over this group.
        axis: the axis.
        group: the devices or ranks.

    Raises:
        InvalidShape: the axis has fewer elements than there are parts.
    """
    if isinstance(array, SplitArray):
        return array.parts
    axis = axis % array.ndim
    own = part_bounds(array.shape[axis], group.size)[group.own]
    return [array[(slice(None),) * axis + (part,)] for part in own]


__all__ = ["SplitArray", "SplitPlace", "views_of"]
