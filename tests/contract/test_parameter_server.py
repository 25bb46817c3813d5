"""The parameter server over real gRPC: what it applies, what it refuses, and that a refusal leaves no trace."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import grpc
import ml_dtypes
import numpy as np
import pytest

import shoal
from shard_servers import ShardServers
from shoal import _framing, _rpc, consistency, errors, initializers, optim, partitioners
from shoal._layout import Aggregation
from shoal._packing import Packer
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal.variables import Variable
from waiting import wait_until

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


def gradients(value=1.0):
    return {
        name: np.full(variable.shape, value, variable.dtype)
        for name, variable in VARIABLES.items()
        if variable.aggregation is Aggregation.TRAINABLE
    }


@pytest.fixture(params=[1, 3], ids=["one server", "three servers"])
def servers(request):
    with ShardServers(VARIABLES, servers=request.param, shards=5) as servers:
        yield servers


class TestValues:
    def test_initial_values_do_not_depend_on_shards_or_servers(self):
        with ShardServers(VARIABLES, servers=1, shards=1, seed=7) as one:
            expected = one.values()
        with ShardServers(VARIABLES, servers=3, shards=6, seed=7) as many:
            values = many.values()
        for name, variable in VARIABLES.items():
            np.testing.assert_array_equal(values[name], expected[name])
            assert values[name].dtype == variable.dtype
        assert values["w"].std() == pytest.approx(1.0, abs=0.3)

    def test_a_push_is_applied_to_every_variable(self, servers):
        before = servers.values()
        with servers.worker("a") as worker:
            worker.pull()
            result = worker.push(gradients(0.5))
        assert result == shoal._parameters.PushResult("accepted", 0, 1)
        after = servers.values()
        for name in VARIABLES:
            np.testing.assert_allclose(after[name], before[name] - 0.5, rtol=1e-6)

    def test_given_values_are_assigned_whole(self):
        given = {"x": np.arange(12.0).reshape(4, 3), "n": np.array(3, np.float32)}
        with ShardServers(given, servers=2, shards=2) as servers:
            values = servers.values()
            np.testing.assert_array_equal(values["x"], given["x"])
            np.testing.assert_array_equal(values["n"], given["n"])
            with servers.worker("a") as worker, servers.client() as client:
                client.assign(given)  # again, and beside a worker that has not begun: harmless
                worker.pull()
                with pytest.raises(errors.BadRequest, match="before training begins"):
                    client.assign(given)

    @pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
    def test_half_precision_travels_as_half_and_adds_up_as_float32(self, dtype):
        variables = {"h": Variable((8,), dtype=dtype, initializer=initializers.Ones())}
        with ShardServers(variables, shards=1, optimizer=optim.SGD(2.0**-12)) as servers, servers.worker("a") as worker:
            for _ in range(64):
                worker.push({"h": np.ones(8, dtype)})
            value = servers.values()["h"]
        assert value.dtype == dtype
        # Each step alone would vanish in half precision's rounding next to 1; 64 of them do not.
        np.testing.assert_array_equal(value.astype(np.float32), np.float32(1 - 64 * 2.0**-12).astype(dtype))

    def test_variables_larger_than_a_message_travel_in_chunks(self):
        variables = {"big": Variable((3_000_001,), initializer=initializers.Uniform(-1, 1))}
        with ShardServers(variables, shards=1) as servers, servers.worker("a") as worker:
            before = worker.pull()["big"]
            worker.push({"big": before})
            assert not servers.values()["big"].any()

    def test_non_trainable_variables_are_aggregated_as_they_ask(self):
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
            for worker, value in ((b, 4.0), (a, 1.0)):  # ranks: a before b, whoever is first
                full = np.full(2, value, np.float32)
                updates = {"mean": full, "count": np.array(int(value)), "last": full}
                worker.push({"w": np.zeros(2, np.float32)}, updates=updates, weight=value)
            values = servers.values()
        np.testing.assert_allclose(values["mean"], (4 * 4.0 + 1 * 1.0) / 5)
        assert values["count"] == 5
        np.testing.assert_array_equal(values["last"], [4.0, 4.0])


class TestBadInput:
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
    def test_a_gradient_of_wrong_name_shape_or_dtype(self, servers, change, message):
        wrong = gradients()
        change(wrong)
        with servers.worker("a") as worker:
            with pytest.raises(errors.InvalidGradient, match=message):
                worker.push(wrong)
            assert not any(servers.versions())
            assert worker.push(gradients()).outcome == "accepted"

    @pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("name", VARIABLES)
    def test_nan_and_inf_are_rejected_on_every_shard_and_counted(self, servers, name, poison):
        before = servers.values()
        bad = gradients()
        bad[name].reshape(-1)[-1] = poison
        with servers.worker("a") as worker:
            with pytest.raises(errors.NonFiniteGradient, match=f"'{name}' holds"):
                worker.push(bad)
            for variable, value in servers.values().items():
                np.testing.assert_array_equal(value, before[variable])
            assert servers.sample("shoal_server_rejected_pushes_total", reason="non_finite_gradient") == 1
            assert worker.push(gradients()).outcome == "accepted"
        assert set(servers.versions()) == {1}

    def test_a_rejected_step_can_be_passed_by(self, servers):
        with servers.worker("a") as worker:
            with pytest.raises(errors.NonFiniteGradient):
                worker.push(gradients(np.nan))
            assert worker.skip().outcome == "skipped"
            assert worker.step == 1
        assert not any(servers.versions())

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda chunks: chunks[::-1],
            lambda chunks: chunks[:-1],
            lambda chunks: chunks[1:],
            lambda chunks: [*chunks, chunks[-1]],
            lambda chunks: [*chunks[:-1], pb.Chunk(shard=0, arena=0, offset=chunks[-1].offset, data=b"\0" * 7)],
            lambda chunks: [pb.Chunk(shard=0, arena=9, data=b"\0" * 4)],
            lambda chunks: [pb.Chunk(shard=5, arena=0, data=b"\0" * 4)],
            lambda chunks: [pb.Chunk(shard=0, arena=0, offset=2**62, data=b"\0" * 4)],
        ],
        ids=["reordered", "truncated", "headless", "repeated", "split element", "no arena", "no shard", "far offset"],
    )
    def test_chunks_that_do_not_fill_the_arena_exactly(self, spoil):
        with ShardServers({"w": Variable((1_000_000,))}, shards=1) as servers, servers.worker("a"):
            layout = servers.placement.shards[0].layout
            arrays = {"w": np.ones(1_000_000, np.float32)}
            arenas = Packer(servers.placement).pack(layout, arrays, [Aggregation.TRAINABLE])
            chunks = spoil(list(_framing.chunks(0, arenas)))
            messages = [pb.PushRequest(header=header(servers, "a"))] + [pb.PushRequest(chunks=[c]) for c in chunks]
            with pytest.raises(errors.BadChunk, match="shard"), _rpc.translated("server"):
                servers.stubs[0].Push(iter(messages))
            assert servers.versions() == [0]
            assert not servers.values()["w"].any()

    @pytest.mark.parametrize("chunks_a_message", [1, 7, 10_000])
    def test_chunks_of_many_arenas_may_be_crossed_but_each_arenas_come_in_order(self, chunks_a_message):
        """Two shards of two arenas each on one server, all in chunks of 3 elements that are dealt out in turn."""
        with ShardServers(CROSSED, shards=2) as servers, servers.worker("a") as worker:
            assert [len(shard.layout.arenas) for shard in servers.placement.shards] == [2, 2]
            before = servers.values()
            grads = {name: np.arange(v.shape[0], dtype=v.dtype) for name, v in CROSSED.items()}
            dealt = deal(small_chunks(servers, grads, elements=3))

            shard, arena = dealt[0].shard, dealt[0].arena
            first, second = [i for i, chunk in enumerate(dealt) if (chunk.shard, chunk.arena) == (shard, arena)][:2]
            wrong = dealt.copy()
            wrong[first], wrong[second] = wrong[second], wrong[first]
            with (
                pytest.raises(errors.BadChunk, match=f"shard {shard}, arena {arena}: a chunk starts at byte"),
                _rpc.translated("server"),
            ):
                servers.stubs[0].Push(iter(push_of(servers, "a", wrong, chunks_a_message)))
            assert servers.versions() == [0, 0]

            reply = servers.stubs[0].Push(iter(push_of(servers, "a", dealt, chunks_a_message)))
            assert {answer.outcome for answer in reply.shards} == {pb.ACCEPTED}
            for name, value in servers.values().items():
                np.testing.assert_array_equal(value, before[name] - grads[name])
            assert worker.step == 0  # it pushed by other means than its client

    def test_a_message_of_many_small_chunks(self):
        """One element each: the framing is many times what it carries."""
        with ShardServers({"w": Variable((5_000,))}, shards=1) as servers, servers.worker("a"):
            grads = {"w": np.arange(5_000, dtype=np.float32)}
            chunks = small_chunks(servers, grads, elements=1)[0]
            servers.stubs[0].Push(iter(push_of(servers, "a", chunks, 2_500)))
            np.testing.assert_array_equal(servers.values()["w"], -grads["w"])

    def test_an_oversized_message(self, servers):
        with servers.worker("a") as worker:
            chunk = pb.Chunk(shard=0, arena=0, data=bytes(_rpc.MAX_MESSAGE_BYTES + 1))
            with grpc.insecure_channel(servers.placement.shards[0].address) as channel:
                push = channel.stream_unary(
                    "/shoal.v1.ParameterServer/Push", request_serializer=pb.PushRequest.SerializeToString
                )
                with pytest.raises(errors.MessageTooLarge, match="larger than max"), _rpc.translated("server"):
                    push(iter([pb.PushRequest(header=header(servers, "a"), chunks=[chunk])]))
            assert worker.push(gradients()).outcome == "accepted"

    def test_a_push_without_a_header(self, servers):
        with pytest.raises(errors.BadRequest, match="begins with a header"), _rpc.translated("server"):
            servers.stubs[0].Push(iter([pb.PushRequest()]))

    def test_an_old_placement_is_refused_and_fetched_again(self, servers):
        with servers.worker("a") as worker:
            worker._placement = worker._placement.__class__(
                "job", 0, servers.placement.variables, servers.placement.shards
            )
            assert worker.push(gradients()).outcome == "accepted"
            stale = header(servers, "a")
            stale.stamp.epoch = 9
            with pytest.raises(errors.StaleEpoch, match="epoch 1 here, the request at 9"), _rpc.translated("server"):
                servers.used_stubs[0].Push(iter([pb.PushRequest(header=stale)]))

    def test_unknown_jobs_and_shards(self, servers):
        for job, shards, error in (("nope", [0], errors.UnknownJob), ("job", [99], errors.UnknownShard)):
            request = pb.PullRequest(stamp=header_pb2.Stamp(job=job, epoch=1), shards=shards)
            with pytest.raises(error), _rpc.translated("server"):
                list(servers.used_stubs[0].Pull(request))
        with pytest.raises(errors.BadRequest, match="at least one"), _rpc.translated("server"):
            list(servers.used_stubs[0].Pull(pb.PullRequest(stamp=header_pb2.Stamp(job="job", epoch=1))))

    def test_a_reader_may_not_push(self, servers):
        with servers.client() as reader, pytest.raises(errors.Fenced):
            reader.push(gradients())


class TestWholeOrNotAtAll:
    def test_a_push_that_breaks_off_leaves_no_trace(self, servers):
        """The worker dies in mid-push: one server has its whole part, another some chunks, a third nothing."""
        before = servers.values()
        servers.admit("a")
        client = servers.client("a")
        for place, server in enumerate(client._servers):
            requests = list(client._requests(server, 1.0, gradients(), [Aggregation.TRAINABLE], commit=False))
            if place == 0 and len(client._servers) > 1:
                server.stub.Push(iter(requests))  # staged whole
            else:
                break_off(servers, server, pb.PushRequest(header=requests[0].header, chunks=requests[0].chunks[:1]))
        client.close()
        servers.remove("a")
        for name, value in servers.values().items():
            np.testing.assert_array_equal(value, before[name])
        assert not any(servers.versions())

    def test_a_push_that_one_server_has_committed_counts_on_all(self):
        with ShardServers(VARIABLES, servers=3, shards=5) as servers:
            before = servers.values()
            servers.admit("a")
            client = servers.client("a")
            for server in client._servers:
                server.stub.Push(client._requests(server, 1.0, gradients(), [Aggregation.TRAINABLE], commit=False))
            first = client._servers[0]
            first.stub.Commit(pb.CommitRequest(stamp=client._stamp(), shards=first.indices))
            client.close()  # dies between the commits
            servers.remove("a")
            assert set(servers.versions()) == {1}
            for name, value in servers.values().items():
                np.testing.assert_allclose(value, before[name] - 1.0, rtol=1e-6)

    def test_a_repeated_push_counts_once(self, servers):
        with servers.worker("a") as worker:
            first = worker.push(gradients())
            worker.step = 0
            assert worker.push(gradients(7.0)) == first
        assert set(servers.versions()) == {1}


class TestWaiting:
    def test_200_waiting_pulls_hold_no_thread(self):
        """Two threads serve 200 pulls that wait; the pushes that they wait for go through, and all are answered."""
        mode = consistency.Synchronous()
        with ShardServers({"w": Variable((1000,))}, shards=1, mode=mode, rpc_threads=2) as servers:
            clients = [servers.worker(f"w{index}") for index in range(201)]
            grads = {"w": np.ones(1000, np.float32)}
            with ThreadPoolExecutor(200) as pool:
                for client in clients[:200]:
                    client.push(grads)
                pulls = [pool.submit(client.pull) for client in clients[:200]]
                wait_until(lambda: servers.waiting() == 200, what="200 waiting pulls")
                assert clients[200].push(grads).outcome == "accepted"
                done, _ = wait(pulls, timeout=30)
                assert len(done) == 200
                for pull in done:
                    np.testing.assert_allclose(pull.result()["w"], -1.0)
            for client in clients:
                client.close()

    def test_a_barrier_waits_as_a_pull_does(self, servers):
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

    def test_a_pull_given_up_by_its_caller_is_forgotten(self):
        with ShardServers({"w": Variable((3,))}, shards=1, mode=consistency.Synchronous()) as servers:
            a, b = servers.worker("a"), servers.worker("b")
            a.push({"w": np.ones(3, np.float32)})
            call = servers.stubs[0].Pull(pb.PullRequest(stamp=a._stamp(), shards=[0]))
            wait_until(lambda: servers.waiting() == 1)
            call.cancel()
            wait_until(lambda: servers.waiting() == 0)
            a.close()
            b.close()

    def test_dropping_a_job_ends_its_waiting_pulls(self):
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

    def test_a_dead_workers_pull_is_fenced(self):
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


def break_off(servers, server, message):
    """Sends the beginning of a push, waits until it is there, and is gone."""
    metric = "shoal_server_received_bytes_total"
    received = servers.sample(metric)
    dead = threading.Event()

    def until_death():
        yield message
        dead.wait()

    call = server.stub.Push.future(until_death())
    wait_until(lambda: servers.sample(metric) > received, what="the chunk's arrival")
    call.cancel()
    dead.set()


def header(servers, worker):
    client = servers.client(worker)
    try:
        first = client._servers[0]
        return next(iter(client._requests(first, 1.0, {}, [Aggregation.TRAINABLE], commit=True))).header
    finally:
        client.close()


def small_chunks(servers, arrays, *, elements):
    """A list of chunks of so many elements an arena, of all shards."""
    lists = []
    packer = Packer(servers.placement)
    for shard in servers.placement.shards:
        for index, arena in packer.pack(shard.layout, arrays, [Aggregation.TRAINABLE]):
            size = elements * arena.itemsize
            raw = arena.tobytes()
            lists.append(
                [
                    pb.Chunk(shard=shard.layout.shard, arena=index, offset=offset, data=raw[offset : offset + size])
                    for offset in range(0, len(raw), size)
                ]
            )
    return lists


def deal(lists):
    """The lists' items in turn: the first of each, the second of each, and so on."""
    return [item for turn in itertools.zip_longest(*lists) for item in turn if item is not None]


def push_of(servers, worker, chunks, chunks_a_message):
    """The messages of a push."""
    yield pb.PushRequest(header=header(servers, worker))
    for group in (chunks[i : i + chunks_a_message] for i in range(0, len(chunks), chunks_a_message)):
        yield pb.PushRequest(chunks=group)
