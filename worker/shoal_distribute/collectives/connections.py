"""Collectives over connections: a tree for small arrays, and a ring or a chain for large ones."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal_distribute.collectives.calls import ReduceOp
from shoal_distribute.collectives.members import Members
from shoal_distribute.collectives.ring import run_ring
from shoal_distribute.collectives.schedule import LINE_BYTES, Part, ring, slices
from shoal_distribute.collectives.tree import SMALL_BYTES, reduce_to_root, send_from_root


class Connections:
    """The `Way` of ranks that share no memory.

    A tree adds the arrays in an order that depends on the number of members alone. In a ring, the order also depends on
    the slice that an element is in: the member after the one that has the slice is first, and that one is last.

    Args:
        members: the ranks. A single one has nothing to do.
    """

    def __init__(self, members: Members) -> None:
        self._members = members

    def all_reduce(self, flat: np.ndarray[Any, Any], op: ReduceOp) -> None:
        """Replaces an array by the sum or the mean of all ranks' arrays: see `Way`."""
        if flat.nbytes <= SMALL_BYTES:
            reduce_to_root(self._members, flat, op)
            send_from_root(self._members, flat)
        else:
            cut = slices(flat.size, len(self._members), max(1, LINE_BYTES // flat.itemsize))
            parts = [[it] for it in cut]
            run_ring(self._members, flat, parts, ring(self._members.place, len(self._members)), op)

    def reduce_scatter(self, flat: np.ndarray[Any, Any], parts: Sequence[Part], op: ReduceOp) -> None:
        """Reduces one part for each rank.

        Args:
            flat, parts, op: see `Way`.
        """
        run_ring(self._members, flat, parts, ring(self._members.place, len(self._members), gather=False), op)

    def all_gather(self, flat: np.ndarray[Any, Any], parts: Sequence[Part]) -> None:
        """Gets the parts of the other ranks: see `Way`."""
        rounds = ring(self._members.place, len(self._members), scatter=False)
        run_ring(self._members, flat, parts, rounds, ReduceOp.SUM)

    def broadcast(self, flat: np.ndarray[Any, Any], root: int) -> None:
        """Replaces an array by that of one rank: see `Way`."""
        send_from_root(self._members, flat, self._members.ranks.index(root))

    def barrier(self) -> None:
        """Waits until all ranks have called it."""
        self.all_reduce(np.zeros(1, np.uint8), ReduceOp.SUM)

    def close(self) -> None:
        """Releases nothing: the mesh has the connections."""


__all__ = ["Connections"]
