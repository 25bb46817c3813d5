"""MultiWorkerMirroredStrategy: replicas in several processes, which join their gradients without a server."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from prometheus_client import REGISTRY, CollectorRegistry

from shoal import _tracing
from shoal.program import Array
from shoal_distribute.collectives import BUCKET_BYTES, Buckets, Group, GroupTimings, ReduceOp
from shoal_distribute.cross_device_ops import CrossDeviceOps
from shoal_distribute.rank_metrics import RankMetrics
from shoal_distribute.replica_context import ReplicaContext
from shoal_distribute.resolver import ClusterResolver, TFConfigClusterResolver
from shoal_distribute.strategies.mirrored import MirroredStrategy
from shoal_distribute.task_group import open_group
from shoal_distribute.values import DistributedVariable
from shoal_worker.arrays import on_host

# Variables with their gradients.
_Gradients = list[tuple[DistributedVariable, Array]]


class MultiWorkerMirroredStrategy(MirroredStrategy):
    """Several processes, each with one or more devices. All replicas have a copy of all variables.

    The replicas of a process first add up their gradients among themselves, then the processes add up the sums, in the
    order of their ranks. In `fit` and by `Optimizer.minimize`, they can do so while the backward pass computes the next
    gradients. All processes run the same script: they must make the same variables, and call `run`, `reduce` and
    `gather` the same number of times. New variables get the initial values of the first process.

        os.environ["TF_CONFIG"] = json.dumps(
            {"cluster": {"worker": ["host-a:7090", "host-b:7090"]}, "task": {"type": "worker", "index": 0}}
        )
        strategy = MultiWorkerMirroredStrategy()

    If a process ends, the others get `RankLost` with its number. Then restart all processes from a checkpoint.

    Args:
        cluster_resolver: describes the processes. None means the environment variable `TF_CONFIG`; without it, this
            process trains alone.
        devices: names of this process's devices, as for `MirroredStrategy`.
        cross_device_ops: how the replicas of one process add up their gradients, as for `MirroredStrategy`.
        group: a group of processes that is open already, instead of a resolver.
        overlap: whether the processes reduce gradients during the backward pass. None means yes, unless all are on one
            host and compute on CPUs: there, both would take the same cores.

    Attributes:
        rank: number of this process.

    Raises:
        BadRequest: `TF_CONFIG` is invalid.
        DeviceUnavailable: there is no such device.
        RankLost: another process did not come.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        *,
        devices: Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        group: Group | None = None,
        overlap: bool | None = None,
    ) -> None:
        super().__init__(devices, cross_device_ops)
        _tracing.start("client")
        self._group = group or open_group(cluster_resolver or TFConfigClusterResolver())
        counts = [self.local_replicas]
        if self._group:
            counts = [int(it) for it in self._group.all_gather(np.array(self.local_replicas, np.int64))]
        self.rank = self._group.rank if self._group else 0
        self.first_replica, self._replicas = sum(counts[: self.rank]), sum(counts)
        self._processes = len(counts)
        self._buckets = Buckets(self._group) if self._group else None
        idle_cpu = any(it.is_gpu for it in self.devices) or not (self._group and self._group.shares_memory)
        self._overlaps = idle_cpu if overlap is None else overlap

    @property
    def num_replicas_in_sync(self) -> int:
        return self._replicas

    @property
    def input_pipelines(self) -> int:
        return self._processes

    @property
    def input_pipeline_id(self) -> int:
        return self.rank

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Any = None, options: Any = None) -> Any:
        with _tracing.root("run", rank=self.rank, ranks=self._processes):
            return super().run(fn, args, kwargs, options)

    experimental_run_v2 = run

    def timings(self) -> GroupTimings:
        """Returns the times of all processes over the last minute, by rank: local reduce, wait and transfer.

            print(strategy.timings())

        A process that trains alone has none.
        """
        return self._group.timings() if self._group else GroupTimings()

    def register_metrics(self, registry: CollectorRegistry = REGISTRY) -> None:
        """Adds this process's metrics, `shoal_rank_*`, to a registry of `prometheus_client`, which the script serves.

        Args:
            registry: the registry. The default is that of `prometheus_client.start_http_server`.
        """
        if group := self._group:
            registry.register(RankMetrics(lambda: group.times, group.timings, lambda: group.sent_bytes))

    def create_variable(self, name: str, initial: np.ndarray, *, trainable: bool = True) -> DistributedVariable:
        values = np.array(initial)
        if self._group:
            self._group.broadcast(values)
        return super().create_variable(name, values, trainable=trainable)

    def join(self, replica: ReplicaContext, op: ReduceOp, arrays: list[Array]) -> list[Array]:
        if self._group is None:
            return super().join(replica, op, arrays)
        sums = super().join(replica, ReduceOp.SUM, arrays)
        joined: list[np.ndarray] = []
        if replica.local_replica == 0:
            joined = _packed([on_host(it) for it in sums], self._group.all_reduce)
            if op is ReduceOp.MEAN:
                joined = [it * it.dtype.type(1 / self._replicas) for it in joined]
        # If the collective raises, this replica leaves, and the others do not wait.
        return [replica.device.put(it) for it in replica.exchange("an all-reduce of all processes", joined)[0]]

    def _collected(
        self, replica: ReplicaContext, gradients: Iterator[tuple[DistributedVariable, Array]]
    ) -> tuple[list[DistributedVariable], list[Array]]:
        if self._buckets is None:
            return super()._collected(replica, gradients)
        variables: list[DistributedVariable] = []
        local_s = 0.0
        try:
            if not self._overlaps:
                gradients = iter(list(gradients))
            for part in _parts(gradients, BUCKET_BYTES if self.local_replicas > 1 else 0):
                variables += [variable for variable, _ in part]
                began = time.perf_counter()
                sums = super().join(replica, ReduceOp.SUM, [gradient for _, gradient in part])
                local_s += time.perf_counter() - began
                if replica.local_replica == 0:
                    for (variable, _), array in zip(part, sums, strict=True):
                        self._buckets.add(variable.name, on_host(array))
            joined = list(self._buckets.finish().values()) if replica.local_replica == 0 else []
        except BaseException:
            if replica.local_replica == 0:
                self._buckets.abandon()
            raise
        if replica.local_replica == 0 and self._group:
            self._group.times.steps += 1
            self._group.times.local_reduce += local_s
        return variables, [replica.device.put(it) for it in replica.exchange("the sums of all processes", joined)[0]]

    def merge_statistics(self, variables: Sequence[DistributedVariable]) -> None:
        """Sets variables that are not trainable to the mean of all replicas of all processes. All processes call it.

        Args:
            variables: the variables.
        """
        if self._group is None:
            return
        kept = [it for it in variables if not it.trainable and it.dtype.kind == "f"]
        shares = [it.numpy() * it.dtype.type(self.local_replicas / self._replicas) for it in kept]
        for variable, mean in zip(kept, _packed(shares, self._group.all_reduce), strict=True):
            variable.assign(mean)

    def close(self) -> None:
        if self._group and self._buckets:
            self._group.close()
            self._buckets.close()
        super().close()

    def _across(self, array: np.ndarray) -> np.ndarray:
        return self._group.all_reduce(np.array(array)) if self._group else array

    def _gathered(self, array: np.ndarray, axis: int) -> np.ndarray:
        if self._group is None:
            return array
        moved = np.moveaxis(array, axis, 0)
        lengths = [int(it) for it in self._group.all_gather(np.array(len(moved), np.int64))]
        padded = np.zeros((max(lengths), *moved.shape[1:]), moved.dtype)
        padded[: len(moved)] = moved
        parts = [part[:length] for part, length in zip(self._group.all_gather(padded), lengths, strict=True)]
        return np.moveaxis(np.concatenate(parts), 0, axis)


