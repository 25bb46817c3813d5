"""Parameter server: which requests it applies, which it refuses, and that a refused request changes nothing.

Each test runs over gRPC, over lanes on TCP, and over lanes with shared memory. `test_lanes` tests what only lanes have.
"""

import itertools
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
from numpy.random import Generator
from structlog.testing import capture_logs

import shoal
from shoal import _rpc, consistency, errors, initializers, optim, partitioners
from shoal._training import ParameterClient
from shoal._training.parameters import Push, PushResult
from shoal._transport import STALL_S, shared_memory
from shoal._transport.frames import Frame
from shoal._wire.layout import Aggregation, ShardLayout
from shoal._wire.limits import MAX_MESSAGE_BYTES
from shoal._wire.packing import CompleteArrays, Packer
from shoal._wire.slabs import CallLayout
from shoal.v1 import header_pb2, tensor_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal.variables import Variable
from shoal_server.serving import grpc_endpoint
from shoal_server.serving.pending_push import PendingPush
from shoal_server.shards import JobShardConfig
from shoal_server.shards.machine.consistency import SynchronousMode
from shoal_server.shards.machine.mode import PermitLimits
from shoal_server.shards.values.stored_slab import StoredSlab
from support.clusters.shard_servers import ShardServers
from support.waiting import wait_until

VARIABLES = {
    "w": Variable((40, 3), initializer=initializers.Normal(0.0, 1.0), partitioner=partitioners.FixedShards(3)),
    "b": Variable((5,), initializer=initializers.Ones()),
    "scale": Variable((), dtype="float64", initializer=initializers.Constant(2.0)),
}

# Cut in two; on two shards each of them has an arena a dtype.
CROSSED = {
    "single": Variable((100,), partitioner=partitioners.FixedShards(2)),
    "double": Variable((100,), dtype="float64", partitioner=partitioners.FixedShards(2)),
}


def gradients(value: float = 1.0) -> dict[str, np.ndarray]:
    return {
        name: np.full(variable.shape, value, variable.dtype)
        for name, variable in VARIABLES.items()
        if variable.aggregation is Aggregation.TRAINABLE
    }


