"""Way: how arrays travel between the ranks of a group. A group has the one that suits the hosts of its ranks."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from shoal_distribute.collectives.calls import ReduceOp
from shoal_distribute.collectives.schedule import Part


class Way(Protocol):
    """The collectives on flat arrays, in place. All ranks make the same calls: the group has compared them before."""

    def all_reduce(self, flat: np.ndarray[Any, Any], op: ReduceOp) -> None:
        """Replaces an array by the sum or the mean of all ranks' arrays, of which all ranks get the same bits.

        Args:
            flat: the array, of one dimension.
            op: how the arrays are joined.
        """

    def reduce_scatter(self, flat: np.ndarray[Any, Any], parts: Sequence[Part], op: ReduceOp) -> None:
        """Replaces one part of each rank's array by that part of the sum or the mean.

        Args:
            flat: the array, of one dimension. The other parts are undefined afterwards.
            parts: the part of each rank. They do not overlap, and may be empty.
            op: how the arrays are joined.
        """

    def all_gather(self, flat: np.ndarray[Any, Any], parts: Sequence[Part]) -> None:
        """Replaces the parts of all other ranks by those that they have.

        Args:
            flat: the array, of one dimension.
            parts: the part of each rank. They do not overlap, and may be empty.
        """

    def broadcast(self, flat: np.ndarray[Any, Any], root: int) -> None:
        """Replaces an array by that of one rank.

        Args:
            flat: the array, of one dimension.
            root: the rank whose array all get.
        """

    def barrier(self) -> None:
        """Waits until all ranks have called it."""

    def close(self) -> None:
        """Releases what this rank holds. Further calls have no effect."""


__all__ = ["Way"]
