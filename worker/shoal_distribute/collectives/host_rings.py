"""Collectives between ranks of several hosts: through shared memory within a host, over connections between hosts."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from shoal._transport import Segment
from shoal_distribute.collectives.calls import ReduceOp
from shoal_distribute.collectives.connections import Connections
from shoal_distribute.collectives.members import Members
from shoal_distribute.collectives.mesh import Mesh
from shoal_distribute.collectives.schedule import LINE_BYTES, Part, rings_between, slices
from shoal_distribute.collectives.shared_blocks import SharedBlocks
from shoal_distribute.collectives.tree import SMALL_BYTES
from shoal_distribute.collectives.way import Way


class HostRings:
    """The `Way` of ranks on several hosts, of which some share a host.

    There are as many rings between the hosts as the smallest host has ranks. Each ring has one rank of each host, and
    a slice of each array. So the connections of all these ranks transfer data at the same time, and each byte travels
    between two hosts as often as if each host were one rank. A small array takes the first ring alone.

    A sum first adds the arrays of each host in the order of their ranks. Then a ring adds the sums of the hosts, as
    `Connections` does.

    Args:
        mesh: the connections of this rank.
        hosts: the ranks of each host.
        segments: the segment of each rank of this host; none if it is the only one.
    """

    def __init__(self, mesh: Mesh, hosts: Sequence[tuple[int, ...]], segments: Sequence[Segment]) -> None:
        self._mesh, self._hosts = mesh, hosts
        self._host = next(number for number, ranks in enumerate(hosts) if mesh.rank in ranks)
        self._local_ranks = hosts[self._host]
        local = Members(mesh, self._local_ranks)
        self._local: Way = SharedBlocks(local, segments) if segments else Connections(local)
        self._place = local.place
        self._rings = rings_between(hosts)
        self._ring: Way | None = None
        if self._place < len(self._rings):
            self._ring = Connections(Members(mesh, tuple(ranks[0] for ranks in self._rings[self._place])))

    def all_reduce(self, flat: np.ndarray[Any, Any], op: ReduceOp) -> None:
        """Replaces an array by the sum or the mean of all ranks' arrays: see `Way`."""
        rings = 1 if flat.nbytes <= SMALL_BYTES else len(self._rings)
        cut = slices(flat.size, rings, max(1, LINE_BYTES // flat.itemsize))
        parts = self._for_local_ranks([it] for it in cut)
        self._local.reduce_scatter(flat, parts, ReduceOp.SUM)
        if self._ring and self._place < rings:
            self._ring.all_reduce(flat[cut[self._place]], op)
        self._local.all_gather(flat, parts)

    def reduce_scatter(self, flat: np.ndarray[Any, Any], parts: Sequence[Part], op: ReduceOp) -> None:
        """Reduces one part for each rank.

        Args:
            flat, parts, op: see `Way`.
        """
        rings = self._parts_on_rings(parts)
        self._local.reduce_scatter(flat, self._for_local_ranks(map(_joined, rings)), ReduceOp.SUM)
        if self._ring:
            self._ring.reduce_scatter(flat, rings[self._place], op)
        if len(self._local_ranks) > len(rings):
            self._local.all_gather(flat, self._for_local_ranks(ring[self._host] for ring in rings))

    def all_gather(self, flat: np.ndarray[Any, Any], parts: Sequence[Part]) -> None:
        """Gets the parts of the other ranks: see `Way`."""
        rings = self._parts_on_rings(parts)
        self._local.all_gather(flat, [parts[rank] for rank in self._local_ranks])
        if self._ring:
            self._ring.all_gather(flat, rings[self._place])
        others = (_joined(ring[: self._host] + ring[self._host + 1 :]) for ring in rings)
        self._local.all_gather(flat, self._for_local_ranks(others))

    def broadcast(self, flat: np.ndarray[Any, Any], root: int) -> None:
        """Replaces an array by that of one rank: see `Way`. One rank of each host gets it over a connection."""
        receivers = tuple(root if root in ranks else ranks[0] for ranks in self._hosts)
        if self._mesh.rank in receivers:
            Connections(Members(self._mesh, receivers)).broadcast(flat, root)
        self._local.broadcast(flat, receivers[self._host])

    def barrier(self) -> None:
        """Waits until all ranks have called it."""
        self._local.barrier()
        if self._ring and self._place == 0:
            self._ring.barrier()
        self._local.barrier()

    def close(self) -> None:
        """Releases the shared memory."""
        self._local.close()

    def _parts_on_rings(self, parts: Sequence[Part]) -> list[list[Part]]:
        """Returns what of each host travels on each ring, for one part of each rank."""
        return [[_joined(parts[rank] for rank in ranks) for ranks in ring] for ring in self._rings]

    def _for_local_ranks(self, parts: Iterable[Part]) -> list[Part]:
        """Returns the parts of the ranks in rings, and empty ones for the other ranks of this host."""
        given = list(parts)
        return given + [[] for _ in self._local_ranks[len(given) :]]


def _joined(parts: Iterable[Part]) -> Part:
    return [each for part in parts for each in part]


__all__ = ["HostRings"]