@pytest.fixture(params=["grpc", "tcp", "shared memory"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yields the transport that all clients must use. A client that used another one would log it."""
    use(request.param, monkeypatch)
    with capture_logs() as logs:
        yield request.param
    assert [entry for entry in logs if "no lane" in entry["event"] or "no memory" in entry["event"]] == []


def use(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TRANSPORT", "auto" if transport == "shared memory" else transport)
    if transport == "shared memory":  # of variables however small
        monkeypatch.setattr(shared_memory, "SHARED_FROM_BYTES", 0)


@pytest.fixture(params=[1, 3], ids=["one server", "three servers"])
def servers(request: pytest.FixtureRequest) -> Iterator[ShardServers]:
    with ShardServers(VARIABLES, servers=request.param, shards=5) as servers:
        yield servers


Messages = Iterable[bytes | pb.PushRequest]
RawPush = Callable[[ShardServers, Messages], pb.PushReply]


@pytest.fixture(params=["grpc", "lane"])
def push(
    request: pytest.FixtureRequest,
) -> RawPush:
    """Sends a hand-made push, of messages or their bytes, to a job's first server."""
    return push_by_grpc if request.param == "grpc" else push_by_lane


def push_by_grpc(servers: ShardServers, messages: Messages) -> pb.PushReply:
    address = servers.placement.shards[0].address
    with grpc.insecure_channel(address) as channel, _rpc.as_shoal_errors(address):
        call = channel.stream_unary("/shoal.v1.ParameterServer/Push", encoded, pb.PushReply.FromString)
        return call(iter(messages))


def push_by_lane(servers: ShardServers, messages: Messages) -> pb.PushReply:
    with servers.lane() as lane:
        return lane.push(map(encoded, messages))


@pytest.mark.usefixtures("transport")
class TestTransports:
    def test_calls_take_the_way_that_they_should(self, servers: ShardServers, transport: str) -> None:
        """Without this check, the tests that run once for each transport would prove nothing."""
        with servers.worker("a") as worker:
            value = worker.pull()["b"]
            assert servers.open_lanes == (0 if transport == "grpc" else len(worker.servers.connections))
            assert in_shared_memory(value) == (transport == "shared memory")
            loads = [
                link.prepare(worker.servers.payload(link, CompleteArrays(gradients()), list(Aggregation)), None)
                for link in worker.servers.connections
            ]
            assert [bool(load.region) for load in loads] == [transport == "shared memory"] * len(loads)
            assert servers.open_lanes == (0 if transport == "grpc" else 2 * len(worker.servers.connections))
            worker.push(gradients())
        wait_until(lambda: servers.open_lanes == 0, what="the lanes' end")


@pytest.mark.usefixtures("transport")
class TestValues:
    def test_initial_values_do_not_depend_on_shards_or_servers(self) -> None:
        with ShardServers(VARIABLES, servers=1, shards=1, seed=7) as one:
            expected = one.values()
        with ShardServers(VARIABLES, servers=3, shards=6, seed=7) as many:
            values = many.values()
        for name, variable in VARIABLES.items():
            np.testing.assert_array_equal(values[name], expected[name])
            assert values[name].dtype == variable.dtype
        assert values["w"].std() == pytest.approx(1.0, abs=0.3)

    def test_a_push_is_applied_to_every_variable(self, servers: ShardServers) -> None:
        before = servers.values()
        with servers.worker("a") as worker:
            worker.pull()
            result = worker.push(gradients(0.5))
        assert result == PushResult("accepted", 0, 1)
        after = servers.values()
        for name in VARIABLES:
            np.testing.assert_allclose(after[name], before[name] - 0.5, rtol=1e-6)

    def test_given_values_are_assigned_whole(self) -> None:
        given = {"x": np.arange(12.0).reshape(4, 3), "n": np.array(3, np.float32)}
        with ShardServers(given, servers=2, shards=2) as servers:
            values = servers.values()
            np.testing.assert_array_equal(values["x"], given["x"])
            np.testing.assert_array_equal(values["n"], given["n"])
            with servers.worker("a") as worker, servers.client() as client:
                client.assign(given)  # again, and beside a worker that has not begun: harmless
                worker.pull()
                with pytest.raises(errors.BadRequest, match="training has begun"):
                    client.assign(given)

    @pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
    def test_half_precision_travels_as_half_and_adds_up_as_float32(self, dtype: type[np.generic]) -> None:
        variables = {"h": Variable((8,), dtype=dtype, initializer=initializers.Ones())}
        with ShardServers(variables, shards=1, optimizer=optim.SGD(2.0**-12)) as servers, servers.worker("a") as worker:
            for _ in range(64):
                worker.push({"h": np.ones(8, dtype)})
            value = servers.values()["h"]
        assert value.dtype == dtype
        # Each step alone would vanish in half precision's rounding next to 1; 64 of them do not.
        np.testing.assert_array_equal(value.astype(np.float32), np.float32(1 - 64 * 2.0**-12).astype(dtype))

    def test_variables_larger_than_a_message_travel_in_chunks(self) -> None:
        variables = {"big": Variable((3_000_001,), initializer=initializers.Uniform(-1, 1))}
        with ShardServers(variables, shards=1) as servers, servers.worker("a") as worker:
            before = worker.pull()["big"]
            worker.push({"big": before})
            assert not servers.values()["big"].any()

    def test_a_large_variable_is_not_copied_on_its_way_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """If no update comes during a pull, the server allocates no memory for it."""
        variables = {"big": Variable((16 << 20,), initializer=initializers.Ones())}  # 64 MB
        with ShardServers(variables, shards=1) as servers, servers.worker("a") as worker:
            monkeypatch.setattr(servers.stores[0].memory, "take", lambda nbytes: pytest.fail("the server copies"))
            big = worker.pull()["big"]
            assert big.nbytes == 64 << 20
            assert (big == 1).all()

    def test_non_trainable_variables_are_aggregated_as_they_ask(self) -> None:
        variables = {
            "w": Variable((2,)),
            "mean": Variable((2,), trainable=False, aggregation="mean"),
            "count": Variable((), dtype="int64", trainable=False, aggregation="sum"),
            "last": Variable((2,), trainable=False, aggregation="last"),
        }
        with (
            ShardServers(variables, servers=2, shards=3, mode=consistency.Synchronous()) as servers,
            servers.worker("a") as a,
            servers.worker("b") as b,
        ):
            for worker, value in ((b, 4.0), (a, 1.0)):  # ranks: a before b, in any order of arrival
                full = np.full(2, value, np.float32)
                updates = {"mean": full, "count": np.array(int(value)), "last": full}
                worker.push({"w": np.zeros(2, np.float32)}, updates=updates, weight=value)
            values = servers.values()
        np.testing.assert_allclose(values["mean"], (4 * 4.0 + 1 * 1.0) / 5)
        assert values["count"] == 5
        np.testing.assert_array_equal(values["last"], [4.0, 4.0])

    def test_variables_without_updates_are_not_sent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        variables = {
            "w": Variable((2,)),
            "mean": Variable((2,), trainable=False, aggregation="mean"),
            "last": Variable((3,), trainable=False, aggregation="last"),
            "other": Variable((4,), trainable=False, aggregation="last"),
        }
        arrived = []
        apply = StoredSlab.apply

        def noted(stored: StoredSlab, *given: Any, **more: Any) -> None:
            arrived.append(stored.slab)
            apply(stored, *given, **more)

        monkeypatch.setattr(StoredSlab, "apply", noted)
        with ShardServers(variables, servers=2, shards=2) as servers, servers.worker("a") as worker:
            updates = {"mean": np.ones(2, np.float32)}
            worker.push({"w": np.zeros(2, np.float32)}, updates=updates)
            assert {slab.aggregation for slab in arrived} == {Aggregation.TRAINABLE, Aggregation.MEAN}
            np.testing.assert_array_equal(servers.values()["mean"], [1, 1])
            with pytest.raises(errors.InvalidGradient, match="'other' is missing"):
                worker.push({"w": np.zeros(2, np.float32)}, updates={**updates, "last": np.ones(3, np.float32)})


class TestBits:
    """The transport changes no bit of the result."""

    DTYPES = ("float32", "float64", "float16", "bfloat16")
    STEPS = 5

    @pytest.mark.parametrize("wire", [None, "bfloat16"])
    def test_a_synchronous_run_is_the_same_on_every_transport(
        self, wire: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runs = []
        for transport in ("grpc", "tcp", "shared memory"):
            use(transport, monkeypatch)
            # Who is first differs from run to run; sums are made in order of rank.
            runs.append(self.check_run(wire, reverse=transport == "tcp"))
        assert runs[0] == runs[1]
        assert runs[0] == runs[2]

    def check_run(self, wire: str | None, *, reverse: bool) -> list[bytes]:
        """Returns all bits that were pulled, in each step and at the end."""
        random = np.random.default_rng(11)
        variables = self.variables(random)
        seen = []
        with ShardServers(
            variables, servers=2, shards=3, mode=consistency.Synchronous(), optimizer=optim.Adam(0.01), wire=wire
        ) as servers:
            workers = [servers.worker("a"), servers.worker("b")]
            for _ in range(self.STEPS):
                pulled = [worker.pull() for worker in workers]
                seen += [bits(values) for values in pulled]
                assert seen[-1] == seen[-2]
                pushes = [
                    (worker, self.gradients(variables, random), self.updates(variables, random), weight)
                    for worker, weight in zip(workers, (7.0, 3.0), strict=True)  # uneven batches
                ]
                for worker, gradients, updates, weight in reversed(pushes) if reverse else pushes:
                    assert worker.push(gradients, updates=updates, weight=weight).outcome == "accepted"
            seen.append(bits(servers.values()))
            for worker in workers:
                worker.close()
        assert len({*seen}) == self.STEPS + 1  # something happened
        return seen

    def variables(self, random: Generator) -> dict[str, Variable]:
        cut = partitioners.FixedShards(3)
        made = {
            dtype: Variable((301, 7), dtype=dtype, initializer=initializers.Normal(), partitioner=cut)
            for dtype in self.DTYPES
        }
        return made | {
            "whole": Variable((300_001,), initializer=initializers.Uniform(-1, 1)),  # more than a chunk
            "mean": Variable((50,), dtype="float64", trainable=False, aggregation="mean"),
            "count": Variable((), dtype="int64", trainable=False, aggregation="sum"),
            "last": Variable((9,), trainable=False, aggregation="last"),
        }

    def gradients(self, variables: Mapping[str, Variable], random: Generator) -> dict[str, np.ndarray]:
        return self.drawn(variables, random, trainable=True)

    def updates(self, variables: Mapping[str, Variable], random: Generator) -> dict[str, np.ndarray]:
        return self.drawn(variables, random, trainable=False)

    def drawn(self, variables: Mapping[str, Variable], random: Generator, *, trainable: bool) -> dict[str, np.ndarray]:
        return {
            name: (10 * random.standard_normal(variable.shape)).astype(variable.dtype)
            for name, variable in variables.items()
            if (variable.aggregation is Aggregation.TRAINABLE) is trainable
        }


@pytest.mark.usefixtures("transport")
class TestBadGradients:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda g: g.pop("b"), "'b' is missing"),
            (lambda g: g.update(x=g["b"]), "'x' is"),
            (lambda g: g.update(b=np.zeros((6,), np.float32)), r"'b' has shape \(6,\), not \(5,\)"),
            (lambda g: g.update(b=g["b"].astype(np.float64)), "'b' is float64: cast it to float32"),
        ],
        ids=["missing", "unexpected", "shape", "dtype"],
    )
    def test_a_gradient_of_wrong_name_shape_or_dtype(
        self, servers: ShardServers, change: Callable[..., Any], message: str
    ) -> None:
        wrong = gradients()
        change(wrong)
        with servers.worker("a") as worker:
            with pytest.raises(errors.InvalidGradient, match=message):
                worker.push(wrong)
            assert not any(servers.versions())
            assert worker.push(gradients()).outcome == "accepted"

    @pytest.mark.parametrize("name", VARIABLES)
    def test_nan_and_inf_are_rejected_on_every_shard_and_counted(self, servers: ShardServers, name: str) -> None:
        before = servers.values()
        with servers.worker("a") as worker:
            for count, poison in enumerate((np.nan, np.inf, -np.inf), start=1):
                bad = gradients()
                bad[name].reshape(-1)[-1] = poison
                with pytest.raises(errors.NonFiniteGradient, match=f"'{name}' contains {poison}"):
                    worker.push(bad)
                for variable, value in servers.values().items():
                    np.testing.assert_array_equal(value, before[variable])
                assert servers.sample("shoal_server_rejected_pushes_total", reason="non_finite_gradient") == count
            assert worker.push(gradients()).outcome == "accepted"
        assert set(servers.versions()) == {1}

    def test_a_rejected_step_can_be_skipped(self, servers: ShardServers) -> None:
        with servers.worker("a") as worker:
            with pytest.raises(errors.NonFiniteGradient):
                worker.push(gradients(np.nan))
            assert worker.skip().outcome == "skipped"
            assert worker.step == 1
        assert not any(servers.versions())

    def test_an_old_placement_is_refused_and_fetched_again(self, servers: ShardServers) -> None:
        with servers.worker("a") as worker:
            worker.servers.groups.placement = worker.servers.placement.__class__(
                "job", 0, servers.placement.variables, servers.placement.shards
            )
            assert worker.push(gradients()).outcome == "accepted"

    def test_a_reader_may_not_push(self, servers: ShardServers) -> None:
        with servers.client() as reader, pytest.raises(errors.Fenced):
            reader.push(gradients())


