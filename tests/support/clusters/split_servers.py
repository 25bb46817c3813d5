"""Parameter servers in this process whose lock groups are split and moved. The test plays the coordinator.

Updates are whole numbers, so sums show how often each push was applied, whatever the order.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from shoal import _rpc, consistency, optim
from shoal._training.overlap import Pipeline
from shoal._training.parameters import ParameterClient, PushResult
from shoal._wire import Placement
from shoal.partitioners import FixedShards
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1 import tensor_pb2
from shoal.variables import Variable
from shoal_server.shards import LockGroup, Stamp
from support.clusters.shard_servers import ShardServers
from support.waiting import wait_until

SMALL, LARGE = 60, 3 * (1 << 19)  # elements; each shard of "large" has an arena with a slab of its own
VARIABLES = {
    "small": Variable(SMALL, partitioner=FixedShards(6)),
    "large": Variable(LARGE, partitioner=FixedShards(3)),
    "count": Variable(6, dtype="int64", trainable=False, aggregation="sum", partitioner=FixedShards(6)),
}
FEW = {name: VARIABLES[name] for name in ("small", "count")}
MODES = {
    "sync": consistency.Synchronous(),
    "backup workers": consistency.Synchronous(backup_workers=1),
    "async": consistency.Asynchronous(),
    "ssp": consistency.BoundedStaleness(2),
}
AT_ONCE = ["plain", "buffers", "one by one"]
OVERLAPPED = ["overlapped copies", "overlapped buffers", "overlapped one by one"]  # of modes that overlap


class Splits(ShardServers):
    """Two servers; the shards of a job are one lock group on the first one."""

    def __init__(
        self,
        mode: consistency.Consistency,
        variables: Mapping[str, Variable] = FEW,
        optimizer: optim.Optimizer | None = None,
        **options: Any,
    ) -> None:
        self.terms = 0
        super().__init__(variables, servers=1, shards=6, mode=mode, optimizer=optimizer, **options)
        self.addresses.append(self._start(4, 1024, 30.0, time.monotonic))
        self.stubs.append(self._stub(self.addresses[1]))

    def call(self, server: int, method: str, request: Any) -> Any:
        with _rpc.as_shoal_errors(f"server-{server}"):
            return getattr(self.stubs[server], method)(request)

    def locate(self, known: Placement) -> Placement:
        return known.renewed(tensor_pb2.Placement.FromString(self.placement.encoded_servers))

    def worker(self, name: str, **options: Any) -> ParameterClient:
        return self.client(name, locate=self.locate, **options)

    def split(self, group: int, shards: Sequence[int], server: int = 0) -> None:
        """Splits a lock group, and publishes the placement."""
        self.terms += 1
        request = pb.SplitGroupRequest(job="job", generation=1, group=group, term=self.terms, shards=shards)
        self.call(server, "SplitGroup", request)
        whole = self.placement.by_group()[group]
        parts = {it.layout.shard: min(shards) if it.layout.shard in shards else group for it in whole}
        self._publish(parts, lambda it: replace(it, group=parts[it.layout.shard], term=self.terms))

    def move(self, group: int, to: int = 1) -> None:
        """Moves a lock group to another server, by a copy."""
        self.terms += 1
        (source,) = {it.address for it in self.placement.by_group()[group]}
        at = self.addresses.index(source)
        backup = pb.Peer(server=f"server-{to}", address=self.addresses[to])
        add = pb.AddBackupRequest(job="job", generation=1, group=group, term=self.terms, backup=backup)
        wait_until(lambda: self.call(at, "AddBackup", add).complete, what="the copy")
        self.terms += 1
        self.call(to, "Promote", pb.PromoteRequest(job="job", generation=1, group=group, term=self.terms))
        self.call(at, "DropCopy", pb.DropCopyRequest(job="job", generation=1, group=group, term=self.terms))
        names = [it.layout.shard for it in self.placement.by_group()[group]]
        place = {"server": f"server-{to}", "address": self.addresses[to], "term": self.terms}
        self._publish(names, lambda it: replace(it, **place))

    def _publish(self, shards: Any, change: Callable[[Any], Any]) -> None:
        changed = tuple(change(it) if it.layout.shard in shards else it for it in self.placement.shards)
        self.placement = replace(self.placement, shards=changed)

    def groups(self, server: int = 0) -> dict[int, LockGroup]:
        return {group.number: group for group in self.stores[server].hosted.all()}


class ReplicatedSplits(Splits):
    """As `Splits`, with a backup of the lock group on the second server."""

    def __init__(self, mode: consistency.Consistency, variables: Mapping[str, Variable] = FEW, **options: Any) -> None:
        super().__init__(mode, variables, **options)
        self.copy(0)

    def worker(self, name: str, **options: Any) -> ParameterClient:
        return super().worker(name, replicated=True, **options)

    def copy(self, group: int, *, server: int = 0, to: int = 1) -> None:
        self.terms += 1
        backup = pb.Peer(server=f"server-{to}", address=self.addresses[to])
        add = pb.AddBackupRequest(job="job", generation=1, group=group, term=self.terms, backup=backup)
        wait_until(lambda: self.call(server, "AddBackup", add).complete, what="the copy")

    def request(self, group: int, shards: Sequence[int], keeps: int = 1) -> pb.SplitGroupRequest:
        return pb.SplitGroupRequest(
            job="job", generation=1, group=group, term=self.terms, shards=shards, keeps_term=keeps
        )

    def split_both(self, group: int, shards: Sequence[int], keeps: int | None = None) -> None:
        """Splits a lock group on both servers, and publishes the placement."""
        self.terms += 1
        self.call(0, "SplitGroup", self.request(group, shards, self.terms - 1 if keeps is None else keeps))
        self.publish_split(group, shards)

    def split_alone(self, group: int, shards: Sequence[int], server: int = 0, calls: int = 1) -> None:
        """Splits a lock group that has lost its other copy, and publishes the placement."""
        self.terms += 1
        for _ in range(calls):
            self.call(server, "SplitGroup", self.request(group, shards, keeps=0))
        self.publish_split(group, shards)

    def publish_split(self, group: int, shards: Sequence[int]) -> None:
        whole = self.placement.by_group()[group]
        parts = {it.layout.shard: min(shards) if it.layout.shard in shards else group for it in whole}
        self._publish(parts, lambda it: replace(it, group=parts[it.layout.shard], term=self.terms))

    def promote(self, group: int, server: int = 1, split_off: Sequence[int] = ()) -> None:
        """Makes a backup the primary, and publishes the placement."""
        self.terms += 1
        request = pb.PromoteRequest(job="job", generation=1, group=group, term=self.terms, split_off=split_off)
        self.call(server, "Promote", request)
        place = {"server": f"server-{server}", "address": self.addresses[server], "term": self.terms}
        names = [it.layout.shard for it in self.placement.by_group()[group]]
        self._publish(names, lambda it: replace(it, **place))

    def drop_backup(self, group: int, server: int = 0) -> None:
        self.terms += 1
        self.call(server, "DropBackup", pb.DropBackupRequest(job="job", generation=1, group=group, term=self.terms))

    def kill(self, server: int) -> None:
        """Ends a server: its connections, and its shards."""
        self.endpoints[server].stop()
        self.stores[server].clear()

    def check_same(self) -> None:
        """Checks that both servers have the same groups with the same bits."""

        def bits(server: int) -> dict[int, list[bytes]]:
            return {
                number: [
                    array.tobytes()
                    for shard in group.shards
                    for arena in shard.arenas
                    for array in (arena.values, *arena.slots.values())
                ]
                for number, group in sorted(self.groups(server).items())
            }

        wait_until(lambda: bits(0) == bits(1), what="the same bits")
        assert not any(group.broken_replicas for server in (0, 1) for group in self.groups(server).values())


def ones(variables: Mapping[str, Variable], value: float = 1.0) -> dict[str, np.ndarray]:
    return {name: np.full(it.shape, value, it.dtype) for name, it in variables.items() if name != "count"}


def push(pipeline: Pipeline, way: str) -> PushResult:
    gradients, updates = ones(pipeline.variables), {"count": np.ones(6, np.int64)}
    if way.endswith("one by one"):
        return pipeline.push(iter(gradients.items()), updates=updates)
    if way.endswith("buffers"):
        buffers = pipeline.buffers()
        for name, array in gradients.items():
            buffers[name][...] = array
        result = pipeline.push(buffers, updates=updates)
    else:
        result = pipeline.push(gradients, updates=updates)
    if way in ("overlapped copies", "overlapped buffers"):  # they were copied
        for array in (*gradients.values(), *updates.values()):
            array[...] = 100
    return result


def train(rig: Splits, name: str, steps: int, way: str, begun: threading.Event, transport: str | None = None) -> int:
    """Trains a worker, and returns the number of pushes that were accepted."""
    overlap = way in OVERLAPPED
    results: list[PushResult | None] = []
    with Pipeline(rig.worker(name, transport=transport), overlap=overlap) as pipeline:
        for step in range(steps):
            pipeline.pull()
            results += [pipeline.settle(), push(pipeline, way)]
            if step == 2:
                begun.set()
        results.append(pipeline.settle())
    rig.remove(name)
    return sum(result is not None and result.outcome == "accepted" for result in results)


def begin(
    rig: Splits, thread: ThreadPoolExecutor, workers: int, steps: int, way: str = "plain", transport: str | None = None
) -> list[Future[int]]:
    """Lets workers train, and waits until they have begun."""
    begun = threading.Event()
    names = [f"w{rank}" for rank in range(workers)]
    for worker in names:
        rig.admit(worker)
    training = [thread.submit(train, rig, worker, steps, way, begun, transport) for worker in names]
    assert begun.wait(20)
    return training


def stage_ones(group: LockGroup) -> None:
    """Stages the first push of worker `w0`, with ones for all variables."""
    payload = {slab: np.ones(values.size, values.dtype) for slab, values in enumerate(group.slab_values)}
    group.stage(Stamp("w0", 1, 0), 1.0, 0, payload)


def check_values(rig: Splits, mode: consistency.Consistency, workers: int, steps: int, accepted: int) -> None:
    """Checks that each push counts once, in the mean of its step or alone, on all shards."""
    values = rig.values()
    if mode == MODES["backup workers"]:  # each group decides by itself which pushes are late
        groups = [*rig.groups(0).values(), *rig.groups(1).values()]
        versions = [next(group.version for group in groups if shard in group) for shard in range(6)]
        np.testing.assert_array_equal(values["small"], -np.repeat(versions, SMALL // 6))
        assert all(
            version <= count <= workers * steps for version, count in zip(versions, values["count"], strict=True)
        )
        return
    assert accepted == workers * steps
    np.testing.assert_array_equal(values["count"], np.full(6, accepted))
    updates = steps if mode.joins_gradients else accepted
    for name, array in values.items():
        if name != "count":
            np.testing.assert_array_equal(array, np.full(array.shape, -updates))
