"""Lock groups that are split while workers train: each push counts once. The test plays the coordinator.

Updates are whole numbers, so sums show how often each push was applied, whatever the order.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shoal import _rpc, consistency, optim
from shoal._training.overlap import Pipeline
from shoal._training.parameters import ParameterClient, PushResult
from shoal._transport import shared_memory
from shoal._wire import Placement
from shoal.partitioners import FixedShards
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1 import tensor_pb2
from shoal.variables import Variable
from shoal_server.shards import LockGroup
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
        return {group.number: group for group in self.stores[server].groups()}


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as thread:
        yield thread


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


def splits_and_moves(rig: Splits) -> None:
    rig.split(0, [3, 5])
    rig.split(0, [1])
    rig.move(3)
    rig.split(3, [5], server=1)


@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for name, mode in MODES.items() for way in AT_ONCE + OVERLAPPED * mode.overlaps],
)
def test_pushes_count_once_while_groups_are_split(name: str, way: str, thread: ThreadPoolExecutor) -> None:
    mode = MODES[name]
    with Splits(mode) as rig:
        begun, workers, steps = threading.Event(), 3, 40
        names = [f"w{rank}" for rank in range(workers)]
        for worker in names:
            rig.admit(worker)
        training = [thread.submit(train, rig, worker, steps, way, begun) for worker in names]
        assert begun.wait(20)
        splits_and_moves(rig)
        accepted = sum(each.result(60) for each in training)
        assert [sorted(rig.groups(server)) for server in (0, 1)] == [[0, 1], [3, 5]]
        check_values(rig, mode, workers, steps, accepted)


@pytest.mark.parametrize("transport", ["auto", "tcp", "grpc"])
@pytest.mark.parametrize("way", AT_ONCE + OVERLAPPED)
def test_large_pushes_count_once_on_each_transport(
    transport: str, way: str, thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "SHARED_FROM_BYTES", 0)
    mode = MODES["async" if way in OVERLAPPED else "sync"]
    with Splits(mode, VARIABLES) as rig:
        begun, workers, steps = threading.Event(), 2, 12
        names = [f"w{rank}" for rank in range(workers)]
        for worker in names:
            rig.admit(worker)
        training = [thread.submit(train, rig, worker, steps, way, begun, transport) for worker in names]
        assert begun.wait(20)
        splits_and_moves(rig)
        accepted = sum(each.result(60) for each in training)
        check_values(rig, mode, workers, steps, accepted)


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