class TestBadMessages:
    """Hand-made invalid messages, which Shoal's own clients never send, by gRPC and over a lane."""

    @pytest.fixture
    def servers(self) -> Iterator[ShardServers]:
        with ShardServers(VARIABLES, shards=5) as servers:
            yield servers

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda chunks: chunks[:-1],
            lambda chunks: chunks[1:],
            lambda chunks: [],
            lambda chunks: [*chunks, chunks[-1]],
            lambda chunks: [chunks[0], pb.Chunk(shard=0, arena=0, offset=chunks[1].offset - 4, data=chunks[1].data)],
            lambda chunks: [*chunks[:-1], pb.Chunk(shard=0, arena=0, offset=chunks[-1].offset)],
            lambda chunks: [*chunks[:-1], pb.Chunk(shard=0, arena=0, offset=chunks[-1].offset, data=b"\0" * 7)],
            lambda chunks: [pb.Chunk(shard=0, arena=9, data=b"\0" * 4)],
            lambda chunks: [pb.Chunk(shard=5, arena=0, data=b"\0" * 4)],
            lambda chunks: [pb.Chunk(shard=0, arena=0, offset=2**62, data=b"\0" * 4)],
        ],
        ids=[
            "truncated",
            "headless",
            "none",
            "repeated",
            "overlapping",
            "empty",
            "split element",
            "no arena",
            "no shard",
            "far offset",
        ],
    )
    def test_chunks_that_do_not_fill_the_arena_exactly(
        self,
        push: RawPush,
        spoil: Callable[..., Any],
    ) -> None:
        with ShardServers({"w": Variable((400_000,))}, shards=1) as servers, servers.worker("a") as worker:
            packer = Packer(servers.placement)
            (layout,) = packer.groups.values()
            arrays = {"w": np.ones(400_000, np.float32)}
            whole = packer.chunks(layout, CompleteArrays(arrays), [Aggregation.TRAINABLE])
            chunks = spoil([pb.Chunk(shard=0, arena=0, offset=c.offset, data=bytes(c.data)) for c in whole])
            messages = [pb.PushRequest(header=header(servers, "a"))] + [pb.PushRequest(chunks=[c]) for c in chunks]
            with pytest.raises(errors.BadChunk, match="shard"):
                push(servers, messages)
            assert servers.versions() == [0]
            assert not worker.pull()["w"].any()
            assert worker.push(arrays).outcome == "accepted"

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda chunk: b"\x12" + varint(len(chunk) + 1) + chunk,
            lambda chunk: b"\x12" + varint(2**63) + chunk,
            lambda chunk: b"\x12" + b"\xff" * 10 + chunk,
            lambda chunk: b"\x12" + b"\x80",
            lambda chunk: b"\x12" + varint(4) + b"\x22" + varint(3) + b"\0\0",
            lambda chunk: b"\x12" + varint(3) + b"\x22\xff\xff" + chunk,
            lambda chunk: b"\x0a" + varint(10**6) + chunk,
        ],
        ids=[
            "past the end",
            "far past the end",
            "no number",
            "cut off",
            "data past their chunk",
            "data without an end",
            "a header past the end",
        ],
    )
    def test_a_length_that_lies_inside_a_message(
        self,
        push: RawPush,
        spoil: Callable[..., Any],
    ) -> None:
        with ShardServers({"w": Variable((5,))}, shards=1) as servers, servers.worker("a") as worker:
            chunk = pb.Chunk(data=np.ones(5, np.float32).tobytes()).SerializeToString()
            for messages in ([pb.PushRequest(header=header(servers, "a")), spoil(chunk)], [spoil(chunk)]):
                with pytest.raises(errors.BadChunk, match="malformed at byte"):
                    push(servers, messages)
            assert servers.versions() == [0]
            assert not worker.pull()["w"].any()
            assert worker.push({"w": np.ones(5, np.float32)}).outcome == "accepted"

    @pytest.mark.parametrize("chunks_a_message", [1, 7, 10_000])
    def test_chunks_may_come_in_any_order(
        self,
        push: RawPush,
        chunks_a_message: int,
    ) -> None:
        """Two shards of two arenas each on one server, all in chunks of 3 elements, shuffled."""
        with ShardServers(CROSSED, shards=2) as servers, servers.worker("a") as worker:
            assert [len(shard.layout.arenas) for shard in servers.placement.shards] == [2, 2]
            before = servers.values()
            grads = {name: np.arange(v.shape[0], dtype=v.dtype) for name, v in CROSSED.items()}
            dealt = deal(small_chunks(servers, grads, elements=3))
            random.Random(1).shuffle(dealt)
            reply = push(servers, push_of(servers, "a", dealt, chunks_a_message))
            assert {answer.outcome for answer in reply.shards} == {pb.ACCEPTED}
            for name, value in servers.values().items():
                np.testing.assert_array_equal(value, before[name] - grads[name])
            assert worker.step == 0  # it pushed by other means than its client

    def test_a_message_of_many_small_chunks(self, push: RawPush) -> None:
        """Each chunk has one element, so the framing is many times larger than the data."""
        with ShardServers({"w": Variable((5_000,))}, shards=1) as servers, servers.worker("a"):
            grads = {"w": np.arange(5_000, dtype=np.float32)}
            chunks = small_chunks(servers, grads, elements=1)[0]
            push(servers, push_of(servers, "a", chunks, 2_500))
            np.testing.assert_array_equal(servers.values()["w"], -grads["w"])

    def test_an_oversized_message(self, servers: ShardServers) -> None:
        """This test uses gRPC. `test_lanes` tests a frame that is too large."""
        with servers.worker("a") as worker:
            chunk = pb.Chunk(shard=0, arena=0, data=bytes(MAX_MESSAGE_BYTES + 1))
            with pytest.raises(errors.MessageTooLarge, match="larger than max"):
                push_by_grpc(servers, [pb.PushRequest(header=header(servers, "a"), chunks=[chunk])])
            assert worker.push(gradients()).outcome == "accepted"

    @pytest.mark.parametrize("messages", [[pb.PushRequest()], [b""], [pb.PushRequest(chunks=[pb.Chunk()])]])
    def test_a_push_without_a_header(
        self,
        servers: ShardServers,
        push: RawPush,
        messages: Sequence[bytes | pb.PushRequest],
    ) -> None:
        with pytest.raises(errors.BadRequest, match="has no header"):
            push(servers, messages)
        assert not any(servers.versions())

    def test_a_push_with_two_headers(
        self,
        servers: ShardServers,
        push: RawPush,
    ) -> None:
        with servers.worker("a"):
            message = pb.PushRequest(header=header(servers, "a"))
            with pytest.raises(errors.BadRequest, match="one header"):
                push(servers, [message, message])
        assert not any(servers.versions())

    @pytest.mark.parametrize(
        ("change", "error"),
        [
            ({"versions": []}, "carries 0 versions"),
            ({"weight": -1.0}, "weight of a push is -1"),
            ({"weight": float("inf")}, "weight of a push is inf"),
            ({"weight": float("nan")}, "weight of a push is nan"),
            ({"aggregations": [99]}, "an unknown aggregation"),
            ({"shards": []}, "at least one"),
        ],
        ids=["no versions", "negative", "infinite", "no number", "aggregation", "no shards"],
    )
    def test_a_header_that_makes_no_sense(
        self,
        servers: ShardServers,
        push: RawPush,
        change: dict[str, Any],
        error: str,
    ) -> None:
        with servers.worker("a") as worker:
            message = header(servers, "a")
            for name, value in change.items():
                message.ClearField(name)  # type: ignore[arg-type]  # one of its fields
                message.MergeFrom(pb.PushHeader(**{name: value}))
            with pytest.raises(errors.BadRequest, match=error):
                push(servers, [pb.PushRequest(header=message)])
            assert not any(servers.versions())
            assert worker.push(gradients()).outcome == "accepted"

    @pytest.mark.parametrize("way", ["grpc", "lane"])
    @pytest.mark.parametrize(
        ("stamp", "asked", "error"),
        [
            ({"job": "nope"}, {}, errors.UnknownJob),
            ({"generation": 2}, {}, errors.StaleGeneration),
            ({"worker": "x"}, {}, errors.Fenced),
            ({}, {"shards": [99]}, errors.UnknownShard),
            ({}, {"shards": []}, errors.BadRequest),
            ({}, {"shards": [0, 0]}, errors.BadRequest),
            ({}, {"ahead": 2}, errors.BadRequest),
        ],
        ids=["job", "generation", "stranger", "shard", "no shards", "a shard twice", "too far ahead"],
    )
    def test_a_pull_that_makes_no_sense(
        self,
        way: str,
        stamp: dict[str, Any],
        asked: dict[str, Any],
        error: type[shoal.ShoalError],
    ) -> None:
        with ShardServers(VARIABLES) as servers, servers.worker("a") as worker:
            ours: dict[str, Any] = {"job": "job", "worker": "a", "incarnation": 1, "generation": 1}
            said = header_pb2.Stamp(**ours | stamp)
            everything = {"shards": [it.layout.shard for it in servers.placement.shards]}
            with pytest.raises(error):
                pull_by(way, servers, pb.PullRequest(stamp=said, **(everything | asked)))
            assert worker.push(gradients()).outcome == "accepted"

    def test_a_push_of_another_generation(
        self,
        servers: ShardServers,
        push: RawPush,
    ) -> None:
        with servers.worker("a"):
            stale = header(servers, "a")
            stale.stamp.generation = 9
            with pytest.raises(errors.StaleGeneration, match="generation 1 on this server, but the request has 9"):
                push(servers, [pb.PushRequest(header=stale)])


