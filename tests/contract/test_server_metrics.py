"""A server's metrics after calls of real clients, on each transport."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shoal import consistency, errors
from shoal._transport import shared_memory
from shoal.v1 import parameter_server_pb2 as pb
from shoal.variables import Variable
from support.clusters.shard_servers import ShardServers
from support.waiting import wait_until

VARIABLES = {"w": Variable((3,)), "v": Variable((3,))}
ONES = {name: np.ones(3, np.float32) for name in VARIABLES}
NBYTES = 24
HELD_S = 0.05


@pytest.fixture(params=["grpc", "lane", "shared_memory"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns the name of the clients' transport in metrics."""
    ways = {"grpc": "grpc", "lane": "tcp", "shared_memory": "auto"}
    monkeypatch.setenv("SHOAL_TRANSPORT", ways[request.param])
    monkeypatch.setattr(shared_memory, "SHARED_FROM_BYTES", 0)
    way: str = request.param
    return way


@pytest.fixture
def servers() -> Iterator[ShardServers]:
    with ShardServers(VARIABLES, shards=2) as servers:
        yield servers


def test_a_pull_is_timed_apart_from_its_wait(transport: str) -> None:
    mode = consistency.Synchronous()
    with (
        ShardServers(VARIABLES, shards=2, mode=mode) as servers,
        servers.worker("a") as a,
        servers.worker("b") as b,
        ThreadPoolExecutor(1) as pool,
    ):
        a.push(ONES)
        began = time.perf_counter()
        waiting = pool.submit(a.pull)
        wait_until(lambda: servers.waiting() == 1, what="the pull's wait")
        assert servers.sample("shoal_server_waiting_pulls") == 1
        waits = time.perf_counter()
        wait_until(lambda: time.perf_counter() > waits + HELD_S, what="time to pass")
        b.push(ONES)
        waiting.result(timeout=20)
        wait_until(lambda: servers.sample("shoal_server_pull_seconds_count") == 1, what="the end of the pull")
        took_s = time.perf_counter() - began
        waited_s = servers.sample("shoal_server_pull_wait_seconds_sum")
        assert servers.sample("shoal_server_pull_wait_seconds_count") == 1
        assert waited_s > HELD_S
        assert 0 < servers.sample("shoal_server_pull_seconds_sum") <= took_s - waited_s
        assert servers.sample("shoal_server_waiting_pulls") == 0


def test_bytes_are_counted_by_transport(transport: str, servers: ShardServers) -> None:
    with servers.worker("a") as worker:
        worker.pull()
        worker.push(ONES)
    for name in ("sent", "received"):
        metric = f"shoal_server_{name}_bytes_total"
        assert servers.sample(metric, transport=transport) == servers.sample(metric) == NBYTES


def test_lanes_are_counted_while_they_are_open(transport: str, servers: ShardServers) -> None:
    with servers.worker("a") as worker:
        worker.pull()
        worker.push(ONES)
        opened = 0 if transport == "grpc" else 2
        assert servers.sample("shoal_server_lanes", transport=transport) == opened
        assert servers.sample("shoal_server_lanes") == opened
    wait_until(lambda: servers.sample("shoal_server_lanes") == 0, what="the lanes' end")
    assert servers.sample("shoal_server_segments_total", outcome="shared") == (2 if transport == "shared_memory" else 0)


def test_a_segment_that_is_not_taken_is_counted(servers: ShardServers) -> None:
    with servers.lane(segment=pb.Segment(name="shoal-not-there", regions=1, region_bytes=4096)) as lane:
        assert not lane.welcome.shared
        wait_until(lambda: servers.sample("shoal_server_lanes", transport="lane") == 1, what="the lane")
    assert servers.sample("shoal_server_segments_total", outcome="refused") == 1
    assert servers.sample("shoal_server_segments_total", outcome="shared") == 0


@pytest.mark.usefixtures("transport")
class TestPushes:
    def test_to_one_server_are_one_call(self, servers: ShardServers) -> None:
        with servers.worker("a") as worker:
            worker.push(ONES)
        assert servers.sample("shoal_server_push_seconds_count", call="push") == 1
        assert servers.sample("shoal_server_push_seconds_count", call="commit") == 0
        assert servers.sample("shoal_server_updates_total") == 1
        assert servers.sample("shoal_server_apply_seconds_count") == 1
        assert servers.sample("shoal_server_pushes_total", outcome="accepted") == 1
        assert servers.sample("shoal_server_pushes_total", outcome="staged") == 0

    def test_to_two_servers_are_two_calls_each(self) -> None:
        with ShardServers(VARIABLES, servers=2, shards=2) as servers, servers.worker("a") as worker:
            worker.push(ONES)
            for call in ("push", "commit"):
                assert servers.sample("shoal_server_push_seconds_count", call=call) == 2
                assert servers.sample("shoal_server_push_seconds_sum", call=call) > 0
            assert servers.sample("shoal_server_pushes_total", outcome="staged") == 2
            assert servers.sample("shoal_server_pushes_total", outcome="accepted") == 2

    def test_that_wait_for_their_commit_are_counted(self) -> None:
        with ShardServers(VARIABLES, servers=2, shards=2) as servers, servers.worker("a") as worker:
            push = worker.prepare(ONES, None, 1.0)
            for link in worker.servers.connections:
                link.push(worker.pusher.header(link, push, commit=False), push.payload_for(link))
            assert servers.sample("shoal_server_staged_pushes") == 2
            worker.send(push)
            assert servers.sample("shoal_server_staged_pushes") == 0

    def test_that_are_repeated_count_once(self, servers: ShardServers) -> None:
        with servers.worker("a") as worker:
            push = worker.prepare(ONES, None, 1.0)
            worker.send(push)
            assert servers.sample("shoal_server_duplicate_pushes_total") == 0
            assert worker.send(push).outcome == "accepted"
            assert servers.sample("shoal_server_duplicate_pushes_total") == 1
            assert servers.sample("shoal_server_pushes_total", outcome="accepted") == 1
            assert servers.sample("shoal_server_staleness_versions_count") == 1
            [link] = worker.servers.connections
            link.commit(pb.CommitRequest(stamp=worker.servers.stamp(0), shards=link.indices))
            assert servers.sample("shoal_server_duplicate_pushes_total") == 2

    def test_and_commits_that_are_refused_are_counted_by_reason_and_not_timed(self, servers: ShardServers) -> None:
        with servers.worker("a") as worker:
            [link] = worker.servers.connections
            with pytest.raises(errors.NotStaged):
                link.commit(pb.CommitRequest(stamp=worker.servers.stamp(0), shards=link.indices))
            assert servers.sample("shoal_server_rejected_pushes_total", reason="not_staged") == 1
            with pytest.raises(errors.NonFiniteGradient):
                worker.push({name: value * np.nan for name, value in ONES.items()})
            assert servers.sample("shoal_server_rejected_pushes_total", reason="non_finite_gradient") == 1
        assert servers.sample("shoal_server_push_seconds_count") == 0


def test_metrics_show_the_hosted_shards(servers: ShardServers) -> None:
    assert servers.sample("shoal_server_shards") == 2
    assert servers.sample("shoal_server_shard_bytes") == NBYTES
    assert servers.sample("shoal_server_threads", pool="push") == 4
    assert servers.sample("shoal_server_memory_limit_bytes") > 1 << 20
