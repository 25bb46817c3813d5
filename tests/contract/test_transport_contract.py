"""Contract of all transports, tested on Shoal's own and on `support.memory_transport`, which is a single file."""

import ast
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

from shoal import consistency, errors
from shoal._training import ParameterClient
from shoal._transport import ServerConnection, grpc_calls, lane_transport
from shoal._transport import shared_memory as _shared_memory
from shoal._transport.grpc_transport import GrpcTransport
from shoal._transport.lane_transport import LaneTransport
from shoal._transport.shared_memory import SharedMemoryTransport
from shoal._wire.layout import Aggregation
from shoal._wire.packing import CompleteArrays
from shoal._wire.transfer import PushPayload
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal.variables import Variable
from shoal_server.serving.service import DataService
from shoal_server.shards.machine.consistency import SynchronousMode
from shoal_server.shards.machine.mode import PermitLimits
from support import memory_transport
from support.clusters.shard_servers import ShardServers
from support.memory_transport import MemoryTransport
from support.waiting import wait_until

VARIABLES = {"w": np.arange(1000, dtype=np.float32), "v": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)}
ONES = {name: np.ones_like(array) for name, array in VARIABLES.items()}
PUBLIC = {"shoal", "shoal._transport", "shoal._wire", "shoal.v1", "shoal_server", "shoal_server.serving"}


@dataclass(frozen=True)
class Way:
    """A transport: the client's half, its name in SHOAL_TRANSPORT, and the attribute with its deadline for answers."""

    kind: type
    setting: str
    deadline: tuple[object, str]