@pytest.mark.usefixtures("transport")
class TestWholeOrNotAtAll:
    def test_a_push_that_breaks_off_leaves_no_trace(self, servers: ShardServers, transport: str) -> None:
        """The worker dies during a push: one server has its whole part, another some chunks, a third nothing."""
        before = servers.values()
        servers.admit("a")
        client = servers.client("a")
        push = push_by(client, gradients())
        for place, link in enumerate(client.servers.connections):
            header, load = client.pusher.header(link, push, commit=False), push.payload_for(link)
            if place == 0 and len(client.servers.connections) > 1:
                link.push(header, load)  # staged whole
            else:
                chunk = next(load.chunks())
                first = pb.Chunk(shard=chunk.shard, arena=chunk.arena, data=bytes(chunk.data[:4]))
                server = servers.addresses.index(link.address)
                break_off(servers, server, pb.PushRequest(header=header, chunks=[first]), lane=transport != "grpc")
        client.close()
        servers.remove("a")
        for name, value in servers.values().items():
            np.testing.assert_array_equal(value, before[name])
        assert not any(servers.versions())

    def test_a_push_that_one_server_has_committed_counts_on_all(self) -> None:
        with ShardServers(VARIABLES, servers=3, shards=5) as servers:
            before = servers.values()
            servers.admit("a")
            client = servers.client("a")
            push = push_by(client, gradients())
            for link in client.servers.connections:
                link.push(client.pusher.header(link, push, commit=False), push.payload_for(link))
            first = client.servers.connections[0]
            first.commit(pb.CommitRequest(stamp=client.servers.stamp(0), shards=first.indices))
            client.close()  # dies between the commits
            servers.remove("a")
            assert set(servers.versions()) == {1}
            for name, value in servers.values().items():
                np.testing.assert_allclose(value, before[name] - 1.0, rtol=1e-6)

    def test_a_repeated_push_counts_once(self, servers: ShardServers) -> None:
        with servers.worker("a") as worker:
            first = worker.push(gradients())
            worker.step = 0
            assert worker.push(gradients(7.0)) == first
        assert set(servers.versions()) == {1}

    def test_commit_without_a_staged_push_is_refused(self, servers: ShardServers) -> None:
        with servers.worker("a") as worker:
            for link in worker.servers.connections:
                with pytest.raises(errors.NotStaged):
                    link.commit(pb.CommitRequest(stamp=worker.servers.stamp(0), shards=link.indices))
            assert worker.push(gradients()).outcome == "accepted"
        assert set(servers.versions()) == {1}


