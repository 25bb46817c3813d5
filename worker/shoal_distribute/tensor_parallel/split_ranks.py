"""Split ranks: the ranks that compute the parts of a split layer, each on the device of its process."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shoal.program import Array
from shoal_distribute.collectives import Group
from shoal_distribute.devices import LogicalDevice
from shoal_distribute.replica_context import current_replica
from shoal_distribute.tensor_parallel.split_bounds import part_bounds
from shoal_worker.arrays import on_host


class SplitRanks:
    """The `PartGroup` of ranks, of which this process is one. Sums and gathered arrays are collective calls.

    The thread that calls a layer makes these calls, so all ranks must call the same layers in the same order.

    Args:
        ranks: the ranks. All of them get the same bits of a sum.
        device: the device of this process.
        names: what errors call the ranks.

    Attributes:
        size: number of parts.
        own: which of the parts this process has.
        devices: the device of this process.
        names: what errors call the ranks.
    """

    def __init__(self, ranks: Group, device: LogicalDevice, names: Sequence[str]) -> None:
        self._ranks = ranks
        self.size, self.own = ranks.ranks, slice(ranks.rank, ranks.rank + 1)
        self.devices: Sequence[LogicalDevice] = (device,)
        self.names: Sequence[str] = tuple(names)

    @property
    def home(self) -> LogicalDevice:
        """The device of whole arrays: that of the replica that runs, otherwise that of this process."""
        replica = current_replica()
        return replica.device if replica else self.devices[0]

    def map(self, function: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
        """Calls a function for the part of this process. See `PartGroup.map`.

        Args:
            function, *columns: see `PartGroup.map`.
        """
        with self.devices[0].computing():
            return [function(*call) for call in zip(self.devices, *columns, strict=True)]

    def total(self, device: LogicalDevice, parts: Sequence[Array]) -> Array:
        """Returns the sum of the arrays of all ranks.

        Args:
            device, parts: see `PartGroup.total`.
        """
        if self.size == 1:
            return device.put(parts[0])
        return device.put(self._ranks.all_reduce(np.array(on_host(parts[0]), order="C")))

    def joined(self, parts: Sequence[Array], axis: int, length: int, device: LogicalDevice | None) -> Array:
        """Returns the arrays of all ranks one after the other.

        Args:
            parts, axis, length, device: see `PartGroup.joined`.
        """
        whole = on_host(parts[0])
        if self.size > 1:
            bounds = part_bounds(length, self.size)
            own = np.moveaxis(whole, axis, 0)
            padded = np.zeros((bounds[0].stop, *own.shape[1:]), own.dtype)  # the first part is the longest
            padded[: len(own)] = own
            found = zip(self._ranks.all_gather(padded), bounds, strict=True)
            moved = np.concatenate([part[: it.stop - it.start] for part, it in found])
            whole = np.ascontiguousarray(np.moveaxis(moved, 0, axis))
        return device.put(whole) if device else whole

    def numbers(self, own: list[float]) -> list[float]:
        """Returns the numbers of all ranks, in their order.

        Args:
            own: see `PartGroup.numbers`.
        """
        if self.size == 1:
            return own
        found: list[float] = self._ranks.all_gather(np.array(own, np.float64)).reshape(-1).tolist()
        return found


__all__ = ["SplitRanks"]