WAYS = {
    "shared_memory": Way(SharedMemoryTransport, "auto", (lane_transport, "_ANSWER_TIMEOUT_S")),
    "lane": Way(LaneTransport, "tcp", (lane_transport, "_ANSWER_TIMEOUT_S")),
    "grpc": Way(GrpcTransport, "grpc", (grpc_calls, "_COMMIT_TIMEOUT_S")),
    "memory": Way(MemoryTransport, "memory", (memory_transport, "ANSWER_TIMEOUT_S")),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    monkeypatch.setattr(_shared_memory, "SHARED_FROM_BYTES", 0)
    with memory_transport.registered():
        yield WAYS[request.param]


@pytest.fixture
def serve(way: Way) -> Callable[..., ShardServers]:
    """Starts servers whose clients all use this transport."""
    return lambda variables=VARIABLES, **options: ShardServers(variables, transport=way.setting, **options)


def connections(client: ParameterClient) -> list[ServerConnection]:
    """One a server."""
    return client.servers.connections


def stamp(step: int = 0, generation: int = 1) -> header_pb2.Stamp:
    return header_pb2.Stamp(job="job", worker="a", incarnation=1, step=step, generation=generation)


def pull_request(connection: ServerConnection, **fields: Any) -> pb.PullRequest:
    said: dict[str, Any] = {"stamp": stamp(), "shards": connection.indices} | fields
    return pb.PullRequest(**said)


def header(connection: ServerConnection, *, commit: bool, step: int = 0, generation: int = 1) -> pb.PushHeader:
    return pb.PushHeader(
        stamp=stamp(step, generation),
        shards=connection.indices,
        weight=1.0,
        commit=commit,
        aggregations=[Aggregation.TRAINABLE.value],
        versions=[0] * len(connection.indices),
    )


def load(client: ParameterClient, connection: ServerConnection, arrays: Mapping[str, np.ndarray]) -> PushPayload:
    return PushPayload(client.servers.packer, connection.layout, [Aggregation.TRAINABLE], CompleteArrays(arrays))


def memory(nbytes: int) -> np.ndarray:
    return np.empty(nbytes, np.uint8)


def check_same(values: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert values.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(values[name], array, strict=True)


class TestPulls:
    def test_values_come_this_way(self, serve: Callable[..., ShardServers], way: Way) -> None:
        """Without this check, all the other tests would prove nothing."""
        with serve() as servers, servers.worker("a") as worker:
            check_same(worker.pull(), VARIABLES)
            worker.push(ONES)
            [connection] = connections(worker)
            assert type(connection.pull_transport) is type(connection.push_transport) is way.kind

    def test_headers_only(self, serve: Callable[..., ShardServers]) -> None:
        with serve() as servers, servers.worker("a") as worker:
            worker.push(ONES)
            [connection] = connections(worker)
            headers = connection.pull(pull_request(connection, stamp=stamp(1), headers_only=True), None)
            assert {(it.shard, it.version, it.step, it.generation) for it in headers} == {
                (shard, 1, 1, 1) for shard in connection.indices
            }

    def test_a_pull_that_waits_is_answered_later(self, serve: Callable[..., ShardServers]) -> None:
        with (
            serve(mode=consistency.Synchronous()) as servers,
            servers.worker("a") as a,
            servers.worker("b") as b,
            ThreadPoolExecutor(1) as pool,
        ):
            a.push(ONES)
            pulled = pool.submit(a.pull)
            wait_until(lambda: servers.waiting() == 1, what="the pull's wait")
            b.push(ONES)
            check_same(pulled.result(20), {name: array - 1 for name, array in VARIABLES.items()})

    def test_a_pull_ahead_has_the_next_step(self, serve: Callable[..., ShardServers]) -> None:
        with serve() as servers, servers.worker("a") as worker:
            pulled = worker.fetch(0, ahead=1)
            assert pulled.step == 1
            check_same(pulled.values, VARIABLES)

    def test_pulled_values_stay_unchanged(self, serve: Callable[..., ShardServers]) -> None:
        """They stay unchanged after later pulls, and after the client is closed."""
        with serve() as servers, servers.worker("a") as worker:
            kept = []
            for step in range(5):
                kept.append((step, worker.pull()))
                worker.push(ONES)
        for step, values in kept:
            check_same(values, {name: array - step for name, array in VARIABLES.items()})

    @pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int64"])
    def test_dtypes(self, serve: Callable[..., ShardServers], dtype: str) -> None:
        kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
        arrays = {**VARIABLES, "x": np.arange(-50, 50).reshape(10, 10).astype(kind)}
        variables: dict[str, np.ndarray | Variable] = {**arrays}
        if kind.kind == "i":
            variables["x"] = Variable((10, 10), dtype="int64", trainable=False)
        with serve(variables, shards=3) as servers, servers.worker("a") as worker:
            values = worker.pull()
            assert values["x"].dtype == kind
            check_same({name: values[name] for name in VARIABLES}, VARIABLES)
            if kind.kind != "i":
                check_same(values, arrays)

    def test_arenas_larger_than_a_chunk(self, serve: Callable[..., ShardServers]) -> None:
        large = {"w": np.arange(900_000, dtype=np.float32), "v": np.ones((300_000, 2), np.float32)}
        with serve(large, shards=2) as servers, servers.worker("a") as worker:
            check_same(worker.pull(), large)
            worker.push(large)
            assert not any(array.any() for array in worker.pull().values())

    def test_another_dtype_on_the_wire(self, serve: Callable[..., ShardServers]) -> None:
        with serve(wire="bfloat16") as servers, servers.worker("a") as worker:
            assert worker.push({name: array * 0.5 for name, array in ONES.items()}).outcome == "accepted"
            assert worker.pull()["w"][0] == -0.5


class TestPushes:
    def test_a_push_counts_whole(self, serve: Callable[..., ShardServers]) -> None:
        with serve() as servers, servers.worker("a") as worker:
            worker.pull()
            assert worker.push(ONES).outcome == "accepted"
            check_same(worker.pull(), {name: array - 1 for name, array in VARIABLES.items()})
            assert servers.versions() == [1, 1]

    def test_two_phases(self, serve: Callable[..., ShardServers]) -> None:
        with serve() as servers, servers.worker("a") as worker:
            [connection] = connections(worker)
            staged = connection.push(header(connection, commit=False), load(worker, connection, ONES))
            assert {it.outcome for it in staged.shards} == {pb.STAGED}
            assert servers.versions() == [0, 0]
            committed = connection.commit(pb.CommitRequest(stamp=stamp(), shards=connection.indices))
            assert {it.outcome for it in committed.shards} == {pb.ACCEPTED}
            assert servers.versions() == [1, 1]

    def test_several_servers(self, serve: Callable[..., ShardServers]) -> None:
        with serve(servers=2) as servers, servers.worker("a") as worker:
            worker.pull()
            assert worker.push(ONES).outcome == "accepted"
            check_same(worker.pull(), {name: array - 1 for name, array in VARIABLES.items()})

    def test_a_repeat_gets_the_first_answer(self, serve: Callable[..., ShardServers]) -> None:
        with serve() as servers, servers.worker("a") as worker:
            [connection] = connections(worker)
            first, again = (
                connection.push(header(connection, commit=True), load(worker, connection, ONES)) for _ in range(2)
            )
            assert first == again
            assert servers.versions() == [1, 1]

    def test_a_stale_generation_is_refused(self, serve: Callable[..., ShardServers]) -> None:
        with serve() as servers, servers.worker("a") as worker:
            [connection] = connections(worker)
            with pytest.raises(errors.StaleGeneration):
                connection.push(header(connection, commit=True, generation=7), load(worker, connection, ONES))
            with pytest.raises(errors.StaleGeneration):
                connection.pull(pull_request(connection, stamp=stamp(generation=7)), None)
            with pytest.raises(errors.StaleGeneration):
                connection.commit(pb.CommitRequest(stamp=stamp(generation=7), shards=connection.indices))
            assert worker.push(ONES).outcome == "accepted"

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_non_finite_gradient_is_refused(self, serve: Callable[..., ShardServers], value: float) -> None:
        bad = {**ONES, "v": np.array([[0, 0, 0], [0, value, 0]], np.float32)}
        with serve() as servers, servers.worker("a") as worker:
            with pytest.raises(
                errors.NonFiniteGradient, match=f"the push for 'v' contains {value}; the whole push was rejected"
            ):
                worker.push(bad)
            assert servers.versions() == [0, 0]
            assert worker.push(ONES).outcome == "accepted"

    def test_a_commit_of_nothing_is_refused(self, serve: Callable[..., ShardServers]) -> None:
        with serve() as servers, servers.worker("a") as worker:
            [connection] = connections(worker)
            with pytest.raises(errors.NotStaged):
                connection.commit(pb.CommitRequest(stamp=stamp(), shards=connection.indices))

    def test_assignment(self, serve: Callable[..., ShardServers]) -> None:
        with serve() as servers, servers.client() as client:
            client.assign({"w": VARIABLES["w"] * 2})
            check_same(client.pull(), {**VARIABLES, "w": VARIABLES["w"] * 2})
            with servers.worker("a") as worker:
                worker.push(ONES)
            with pytest.raises(errors.BadRequest):
                client.assign(VARIABLES)

    def test_memory_for_a_load(self, serve: Callable[..., ShardServers]) -> None:
        """The arrays may change once the load is ready. The transport writes a lent load in place."""
        with serve() as servers, servers.worker("a") as worker:
            arrays = {name: array.copy() for name, array in ONES.items()}
            push = worker.prepare(arrays, None, 1.0, memory=memory)
            for array in arrays.values():
                array[:] = 7
            assert worker.send(push).outcome == "accepted"
            buffers = worker.buffers(memory)
            for array in buffers.values():
                array[...] = 1
            assert worker.push(buffers).outcome == "accepted"
            check_same(worker.pull(), {name: array - 2 for name, array in VARIABLES.items()})

    def test_memory_of_a_transport_that_broke(self, serve: Callable[..., ShardServers]) -> None:
        with serve() as servers, servers.worker("a") as worker:
            arrays = {name: array.copy() for name, array in ONES.items()}
            push = worker.prepare(arrays, None, 1.0, memory=memory)
            transport = connections(worker)[0].push_transport
            assert transport
            transport.close()
            assert worker.send(push).outcome == "accepted"
            check_same(worker.pull(), {name: array - 1 for name, array in VARIABLES.items()})

    def test_gradients_one_by_one(self, serve: Callable[..., ShardServers]) -> None:
        with serve() as servers, servers.worker("a") as worker, ThreadPoolExecutor(1) as pool:
            push = worker.begin(None, 1.0)
            sent = pool.submit(worker.send, push)
            worker.feed(push, ONES.items())
            assert sent.result(20).outcome == "accepted"
            assert servers.versions() == [1, 1]


class TestPermits:
    """A synchronous step of more workers than permits: gradients wait in the memory of their workers."""

    LARGE: ClassVar = {"w": np.zeros((1 << 18) + 1, np.float32)}
    LIMITS = PermitLimits(workers=2, permits=2)

    def serve(
        self, serve: Callable[..., ShardServers], monkeypatch: pytest.MonkeyPatch, **options: Any
    ) -> ShardServers:
        monkeypatch.setattr(SynchronousMode, "permit_limits", lambda _mode, _nbytes: self.LIMITS)
        return serve(self.LARGE, shards=1, mode=consistency.Synchronous(), **options)

    def gradient(self, rank: int) -> dict[str, np.ndarray]:
        return {"w": np.random.default_rng(rank).standard_normal(self.LARGE["w"].size, np.float32)}

    def waits(self, servers: ShardServers, count: int) -> None:
        wait_until(lambda: servers.stores[0].queues()[2] == count, what=f"{count} pushes that wait")

    def test_rank_0_is_last(self, serve: Callable[..., ShardServers], monkeypatch: pytest.MonkeyPatch) -> None:
        results = []
        for last in (6, 0):
            with self.serve(serve, monkeypatch) as servers, ExitStack() as stack:
                workers = [stack.enter_context(servers.worker(f"w{rank}")) for rank in range(7)]
                pool = stack.enter_context(ThreadPoolExecutor(7))
                if last:
                    for rank in range(7):
                        workers[rank].push(self.gradient(rank))
                else:
                    pushed = [pool.submit(workers[rank].push, self.gradient(rank)) for rank in range(6, 0, -1)]
                    self.waits(servers, 6)  # more than the server has threads for pushes by gRPC
                    assert workers[0].push(self.gradient(0)).outcome == "accepted"
                    assert {each.result(20).outcome for each in pushed} == {"accepted"}
                assert servers.versions() == [1]
                results += [worker.pull() for worker in workers]  # the same transport takes further calls
        for values in results[1:]:
            check_same(values, results[0])

    def test_a_worker_that_leaves_while_it_waits(
        self, serve: Callable[..., ShardServers], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with self.serve(serve, monkeypatch) as servers, ExitStack() as stack:
            workers = [stack.enter_context(servers.worker(f"w{rank}")) for rank in range(4)]
            pool = stack.enter_context(ThreadPoolExecutor(4))
            leaves, stays = (pool.submit(workers[rank].push, self.gradient(rank)) for rank in (3, 2))
            self.waits(servers, 2)
            workers[3].close()
            servers.remove("w3")
            with pytest.raises(errors.ShoalError):
                leaves.result(20)
            self.waits(servers, 1)
            for rank in (0, 1):
                assert workers[rank].push(self.gradient(rank)).outcome == "accepted"
            assert stays.result(20).outcome == "accepted"
            assert servers.versions() == [1]

    def test_a_wait_longer_than_a_deadline(
        self, serve: Callable[..., ShardServers], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A gRPC call has a deadline, so it is repeated before that. On other transports, the call goes on waiting."""
        with self.serve(serve, monkeypatch, stall_s=0.0) as servers, ExitStack() as stack:
            workers = [stack.enter_context(servers.worker(f"w{rank}")) for rank in range(3)]
            pool = stack.enter_context(ThreadPoolExecutor(2))
            pushed = [pool.submit(workers[rank].push, self.gradient(rank)) for rank in (2, 1)]
            self.waits(servers, 2)
            servers.endpoints[0].end_stalled()
            self.waits(servers, 2)
            assert workers[0].push(self.gradient(0)).outcome == "accepted"
            assert {each.result(20).outcome for each in pushed} == {"accepted"}
            assert servers.versions() == [1]

    def test_a_job_that_ends_while_pushes_wait(
        self, serve: Callable[..., ShardServers], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with self.serve(serve, monkeypatch) as servers, ExitStack() as stack:
            workers = [stack.enter_context(servers.worker(f"w{rank}")) for rank in range(4)]
            pool = stack.enter_context(ThreadPoolExecutor(4))
            pushed = [pool.submit(workers[rank].push, self.gradient(rank)) for rank in (3, 2)]
            self.waits(servers, 2)
            servers.stores[0].drop("job")
            for each in pushed:
                with pytest.raises(errors.UnknownJob):
                    each.result(20)


class TestEnds:
    def test_a_client_that_closes_while_a_call_waits(self, serve: Callable[..., ShardServers]) -> None:
        with (
            serve(mode=consistency.Synchronous()) as servers,
            servers.worker("a") as a,
            servers.worker("b") as b,
            ThreadPoolExecutor(1) as pool,
        ):
            a.push(ONES)
            pulled = pool.submit(a.pull)
            wait_until(lambda: servers.waiting() == 1, what="the pull's wait")
            a.close()
            with pytest.raises(errors.Cancelled):
                pulled.result(20)
            wait_until(lambda: servers.waiting() == 0, what="the end of its place")
            b.pull()

    def test_a_closed_connection_takes_no_calls(self, serve: Callable[..., ShardServers]) -> None:
        with serve() as servers:
            worker = servers.worker("a")
            worker.pull()
            worker.close()
            with pytest.raises(errors.Cancelled):
                connections(worker)[0].pull(pull_request(connections(worker)[0]), None)

    def test_a_server_that_is_gone(self, serve: Callable[..., ShardServers]) -> None:
        servers = serve()
        with servers.worker("a") as worker:
            worker.pull()
            worker.push(ONES)
            servers.close()
            [connection] = connections(worker)
            for call in (
                lambda: connection.pull(pull_request(connection, headers_only=True), None),
                lambda: connection.commit(pb.CommitRequest(stamp=stamp(), shards=connection.indices)),
            ):
                with pytest.raises(errors.Unreachable):
                    call()

    def test_broken_transport_is_opened_again(self, serve: Callable[..., ShardServers], way: Way) -> None:
        with serve() as servers, servers.worker("a") as worker:
            for _ in range(3):
                worker.pull()
                worker.push(ONES)
                for transport in (connections(worker)[0].pull_transport, connections(worker)[0].push_transport):
                    assert transport
                    transport.close()
            worker.pull()
            assert type(connections(worker)[0].pull_transport) is way.kind
            assert servers.versions() == [3, 3]

    def test_an_answer_that_does_not_come_in_time(
        self, serve: Callable[..., ShardServers], way: Way, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with serve() as servers, servers.worker("a") as worker:
            [connection] = connections(worker)
            request = pb.CommitRequest(stamp=stamp(), shards=connection.indices)
            connection.push(header(connection, commit=False), load(worker, connection, ONES))
            go_on, commit = threading.Event(), DataService.commit
            with monkeypatch.context() as patch:
                patch.setattr(DataService, "commit", lambda *given: go_on.wait(20) and commit(*given))
                patch.setattr(*way.deadline, 0.2)
                with pytest.raises(errors.DeadlineExceeded):
                    connection.commit(request)
            go_on.set()
            answer = connection.commit(request)
            assert {it.outcome for it in answer.shards} == {pb.ACCEPTED}
            assert servers.versions() == [1, 1]


def test_the_transport_in_one_file_comes_in_by_the_doors() -> None:
    """A new transport needs only the public names of packages."""
    imported = []
    for node in ast.walk(ast.parse(Path(memory_transport.__file__).read_text())):
        if isinstance(node, ast.ImportFrom):
            imported += [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            imported += [(alias.name, "") for alias in node.names]
    ours = [(module, name) for module, name in imported if module.partition(".")[0].startswith("shoal")]
    assert ours
    for module, name in ours:
        assert module in PUBLIC
        offered = importlib.import_module(module)
        is_public = f"{module}.{name}" in PUBLIC
        assert is_public or name in getattr(offered, "__all__", ()) or module == "shoal.v1", (
            f"{module} offers no {name}"
        )