@pytest.mark.usefixtures("transport")
class TestWaiting:
    def test_many_waiting_pulls_do_not_delay_other_calls(self, transport: str) -> None:
        """Two threads serve 200 waiting pulls. The pushes that they wait for are applied, and all pulls are answered.

        On lanes, each call has its client's own thread, so fewer pulls are enough.
        """
        count = 200 if transport == "grpc" else 40
        mode = consistency.Synchronous()
        with ShardServers({"w": Variable((1000,))}, shards=1, mode=mode, rpc_threads=2) as servers:
            *clients, last = [servers.worker(f"w{index}") for index in range(count + 1)]
            grads = {"w": np.ones(1000, np.float32)}
            with ThreadPoolExecutor(count) as pool:
                for client in clients:
                    client.push(grads)
                pulls = [pool.submit(client.pull) for client in clients]
                wait_until(lambda: servers.waiting() == count, what="all waiting pulls")
                assert last.push(grads).outcome == "accepted"
                done, _ = wait(pulls, timeout=30)
                assert len(done) == count
                for pull in done:
                    np.testing.assert_allclose(pull.result()["w"], -1.0)
            for client in [*clients, last]:
                client.close()

    def test_a_barrier_waits_as_a_pull_does(self, servers: ShardServers) -> None:
        with (
            ShardServers(VARIABLES, servers=2, mode=consistency.BoundedStaleness(0)) as servers,
            servers.worker("a") as a,
            servers.worker("b") as b,
            ThreadPoolExecutor(1) as pool,
        ):
            a.push(gradients())
            waiting = pool.submit(a.barrier)
            wait_until(lambda: servers.waiting() > 0, what="the barrier's wait")
            b.push(gradients())
            waiting.result(timeout=20)

    def test_a_pull_abandoned_by_its_caller_is_forgotten(self) -> None:
        """The server has already answered for one of its two shards."""
        with ShardServers({"w": Variable((3,)), "v": Variable((3,))}, mode=consistency.Synchronous()) as servers:
            a, b = servers.worker("a"), servers.worker("b")
            grads = {name: np.ones(3, np.float32) for name in ("w", "v")}
            a.push(grads)
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(a.pull)
                wait_until(lambda: servers.waiting() == 1)
                a.close()
                with pytest.raises(errors.Cancelled):
                    waiting.result(timeout=20)
                wait_until(lambda: servers.waiting() == 0)
            assert b.push(grads).outcome == "accepted"
            b.close()

    def test_dropping_a_job_ends_its_waiting_pulls(self) -> None:
        with ShardServers({"w": Variable((3,))}, shards=1, mode=consistency.Synchronous()) as servers:
            a, b = servers.worker("a"), servers.worker("b")
            a.push({"w": np.ones(3, np.float32)})
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(a.pull)
                wait_until(lambda: servers.waiting() == 1)
                servers.stubs[0].DropShards(pb.DropShardsRequest(job="job"))
                with pytest.raises(errors.UnknownJob):
                    waiting.result(timeout=20)
            a.close()
            b.close()

    def test_a_dead_workers_pull_is_fenced(self) -> None:
        with ShardServers({"w": Variable((3,))}, shards=1, mode=consistency.Synchronous()) as servers:
            a, b = servers.worker("a"), servers.worker("b")
            a.push({"w": np.ones(3, np.float32)})
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(a.pull)
                wait_until(lambda: servers.waiting() == 1)
                servers.remove("a")
                with pytest.raises(errors.Fenced, match="join the job again"):
                    waiting.result(timeout=20)
            a.close()
            b.close()


