"""Interface of what computes the parts of a split layer: the devices of a process, or one device in each of several."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from shoal.program import Array
from shoal_distribute.devices import LogicalDevice


class PartGroup(Protocol):
    """Computes the parts of split layers. If it has ranks, all of them make the same calls in the same order.

    Attributes:
        size: number of parts.
        own: which of the parts this process has.
        devices: the devices of these parts.
        names: what errors call the devices or ranks of all parts.
    """

    size: int
    own: slice
    devices: Sequence[LogicalDevice]
    names: Sequence[str]

    @property
    def home(self) -> LogicalDevice:
        """The device of whole arrays."""

    def map(self, function: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
        """Calls a function for each part of this process.

        Args:
            function: the function. It gets the device, and one value of each column.
            *columns: values, one for each part of this process.

        Returns:
            The results, in the order of the parts.
        """

    def total(self, device: LogicalDevice, parts: Sequence[Array]) -> Array:
        """Returns the sum of the arrays that all parts have.

        Args:
            device: the device of the sum.
            parts: the arrays of this process's parts.
        """

    def joined(self, parts: Sequence[Array], axis: int, length: int, device: LogicalDevice | None) -> Array:
        """Returns the arrays of all parts one after the other.

        Args:
            parts: the arrays of this process's parts.
            axis: the axis.
            length: the length of the axis in the whole. `part_bounds` has those of the parts.
            device: the device of the whole; None means the host.
        """

    def numbers(self, own: list[float]) -> list[float]:
        """Returns the numbers of all parts.

        Args:
            own: those of this process's parts. Each process has as many.
        """


__all__ = ["PartGroup"]
