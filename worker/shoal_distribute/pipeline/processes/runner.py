"""The stage of this process, and the ranks that it works with: the other stages of its replica, and its replicas."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from shoal.program import Array
from shoal_distribute.collectives import Group
from shoal_distribute.devices import LogicalDevice
from shoal_distribute.group_arrays import bytes_from, sums_of
from shoal_distribute.pipeline.links import StageLinks
from shoal_distribute.pipeline.processes.links import RankLinks
from shoal_distribute.replica_context import Replicated
from shoal_distribute.tensor_parallel import DeviceMesh, SplitArray
from shoal_worker.arrays import on_host

T = TypeVar("T")


class RankStage:
    """The `StageRunner` of a process that computes one stage. Its own thread does so.

    Args:
        group: all ranks.
        mesh: the ranks by "replica" and "stage".
        device: the device of this process.

    Attributes:
        stage: the stage of this process.
        replica: the replica that it is of.
        peers: the ranks of the same stage, by replica.
    """

    def __init__(self, group: Group, mesh: DeviceMesh, device: LogicalDevice) -> None:
        self._group, self._device = group, device
        group.name_ranks({rank: described(mesh, rank) for rank in range(group.ranks)})
        place = mesh.coordinates(group.rank)
        self.stage, self.replica = place["stage"], place["replica"]
        ranks = [int(it) for it in mesh.group_of(group.rank, "stage")]
        self._line = group.subgroup(ranks)
        self.peers = group.subgroup([int(it) for it in mesh.group_of(group.rank, "replica")])
        self.own: Sequence[int] = (self.stage,)
        self.listeners: Sequence[int] = range(len(ranks) - 1)
        self.names: Sequence[str] = [f"rank {rank}" for rank in ranks]

    def links(self) -> RankLinks:
        return RankLinks(self._line)

    def begin(self, what: str) -> None:
        self._line.agree(what)

    def run(
        self, strategy: Replicated, functions: Sequence[Callable[[], T]], links: StageLinks | None = None
    ) -> list[T]:
        del strategy  # `Strategy.run` has made this thread run a replica of it
        found = [function() for function in functions]
        if links is not None:
            self._line.flush()
        return found

    def chosen(self, choose: Callable[[], Sequence[int]], count: int) -> list[int]:
        numbers = np.zeros(count, np.int64)
        if self._group.rank == 0:
            numbers[:] = choose()
        return [int(it) for it in self._group.broadcast(numbers)]

    def total(self, number: float) -> float:
        return math.fsum(self._line.all_gather(np.array(number)))

    def rows(self, own: np.ndarray) -> np.ndarray:
        return self._line.all_gather(own[0])

    def summed(self, arrays: list[Array]) -> list[Array]:
        if self.peers.ranks == 1 or not arrays:
            return arrays
        whole = [it.parts if isinstance(it, SplitArray) else (it,) for it in arrays]
        sums = iter(sums_of(self.peers, [on_host(part) for parts in whole for part in parts]))
        return [
            SplitArray(it.group, it.axis, [device.put(next(sums)) for device in it.group.devices])
            if isinstance(it, SplitArray)
            else self._device.put(next(sums))
            for it in arrays
        ]

    def merged(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        own = [[name, it.shape, it.dtype.name] for name, it in arrays.items()]
        for stage in range(self._line.ranks):
            for name, shape, dtype in json.loads(bytes_from(self._line, stage, json.dumps(own).encode())):
                mine = stage == self.stage
                memory = np.array(arrays[name], order="C") if mine else np.empty(shape, np.dtype(dtype))
                found[name] = self._line.broadcast(memory, stage)
        return found

    def value_of(self, stage: int, value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns the array of one stage of this replica. The processes of all stages call it.

        Args:
            stage: the stage.
            value: its array; in other processes, memory for it.
        """
        return self._line.broadcast(value, stage)

    def of_last(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns the sum of the arrays of the last stages of all replicas. All processes call it."""
        total = self.peers.all_reduce(np.array(array))
        return self._line.broadcast(total, self._line.ranks - 1)

    def close(self) -> None:
        """Leaves the group."""
        self._group.close()  # first: see `Group.close`
        self._line.close()
        self.peers.close()


def described(mesh: DeviceMesh, rank: int) -> str:
    """Returns what a rank computes, as text.

    Args:
        mesh: see `RankStage`.
        rank: the rank.
    """
    place = mesh.coordinates(rank)
    return f"stage {place['stage']} of replica {place['replica']}"


__all__ = ["RankStage", "described"]