class TestStalls:
    """Clients that stall, by gRPC. `test_lanes` tests the same for lanes."""

    def test_caller_that_does_not_read_does_not_delay_others(self) -> None:
        variables = {"w": Variable((2 << 20,))}
        with ShardServers(variables, shards=1, transport="grpc") as servers, servers.worker("a") as worker:
            request = pb.PullRequest(stamp=header_pb2.Stamp(job="job", generation=1), shards=[0])
            call = servers.stubs[0].Pull(request)
            wait_until(lambda: servers.sample("shoal_server_sent_bytes_total") > 0, what="its first bytes")
            grads = {"w": np.ones(2 << 20, np.float32)}
            for step in range(3):  # as it was at the beginning, the server has to keep it for that caller
                assert worker.pull()["w"][-1] == -step
                assert worker.push(grads).outcome == "accepted"
            # Though it was slow, it gets what it began with.
            assert all(not any(chunk.data) for reply in call for chunk in reply.chunks)

    def test_a_push_waits_30_s_for_its_permit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """By the limit of an unchanged configuration. The client repeats the push then, before its deadline."""
        refused: list[float] = []
        times = [0.0]
        refuse = PendingPush.refuse

        def note(push: PendingPush, error: errors.ShoalError) -> None:
            refused.append(times[-1])
            refuse(push, error)

        monkeypatch.setattr(PendingPush, "refuse", note)
        monkeypatch.setattr(SynchronousMode, "permit_limits", lambda _mode, _nbytes: PermitLimits(1, 1))
        mode, variables = consistency.Synchronous(), {"w": Variable((8,))}
        with (
            ShardServers(
                variables, shards=1, mode=mode, stall_s=STALL_S, clock=lambda: times[-1], transport="grpc"
            ) as servers,
            servers.worker("a"),
            servers.worker("b"),
            servers.worker("c"),
        ):
            push = servers.stubs[0].Push.future(iter([pb.PushRequest(header=header(servers, "c"))]))
            wait_until(lambda: servers.stores[0].queues()[2] == 1, what="the push that waits")
            for later in (29.0, 29.99, 30.0):
                assert refused == []
                times.append(later)
                servers.endpoints[0].end_stalled()
            assert refused == [30.0]
            waits = "waits for gradients of lower ranks"
            with pytest.raises(errors.DeadlineExceeded, match=waits), _rpc.as_shoal_errors("server"):
                push.result(timeout=20)

    def test_callers_that_stall_do_not_hold_all_threads_forever(self) -> None:
        """As many callers as there are threads stop reading their pulls and stop sending their pushes."""
        variables = {"w": Variable((2 << 20,))}
        with ShardServers(variables, shards=1, rpc_threads=2, stall_s=0.3, transport="grpc") as servers:
            [stub], [endpoints] = servers.stubs, servers.endpoints
            # The stalled pushes have another worker: a repeated push of a worker that was served gets its answer.
            with servers.worker("a") as worker, servers.worker("b"), ThreadPoolExecutor(2) as pool:
                stamp = header_pb2.Stamp(job="job", generation=1)
                pulls = [stub.Pull(pb.PullRequest(stamp=stamp, shards=[0])) for _ in range(2)]
                forever = threading.Event()
                pushes = [stub.Push.future(until(forever, header(servers, "b"))) for _ in range(2)]
                pulled, pushed = pool.submit(worker.pull), pool.submit(worker.push, {"w": np.ones(2 << 20, np.float32)})

                def served() -> bool:
                    endpoints.end_stalled()
                    return pulled.done() and pushed.done() and all(push.done() for push in pushes)

                wait_until(served, what="their turn")
                assert pulled.result()["w"].size == 2 << 20
                assert pushed.result().outcome == "accepted"
                for call in (lambda: list(pulls[0]), lambda: list(pulls[1]), pushes[0].result, pushes[1].result):
                    with pytest.raises(errors.Unreachable), _rpc.as_shoal_errors("server"):
                        call()
                forever.set()
            assert servers.versions() == [1]

    def test_a_push_of_many_small_messages_has_one_deadline_in_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each message is progress, so no single wait for the next message is long."""
        monkeypatch.setattr(grpc_endpoint, "transfer_s", lambda _: 0.3)
        over, pause = threading.Event(), threading.Event()
        with ShardServers(VARIABLES, shards=1, transport="grpc") as servers:
            [stub], [endpoints] = servers.stubs, servers.endpoints
            servers.admit("a")

            def messages() -> Iterator[pb.PushRequest]:
                yield pb.PushRequest(header=header(servers, "a"))
                while not over.is_set():
                    pause.wait(0.02)
                    yield pb.PushRequest()

            push = stub.Push.future(messages())

            def ended() -> bool:
                endpoints.end_stalled()
                return bool(push.done())

            try:
                wait_until(ended, what="the push's end")
            finally:
                over.set()
            with pytest.raises(errors.Unreachable), _rpc.as_shoal_errors("server"):
                push.result()


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

        def begin(index: int) -> Any:
            return stub.CreateShards.future(pb.CreateShardsRequest(job=f"new{index}", **settings), timeout=20)

        first = begin(0)
        wait_until(lambda: created, what="the first call, because calls may overtake each other")
        *others, abandoned, last = map(begin, range(1, 17))
        wait_until(lambda: servers.sample("shoal_server_queued_calls", pool="creation") == 16, what="all calls")
        worker = [pb.WorkerFence(worker="a", incarnation=1)]
        servers.admit("a")
        fenced = stub.FenceWorkers(pb.FenceWorkersRequest(job="job", workers=worker), timeout=20)
        assert fenced.committed_steps == [0]
        release = [pb.WorkerRelease(worker="a", incarnation=1)]
        stub.ReleaseWorkers(pb.ReleaseWorkersRequest(job="job", workers=release), timeout=20)
        abandoned.cancel()
        stub.DropShards(pb.DropShardsRequest(job="other"), timeout=20)  # the server learns of the end before this call
        assert created == ["new0"]
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


def until(over: threading.Event, header: pb.PushHeader) -> Iterator[pb.PushRequest]:
    """Yields the beginning of a push, and waits for the event before it continues."""
    yield pb.PushRequest(header=header)
    over.wait()


def encoded(message: bytes | pb.PushRequest) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


def varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def bits(values: Mapping[str, np.ndarray]) -> bytes:
    return b"".join(array.tobytes() for array in values.values())


def in_shared_memory(array: np.ndarray) -> bool:
    """Returns whether an array is in a segment, according to the kernel's list of mappings."""
    address = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < last:
            return "/dev/shm/" in line
    raise AssertionError("an array lies nowhere")


