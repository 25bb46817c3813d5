"""Threads of a parameter server: calls of one kind do not wait for calls of another kind."""

import threading
from collections.abc import Iterable

import pytest

from shoal import consistency, optim
from shoal._wire import ShardLayout
from shoal.v1 import parameter_server_pb2 as pb
from shoal.variables import Variable
from shoal_server.shards import JobShardConfig
from support.clusters.shard_servers import ShardServers
from support.waiting import wait_until


def test_jobs_whose_shards_are_created_do_not_delay_the_workers_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A creation whose caller has given up before its turn allocates nothing."""
    gate, created = threading.Event(), list[str]()

    def create(config: JobShardConfig, _layouts: Iterable[ShardLayout]) -> int:
        created.append(config.name)
        assert gate.wait(20)
        return 0

    with ShardServers({"w": Variable((3,))}, shards=1, rpc_threads=2) as servers:
        monkeypatch.setattr(servers.stores[0], "create", create)
        [stub] = servers.stubs
        settings = {
            "generation": 1,
            "optimizer": optim.SGD(0.1).to_proto(),
            "consistency": consistency.Asynchronous().to_proto(),
        }
        first, *others, given_up, last = (
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
        given_up.cancel()
        gate.set()
        for call in (first, *others, last):
            call.result()
    assert len(created) == 16
    assert "new15" not in created
