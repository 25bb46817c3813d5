"""The stage of this process, and the ranks that it works with: other stages, replicas, and the parts of its layers."""

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from shoal import errors
from shoal.program import Array
from shoal_distribute.collectives import Group, StageTimes
from shoal_distribute.devices import LogicalDevice
from shoal_distribute.group_arrays import bytes_from, sums_of
from shoal_distribute.pipeline.links import StageLinks
from shoal_distribute.pipeline.processes.links import RankLinks
from shoal_distribute.replica_context import Replicated
from shoal_distribute.tensor_parallel import RankMesh, SplitArray, SplitRanks
from shoal_worker.arrays import on_host

T = TypeVar("T")

_SAMPLED_BYTES = 1 << 16


class RankStage:
    """The `StageRunner` of a process that computes one stage. Its own thread does so.

    Args:
        group: all ranks.
        mesh: what each rank computes.
        device: the device of this process.

    Raises:
        BadRequest: the mesh has another number of ranks.
        RanksDisagree: another rank has another mesh.

    Attributes:
        stage: the stage of this process.
        replica: the replica that it is of.
        peers: the ranks that have the gradients of the same variables, by replica.
        parts: the ranks that have the parts of this stage's split layers.
    """

    def __init__(self, group: Group, mesh: RankMesh, device: LogicalDevice) -> None:
        _check_same(group, mesh)
        mesh.check_ranks(group.ranks)
        self._group, self._mesh, self._device = group, mesh, device
        self._stages = mesh.length("stage")
        group.name_ranks({rank: mesh.described(rank) for rank in range(group.ranks)})
        place = mesh.coordinates(group.rank)
        self.stage, self.replica = place["stage"], place["replica"]
        line, split = mesh.line(group.rank), mesh.split_group(group.rank)
        self._line, self._split = group.subgroup(line), group.subgroup(split)
        self.peers = self._opened_peers()
        self.parts = SplitRanks(self._split, device, [f"rank {rank}" for rank in split])
        self.own: Sequence[int] = (self.stage,)
        self.listeners: Sequence[int] = range(len(line) - 1)
        self.names: Sequence[str] = [f"rank {rank}" for rank in line]

    def links(self) -> RankLinks:
        return RankLinks(self._line)

    def begin(self, what: str) -> None:
        self._line.agree(what)
        self._split.agree(what)

    def check_inputs(self, inputs: Sequence[Array]) -> None:
        """Makes sure that all ranks of this replica compute with the same inputs, by a sample of their bytes.

        Labels come with the inputs: the last stage would compare the outputs for some samples with labels of others.

        Args:
            inputs: the inputs of a batch.

        Raises:
            RanksDisagree: another rank has other ones.
        """
        if self._line.ranks == self._split.ranks == 1:
            return
        rank, own = self._group.rank, np.array(sampled_checksum(inputs), np.int64)
        for group, ranks, why in (
            (self._split, self._mesh.split_group(rank), "have parts of the same layers"),
            (self._line, self._mesh.line(rank), "compute stages of the same replica"),
        ):
            sums = group.all_gather(own)
            if len(others := np.flatnonzero(sums != sums[0])):
                first, other = (ranks[it] for it in (0, int(others[0])))
                raise errors.RanksDisagree(
                    f"rank {other} ({self._place_of(other)}) computes with other samples than rank {first} "
                    f"({self._place_of(first)}); they {why}, so give both the same data, in the same order, and shard "
                    "it by strategy.input_pipeline_id alone",
                    rank=other,
                )

    def share_seeds(self, seeds: Sequence[int]) -> list[int]:
        """Returns the seeds of the first rank that has a part of this stage's split layers.

        Args:
            seeds: the seeds of this rank.
        """
        found: list[int] = json.loads(bytes_from(self._split, 0, json.dumps(seeds).encode()))
        return found

    def run(
        self, strategy: Replicated, functions: Sequence[Callable[[], T]], links: StageLinks | None = None
    ) -> list[T]:
        del strategy  # `Strategy.run` has made this thread run a replica of it
        found = [function() for function in functions]
        if links is not None:
            self._line.flush()
        return found

    def count_step(self, micro_batches: int, seconds: float, compute: Sequence[float]) -> None:
        times = self._group.times
        before = times.stage or StageTimes(self.stage, self._stages, micro_batches)
        times.stage = before.later(seconds, max(0.0, seconds - compute[0]))

    def chosen(self, choose: Callable[[], Sequence[int]], count: int) -> list[int]:
        numbers = np.zeros(count, np.int64)
        if self.stage == self.replica == 0:  # to choose may be to compute split layers
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
            it.with_parts([device.put(next(sums)) for device in it.group.devices])
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
        for group in (self._line, self._split, self.peers):
            group.close()

    def _place_of(self, rank: int) -> str:
        """Returns which part of which stage a rank of this replica computes, as text."""
        return self._mesh.described(rank).removesuffix(f" of replica {self.replica}")

    def _opened_peers(self) -> Group:
        """Returns the replicas of this stage. All parts of a stage add up gradients in the same order."""
        ranks = self._mesh.peers(self._group.rank)
        peers = self._group.subgroup(ranks)
        if self._split.ranks > 1:
            layouts = self._group.all_gather(np.array(zlib.crc32(repr(peers.hosts).encode()), np.int64))
            if any(layouts != layouts[0]):
                peers.close()
                return self._group.subgroup(ranks, share=False)
        return peers


def sampled_checksum(arrays: Sequence[Array]) -> int:
    """Returns a checksum of the shapes and dtypes of arrays, and of elements that are evenly spaced in them.

    Args:
        arrays: the arrays.
    """
    found = 0
    for array in arrays:
        flat = array.reshape(-1)
        step = max(1, flat.nbytes // _SAMPLED_BYTES)
        found = zlib.crc32(repr((array.shape, array.dtype.name)).encode(), found)
        found = zlib.crc32(np.ascontiguousarray(on_host(flat[::step])).tobytes(), found)
    return found


def _check_same(group: Group, mesh: RankMesh) -> None:
    axes = group.all_gather(np.array([*mesh.axes.values()], np.int64))
    others = np.flatnonzero((axes != axes[0]).any(axis=1))
    if len(others):
        first, other = (
            RankMesh(int(stages), int(replicas), int(split)).shown()
            for replicas, stages, split in (axes[0], axes[others[0]])
        )
        raise errors.RanksDisagree(
            f"rank {others[0]} makes a strategy of {other}, but rank 0 one of {first}; give all processes the same "
            "stages, replicas and split",
            rank=int(others[0]),
        )


__all__ = ["RankStage", "sampled_checksum"]