def pull_by(way: str, servers: ShardServers, request: pb.PullRequest) -> list[pb.PullReply]:
    if way == "lane":
        with servers.lane() as lane:
            return lane.pull(request)
    with _rpc.as_shoal_errors("server"):
        return list(servers.stubs[0].Pull(request))


def push_by(client: ParameterClient, arrays: Mapping[str, np.ndarray]) -> Push:
    """Returns the push that `client` would send on its links."""
    return client.prepare(arrays, None, 1.0)


def break_off(servers: ShardServers, server: int, message: pb.PushRequest, *, lane: bool) -> None:
    """Sends the beginning of a push, waits until the server has it, and disconnects."""
    metric = "shoal_server_received_bytes_total"
    received = servers.sample(metric)

    def arrives() -> None:
        wait_until(lambda: servers.sample(metric) > received, what="the chunk's arrival")

    if lane:
        with servers.lane(server) as beginning:
            beginning.send(Frame.PUSH, message.SerializeToString())
            arrives()
        return
    dead = threading.Event()

    def until_death() -> Iterator[pb.PushRequest]:
        yield message
        dead.wait()

    call = servers.stubs[server].Push.future(until_death())
    arrives()
    call.cancel()
    dead.set()


def header(servers: ShardServers, worker: str) -> pb.PushHeader:
    client = servers.client(worker)
    try:
        first = client.servers.connections[0]
        nothing: Any = None
        push = Push(client.step, 1.0, {}, lambda _: nothing, [Aggregation.TRAINABLE])
        return client.pusher.header(first, push, commit=True)
    finally:
        client.close()


