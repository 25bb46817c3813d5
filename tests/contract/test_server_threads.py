"""Threads and memory of a parameter server: no kind of call, and no worker, takes those that others need."""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from shoal import _rpc, consistency, errors, optim
from shoal._transport.frames import Frame
from shoal._wire import ShardLayout
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1 import tensor_pb2
from shoal.variables import Variable
from shoal_server.shards import JobShardConfig
from support.clusters.shard_servers import ShardServers
from support.waiting import wait_until


def test_jobs_whose_shards_are_created_do_not_delay_the_workers_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A creation that its caller has abandoned before its turn allocates nothing."""
    gate, created = threading.Event(), list[str]()

    def create(config: JobShardConfig, _layouts: Iterable[ShardLayout]) -> int:
        created.append(config.name)
        assert gate.wait(20)
        return 0

    with ShardServers({"w": Variable((3,))}, shards=1, rpc_threads=2) as servers:
        monkeypatch.setattr(servers.stores[0], "create", create)
        [stub] = servers.stubs
        settings: dict[str, Any] = {
            "generation": 1,
            "optimizer": optim.SGD(0.1).to_proto(),
            "consistency": consistency.Asynchronous().to_proto(),
        }
        first, *others, abandoned, last = (
            stub.CreateShards.future(pb.CreateShardsRequest(job=f"new{index}", **settings), timeout=20)
            for index in range(17)
        )
        wait_until(lambda: servers.sample("shoal_server_queued_calls", pool="creation") == 16, what="all calls")
        worker = [pb.WorkerFence(worker="a", incarnation=1)]
        servers.admit("a")
        fenced = stub.FenceWorkers(pb.FenceWorkersRequest(job="job", workers=worker), timeout=20)
        assert fenced.committed_steps == [0]
        release = [pb.WorkerRelease(worker="a", incarnation=1)]
        stub.ReleaseWorkers(pb.ReleaseWorkersRequest(job="job", workers=release), timeout=20)
        stub.DropShards(pb.DropShardsRequest(job="other"), timeout=20)
        assert created == ["new0"]
        abandoned.cancel()
        gate.set()
        for call in (first, *others, last):
            call.result()
    assert len(created) == 16
    assert "new15" not in created


def test_a_worker_has_one_push_in_transfer_whatever_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server would otherwise keep a gradient for each push whose last chunk does not come."""
    with ShardServers({"w": Variable((3,))}, shards=1) as servers, servers.worker("a") as worker:
        [stub], forever, memory, taken = servers.stubs, threading.Event(), servers.stores[0].memory, list[int]()
        take = memory.take

        def noted(nbytes: int) -> np.ndarray:
            taken.append(nbytes)
            return take(nbytes)

        monkeypatch.setattr(memory, "take", noted)
        stamp = worker.servers.stamp(0)
        header = pb.PushHeader(
            stamp=stamp, shards=[0], versions=[0], weight=1.0, commit=True, aggregations=[tensor_pb2.TRAINABLE]
        )
        message = pb.PushRequest(header=header)

        def unfinished() -> Iterator[pb.PushRequest]:
            yield message
            forever.wait(20)

        def check_ended(call: Callable[[], object]) -> None:
            with pytest.raises(errors.ShoalError), _rpc.as_shoal_errors("server"):
                call()

        with servers.lane() as first, servers.lane() as second:
            call = stub.Push.future(unfinished(), timeout=20)
            wait_until(lambda: bool(taken), what="the first transfer")
            first.send(Frame.PUSH, message.SerializeToString())
            check_ended(call.result)
            second.send(Frame.PUSH, message.SerializeToString())
            check_ended(first.receive)
            call = stub.Push.future(unfinished(), timeout=20)
            check_ended(second.receive)
            assert worker.push({"w": np.ones(3, np.float32)}).outcome == "accepted"
            check_ended(call.result)
        forever.set()
        assert servers.versions() == [1]
