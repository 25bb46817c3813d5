"""A participant whose servers are lost, against copies in memory. Updates are whole numbers, so each counts once."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal import errors
from shoal._training.overlap import Pipeline
from shoal._transport import shared_memory
from shoal._transport.shared_memory import SharedMemoryTransport
from shoal._wire import Placement
from shoal.partitioners import FixedShards
from shoal.v1 import tensor_pb2
from shoal.variables import Variable
from support.clusters.fake_replicas import FakeReplicas, replicas
from support.clusters.shard_servers import ShardServers
from support.waiting import wait_until

VARIABLES = {"w": Variable(8, partitioner=FixedShards(4))}
ONES = {"w": np.ones(8, np.float32)}
FIRST, SECOND = "replica-0:1", "replica-1:1"


@pytest.fixture
def cluster() -> Iterator[FakeReplicas]:
    with replicas(VARIABLES) as cluster:
        yield cluster


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


def promote_when_asked(cluster: FakeReplicas, lost: str, questions: int = 1) -> None:
    """Promotes backups once the coordinator was asked so often: the client notices the loss before."""
    with cluster.changed:
        enough = cluster.questions + questions
        assert cluster.changed.wait_for(lambda: cluster.questions >= enough, 20)
    cluster.promote(lost)


@pytest.mark.parametrize("questions", [0, 1, 3])
def test_a_server_that_is_lost_before_a_push(cluster: FakeReplicas, thread: ThreadPoolExecutor, questions: int) -> None:
    with cluster.client() as client:
        client.pull()
        client.push(ONES)
        links = client.servers.connections[:]
        cluster.lose(FIRST)
        promoted = thread.submit(promote_when_asked, cluster, FIRST, questions)
        client.pull()
        client.push(ONES)
        promoted.result()
        assert client.servers.connections == links, "the connections stay, and one has moved"
        assert [link.moves for link in links] == [1, 0]
        assert {link.address for link in links} == {SECOND}
        np.testing.assert_array_equal(client.pull()["w"], np.full(8, 2))


@pytest.mark.parametrize("call", ["push", "commit"])
@pytest.mark.parametrize("end", ["loses_answer_of", "answers_last"])
def test_a_server_that_is_lost_in_a_push_in_two_phases(
    cluster: FakeReplicas, thread: ThreadPoolExecutor, call: str, end: str
) -> None:
    setattr(cluster.servers[FIRST], end, call)
    with cluster.client() as client:
        client.pull()
        promoted = thread.submit(promote_when_asked, cluster, FIRST)
        for step in range(3):
            assert client.push(ONES).step == step + 1
            client.pull()
        promoted.result()
    assert cluster.values() == [12.0, 12.0]
    if (call, end) == ("push", "answers_last"):
        assert "push 0" not in cluster.servers[SECOND].calls[:3], "the commit alone goes to the backup"


def test_a_backup_that_lacks_a_staged_push_gets_it_again(cluster: FakeReplicas, thread: ThreadPoolExecutor) -> None:
    cluster.servers[FIRST].answers_last = "push"
    with cluster.client() as client:
        client.pull()

        def forget_and_promote() -> None:
            with cluster.changed:
                assert cluster.changed.wait_for(lambda: cluster.questions >= 1, 20)
                cluster.groups[0].staged.clear()
            cluster.promote(FIRST)

        promoted = thread.submit(forget_and_promote)
        client.push(ONES)
        promoted.result()
    assert cluster.values() == [4.0, 4.0]


def test_a_push_that_is_not_staged_fails_if_nothing_has_moved(cluster: FakeReplicas) -> None:
    with cluster.client() as client:
        client.pull()
        original = cluster.groups[0]
        cluster.groups[0] = type("Forgetful", (type(original),), {"__setattr__": object.__setattr__})()
        cluster.groups[0].staged = _Forgetful()
        with pytest.raises(errors.NotStaged):
            client.push(ONES)


class _Forgetful(dict[int, list[np.ndarray]]):
    def __setitem__(self, step: int, arrays: list[np.ndarray]) -> None:
        pass


@pytest.mark.parametrize("way", ["lost", "stopped"])
def test_a_pull_that_waits_goes_on_at_the_backup(cluster: FakeReplicas, thread: ThreadPoolExecutor, way: str) -> None:
    with cluster.client() as client:
        client.pull()
        client.push(ONES)
        cluster.open = False
        pulled = thread.submit(client.pull)
        wait_until(lambda: cluster.waiting == 2, what="the wait for other workers")
        with cluster.changed:
            if way == "stopped":  # it answers nothing, and closes no connection
                cluster.servers[FIRST].stopped = True
            else:
                cluster.servers[FIRST].lost = True
                cluster.changed.notify_all()
        cluster.promote(FIRST)
        wait_until(lambda: "pull 0" in cluster.servers[SECOND].calls, what="the pull at the backup")
        with cluster.changed:
            cluster.open = True
            cluster.changed.notify_all()
        np.testing.assert_array_equal(pulled.result(20)["w"], np.ones(8))


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("call", ["push", "commit", "pull"])
def test_overlapping_calls_go_on_at_the_backup(
    cluster: FakeReplicas, thread: ThreadPoolExecutor, call: str, buffers: bool
) -> None:
    with Pipeline(cluster.client(), overlap=True) as pipeline:
        promoted: Future[None] | None = None
        for step in range(6):
            pipeline.pull()
            pipeline.settle()
            if step == 2:
                cluster.servers[FIRST].loses_answer_of = call
                promoted = thread.submit(promote_when_asked, cluster, FIRST)
            gradients = pipeline.buffers() if buffers else {"w": np.empty(8, np.float32)}
            gradients["w"][:] = 1
            pipeline.push(gradients)
            if not buffers:
                gradients["w"][:] = 100  # copied before
        pipeline.settle()
        assert promoted
        promoted.result()
        assert pipeline.step == 6
    assert cluster.values() == [24.0, 24.0]


def test_gradients_that_are_pushed_one_by_one(cluster: FakeReplicas, thread: ThreadPoolExecutor) -> None:
    with Pipeline(cluster.client(), overlap=False) as pipeline:
        pipeline.pull()
        pipeline.push(iter(ONES.items()))
        cluster.lose(FIRST)
        promoted = thread.submit(promote_when_asked, cluster, FIRST)
        pipeline.push(iter(ONES.items()))
        promoted.result()
    assert cluster.values() == [8.0, 8.0]


@pytest.mark.parametrize(
    "refusal",
    [errors.Moved("it has moved"), errors.NotPlaced("it is being promoted"), errors.UnknownJob("new here")],
)
def test_an_old_primary_that_refuses_calls(
    cluster: FakeReplicas, thread: ThreadPoolExecutor, refusal: errors.ShoalError
) -> None:
    with cluster.client() as client:
        client.pull()
        cluster.servers[FIRST].refuses = refusal
        promoted = thread.submit(promote_when_asked, cluster, FIRST, 2)
        client.push(ONES)
        promoted.result()
    assert cluster.values() == [4.0, 4.0]


def test_a_job_without_copies_reports_lost_shards_at_once(cluster: FakeReplicas) -> None:
    shards = tuple(replace(it, backup="", backup_address="", term=0) for it in cluster.placement.shards)
    cluster.placement = replace(cluster.placement, shards=shards)
    with cluster.client(replicated=False) as client:
        client.pull()
        cluster.servers[FIRST].refuses = errors.UnknownJob("new here")
        with pytest.raises(errors.UnknownJob):
            client.push(ONES)
    assert cluster.questions == 1, "they may have moved"


def test_a_job_without_copies_whose_shards_move(cluster: FakeReplicas) -> None:
    with cluster.client(replicated=False) as client:
        client.pull()
        cluster.promote(FIRST)
        client.push(ONES)
    assert cluster.values() == [4.0, 4.0]


def test_a_coordinator_that_is_away_keeps_the_old_placement(cluster: FakeReplicas, thread: ThreadPoolExecutor) -> None:
    cluster.away = True
    with cluster.client() as client:
        client.pull()
        cluster.lose(FIRST)
        pushed = thread.submit(client.push, ONES)
        wait_until(lambda: cluster.questions >= 3, what="questions without an answer")
        cluster.promote(FIRST)
        cluster.away = False
        assert pushed.result(20).outcome == "accepted"
    assert cluster.values() == [4.0, 4.0]


def test_a_loss_that_nobody_repairs_is_told_in_time(cluster: FakeReplicas) -> None:
    with cluster.client(retry_for_s=0.3) as client:
        client.pull()
        cluster.lose(FIRST)
        with pytest.raises(errors.Unreachable, match=f"at {FIRST} did not answer within 0.3 s"):
            client.push(ONES)


def test_a_new_generation_replaces_all_connections(cluster: FakeReplicas) -> None:
    with cluster.client() as client:
        client.pull()
        links = client.servers.connections[:]
        cluster.lose(FIRST)
        cluster.promote(FIRST)
        cluster.placement = replace(cluster.placement, generation=2)
        client.push(ONES)
        assert client.servers.placement.generation == 2
        assert not set(links) & set(client.servers.connections)
        assert all(link.closed for link in links)


def test_an_answer_that_is_late_moves_nothing_back(cluster: FakeReplicas) -> None:
    early = cluster.placement
    answers: list[Placement] = []
    with cluster.client(locate=lambda known: known.renewed(answers.pop(0).to_proto())) as client:
        client.pull()
        cluster.promote(FIRST)
        answers += [cluster.placement, early]
        client.push(ONES)
        cluster.servers[SECOND].refuses = errors.Moved("not here")
        with pytest.raises(IndexError):  # after the answer that was late, it asks again
            client.pull()
        assert {link.address for link in client.servers.connections} == {SECOND}


def test_closing_ends_calls_that_wait_for_a_backup(cluster: FakeReplicas, thread: ThreadPoolExecutor) -> None:
    client = cluster.client()
    client.pull()
    cluster.lose(FIRST)
    pushed = thread.submit(client.push, ONES)
    wait_until(lambda: cluster.questions >= 1, what="a question")
    client.close()
    with pytest.raises((errors.Cancelled, errors.Unreachable)):
        pushed.result(20)
    wait_until(lambda: "failover" not in {it.name for it in threading.enumerate()}, what="the end of the thread")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["push", "commit", "pull"]), st.booleans()), max_size=3))
def test_every_push_counts_once_wherever_servers_are_lost(losses: list[tuple[int, str, bool]]) -> None:
    """Each loss is of the server that has group 0; it comes back empty afterwards, as the next backup."""
    with replicas(VARIABLES) as cluster, cluster.client() as client:
        for step in range(6):
            client.pull()
            for at, call, answered in losses:
                if at == step:
                    lose_and_promote(cluster, call, answered)
            client.push(ONES)
        client.pull()
        assert cluster.values() == [24.0, 24.0]


def lose_and_promote(cluster: FakeReplicas, call: str, answered: bool) -> None:
    address = cluster.at(0)
    if any(it.backup_address == "" for it in cluster.placement.shards):
        return  # only one copy is left
    setattr(cluster.servers[address], "answers_last" if answered else "loses_answer_of", call)

    def promote() -> None:
        with cluster.changed:
            cluster.changed.wait_for(lambda: cluster.servers[address].lost, 20)
        cluster.promote(address)

    threading.Thread(target=promote, daemon=True).start()


LARGE = {"w": Variable(4096, partitioner=FixedShards(2))}


@pytest.fixture
def two_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ShardServers, ShardServers]]:
    """Yields two servers with the same shards; the second one stands for a promoted backup of the first."""
    monkeypatch.setattr(shared_memory, "SHARED_FROM_BYTES", 0)
    with ShardServers(LARGE) as first, ShardServers(LARGE) as second:
        for servers in (first, second):
            servers.admit("a")
        yield first, second


def moved_to(servers: ShardServers) -> Placement:
    shards = tuple(replace(it, term=1) for it in servers.placement.shards)
    return replace(servers.placement, shards=shards)


@pytest.mark.parametrize("last", ["auto", "tcp", "grpc"])
@pytest.mark.parametrize("filled", ["before", "between"])
@pytest.mark.parametrize("given", ["buffers", "copies"])
def test_a_payload_in_shared_memory_survives_the_move(
    two_servers: tuple[ShardServers, ShardServers],
    monkeypatch: pytest.MonkeyPatch,
    last: str,
    filled: str,
    given: str,
) -> None:
    first, second = two_servers
    with first.client("a", transport="auto") as client:
        values = client.pull()
        link = client.servers.connections[0]
        gradients = client.buffers(lambda size: np.empty(size, np.uint8))
        assert isinstance(link.push_transport, SharedMemoryTransport)
        monkeypatch.setattr(link, "setting", last)  # the transport at the second server
        if filled == "between":
            link.move(second.addresses[0])
        if given == "buffers":
            gradients["w"][:] = 1
            push = client.prepare(gradients, None, 1.0)
        else:
            array = np.ones(4096, np.float32)
            push = client.prepare({"w": array}, None, 1.0, memory=lambda size: np.empty(size, np.uint8))
            array[:] = 100
        if filled == "before":
            link.move(second.addresses[0])
        assert client.send(push).outcome == "accepted"
        assert first.versions() == [0, 0]
        np.testing.assert_array_equal(second.values()["w"], np.full(4096, -1))
        np.testing.assert_array_equal(values["w"], np.zeros(4096))


def test_a_server_that_has_lost_its_shards_is_left_without_new_plans(
    two_servers: tuple[ShardServers, ShardServers],
) -> None:
    first, second = two_servers
    with first.client("a", locate=lambda known: known.renewed(slim(moved_to(second))), replicated=True) as client:
        client.pull()
        [link], packer, before = client.servers.connections, client.servers.packer, client.servers.placement
        first.stores[0].clear()  # as after a restart
        client.push({"w": np.ones(4096, np.float32)})
        np.testing.assert_array_equal(client.pull()["w"], np.full(4096, -1))
        assert (link.address, link.moves) == (second.addresses[0], 1)
        after = client.servers.placement
        assert client.servers.packer is packer
        assert after.variables is before.variables
        assert [it.layout for it in after.shards] == [it.layout for it in before.shards]
        assert after.shards[0].layout is before.shards[0].layout


def slim(placement: Placement) -> tensor_pb2.Placement:
    return tensor_pb2.Placement.FromString(placement.encoded_servers)