def small_chunks(servers: ShardServers, arrays: Mapping[str, np.ndarray], *, elements: int) -> list[list[pb.Chunk]]:
    """Returns for each arena of all shards a list of chunks of this number of elements."""
    lists = []
    packer = Packer(servers.placement)
    for shard in servers.placement.shards:
        raw: dict[int, bytes] = {}
        for chunk in packer.chunks(CallLayout([shard.layout]), CompleteArrays(arrays), [Aggregation.TRAINABLE]):
            raw[chunk.arena] = raw.get(chunk.arena, b"") + bytes(chunk.data)
        for index, data in raw.items():
            size = elements * shard.layout.arenas[index].wire_dtype.itemsize
            lists.append(
                [
                    pb.Chunk(shard=shard.layout.shard, arena=index, offset=offset, data=data[offset : offset + size])
                    for offset in range(0, len(data), size)
                ]
            )
    return lists


def deal(lists: Sequence[Sequence[pb.Chunk]]) -> list[pb.Chunk]:
    """Returns the items of the lists in turn: the first of each, the second of each, and so on."""
    return [item for turn in itertools.zip_longest(*lists) for item in turn if item is not None]


def push_of(
    servers: ShardServers, worker: str, chunks: Sequence[pb.Chunk], chunks_a_message: int
) -> Iterator[pb.PushRequest]:
    """Returns the messages of a push."""
    yield pb.PushRequest(header=header(servers, worker))
    for group in (chunks[i : i + chunks_a_message] for i in range(0, len(chunks), chunks_a_message)):
        yield pb.PushRequest(chunks=group)