def _parts(gradients: Iterator[tuple[DistributedVariable, Array]], nbytes: int) -> Iterator[_Gradients]:
    """Yields the gradients a few at a time, each time when they have so many bytes, and at least one."""
    part: _Gradients = []
    for each in gradients:
        part.append(each)
        if sum(gradient.nbytes for _, gradient in part) >= nbytes:
            yield part
            part = []
    if part:
        yield part


def _packed(arrays: Sequence[np.ndarray], reduce: Callable[[np.ndarray], np.ndarray]) -> list[np.ndarray]:
    """Reduces arrays in one call for each dtype, because each call costs a round trip.

    Args:
        arrays: the arrays.
        reduce: reduces a flat array in place.

    Returns:
        New arrays.
    """
    by_dtype: dict[np.dtype, list[int]] = defaultdict(list)
    for number, array in enumerate(arrays):
        by_dtype[array.dtype].append(number)
    results: dict[int, np.ndarray] = {}
    for numbers in by_dtype.values():
        flat = np.concatenate([arrays[number].reshape(-1) for number in numbers])
        reduce(flat)
        ends = np.cumsum([arrays[number].size for number in numbers])
        for number, part in zip(numbers, np.split(flat, ends[:-1]), strict=True):
            results[number] = part.reshape(arrays[number].shape)
    return [results[number] for number in range(len(arrays))]


__all__ = ["MultiWorkerMirroredStrategy"]
