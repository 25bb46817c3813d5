"""Pulls and pushes that overlap with computation, against real servers.

The tests check which pushes take effect, how calls wait, and which errors they raise.
"""

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from shoal import PushResult, consistency, errors, optim
from shoal._training.gradient_buffers import GradientBuffers
from shoal._training.overlap import Pipeline
from shoal._transport.frames import Frame
from shoal._transport.lane import Lane
from shoal._wire import Buffer, DataRange, Lease, NoRange
from shoal.partitioners import FixedShards
from shoal.variables import Variable
from shoal_server.shards.machine.events import Admission
from shoal_worker.arrays import Cpu
from shoal_worker.batches import LeasedBatches
from shoal_worker.messages import TrainerReport
from shoal_worker.training_loop import TrainingConfig, TrainingLoop
from support.clusters import history_server
from support.clusters.cluster_probe import leads_of
from support.clusters.shard_servers import ShardServers
from support.run_lengths import size
from support.waiting import wait_until

ELEMENTS = 12
VARIABLES = {"w": Variable((ELEMENTS,), partitioner=FixedShards(3))}
# Each transport, and each number of servers. The long form has all pairs.
PLACEMENTS = size(
    [("auto", 1), ("tcp", 2), ("grpc", 1)], [(kind, count) for kind in ("auto", "tcp", "grpc") for count in (1, 2)]
)
MODES = [consistency.Asynchronous(), consistency.BoundedStaleness(1), consistency.BoundedStaleness(4)]
PATIENCE_S = 30


def servers_with(
    mode: consistency.Consistency, *, elements: int = ELEMENTS, servers: int = 2, **options: Any
) -> ShardServers:
    variables = {"w": Variable((elements,), partitioner=FixedShards(3))}
    return ShardServers(variables, servers=servers, shards=3, mode=mode, optimizer=optim.SGD(1.0), **options)


def overlapping(servers: ShardServers, name: str) -> Pipeline:
    return Pipeline(servers.worker(name), overlap=True)


def gradient(value: float, elements: int = ELEMENTS) -> dict[str, np.ndarray]:
    return {"w": np.full(elements, value, np.float32)}


def step(pipeline: Pipeline, pushed: Mapping[str, np.ndarray]) -> np.ndarray:
    """Takes one step of a worker's loop. Returns the values with which it computes."""
    values = pipeline.pull()
    pipeline.settle()
    pipeline.push(pushed)
    return values["w"]


def settled(pipeline: Pipeline) -> str:
    """Returns the outcome of the push that was in progress."""
    result = pipeline.settle()
    assert result
    return result.outcome


@pytest.fixture(autouse=True)
def recorded_histories() -> Iterator[None]:
    with history_server.recording():
        yield


def histories(servers: ShardServers) -> list[list[Admission]]:
    """Returns for each shard the pulls that it answered and the pushes that it committed, oldest first."""
    stores = {f"server-{index}": store for index, store in enumerate(servers.stores)}
    shards = servers.placement.shards
    return [history_server.admissions(stores[shard.server], "job", shard.layout.shard) for shard in shards]


def together(*loops: Callable[[], Any]) -> list[int | None]:
    """Runs loops in threads of their own. Returns their results."""
    with ThreadPoolExecutor(len(loops)) as pool:
        return [future.result(PATIENCE_S) for future in [pool.submit(loop) for loop in loops]]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_push_counts_once_within_the_staleness_bound(mode: consistency.Consistency) -> None:
    steps = 60
    sent = np.random.default_rng(0).integers(-4, 5, size=(2, steps, ELEMENTS)).astype(np.float32)
    with servers_with(mode) as servers:
        pipelines = [overlapping(servers, name) for name in "ab"]

        def check_loop(rank: int) -> None:
            with pipelines[rank] as pipeline:
                for number in range(steps):
                    step(pipeline, {"w": sent[rank, number]})
                assert settled(pipeline) == "accepted"

        together(lambda: check_loop(0), lambda: check_loop(1))
        np.testing.assert_array_equal(servers.values()["w"], -sent.sum(axis=(0, 1)))
        assert servers.versions() == [2 * steps] * 3
        for history in histories(servers):
            leads, finished = leads_of(history)
            assert finished == {"a": steps, "b": steps}
            assert max(leads) <= getattr(mode, "bound", 2 * steps)
            pulls = Counter((entry.worker, entry.step) for entry in history if entry.kind == "pull")
            assert pulls == Counter((worker, number) for worker in "ab" for number in range(steps + 1))


@pytest.mark.parametrize("bound", [1, 4])
def test_a_worker_computes_as_far_ahead_as_the_bound_allows_and_no_further(bound: int) -> None:
    with servers_with(consistency.BoundedStaleness(bound)) as servers, servers.worker("slow") as slow:
        with overlapping(servers, "fast") as fast, ThreadPoolExecutor(1) as thread:
            for _ in range(bound):
                step(fast, gradient(1))
            last = thread.submit(step, fast, gradient(1))
            last.result(PATIENCE_S)  # step `bound`, on values that the mode had let through already
            assert fast.step == bound + 1
            wait_until(lambda: servers.waiting() == len(servers.stores), what="the pull for the step after")
            assert servers.versions() == [bound] * 3, "the push of the last step comes after that pull"
            following = thread.submit(step, fast, gradient(1))
            slow.skip()
            np.testing.assert_array_equal(following.result(PATIENCE_S), gradient(-bound)["w"])
            slow.skip()
            fast.settle()
        np.testing.assert_array_equal(servers.values()["w"], gradient(-bound - 2)["w"])


@pytest.mark.parametrize(("transport", "count"), PLACEMENTS)
@pytest.mark.parametrize("elements", [12, 150_000], ids=["small", "large"])
def test_gradients_may_be_changed_as_soon_as_push_returns(transport: str, elements: int, count: int) -> None:
    mode = consistency.BoundedStaleness(1)
    with (
        servers_with(mode, elements=elements, servers=count, transport=transport) as servers,
        servers.worker("slow") as slow,
        overlapping(servers, "fast") as fast,
    ):
        step(fast, gradient(1, elements))
        pushed = gradient(2, elements)
        values = step(fast, pushed)
        wait_until(lambda: servers.waiting() == len(servers.stores), what="the pull that the push is behind")
        pushed["w"][:] = np.nan
        slow.skip()
        assert settled(fast) == "accepted"
        np.testing.assert_array_equal(servers.values()["w"], gradient(-3, elements)["w"])
        # Values are the worker's own, too.
        values += 1
        np.testing.assert_array_equal(servers.values()["w"], gradient(-3, elements)["w"])


def test_values_that_are_kept_stay_as_they_are() -> None:
    """The test keeps more values than there are slots of shared memory."""
    with servers_with(consistency.Asynchronous(), elements=150_000) as servers, overlapping(servers, "a") as pipeline:
        kept = [step(pipeline, gradient(1, 150_000)) for _ in range(8)]
        for number, values in enumerate(kept):
            np.testing.assert_array_equal(values, np.full(150_000, -max(0.0, number - 1), np.float32))


class Numbers:
    """Learns nothing: every step's gradient is 1."""

    def __init__(self, size: int) -> None:
        self.dataset = Samples(size)

    def variables(self) -> dict[str, np.ndarray]:
        raise AssertionError("the servers have them")

    def loss_and_gradients(
        self, params: Mapping[str, np.ndarray], batch: np.ndarray
    ) -> tuple[float, dict[str, np.ndarray]]:
        return 0.0, gradient(1)


class Samples:
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: np.ndarray) -> np.ndarray:
        return indices


def train(
    servers: ShardServers,
    pipeline: Pipeline,
    name: str,
    lease: Callable[[int], Lease | NoRange],
    *,
    samples: int = 40,
    max_steps: int = 0,
) -> int:
    """Runs a worker's real loop from its first step until it leaves. Returns the loop's counts."""
    emitted: list[TrainerReport] = []
    with pipeline, closing(LeasedBatches(Samples(samples), 2, 0, lease)) as batches:
        config = TrainingConfig(name=name, program=Numbers(samples), device=Cpu(), max_steps=max_steps)
        TrainingLoop(config, pipeline, batches, emit=emitted.append).run()
    servers.remove(name)
    return sum(emission.report.accepted for emission in emitted)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_worker_without_data_does_not_delay_others(mode: consistency.Consistency) -> None:
    through = threading.Event()
    ranges: list[Lease | NoRange] = [Lease(1, DataRange(0, 0, 20)), Lease(2, DataRange(0, 20, 40)), NoRange.FINISHED]

    def busy_lease(done: int) -> Lease | NoRange:
        if ranges[0] is NoRange.FINISHED:
            through.set()
        return ranges.pop(0)

    with servers_with(mode) as servers:
        busy, idle = overlapping(servers, "busy"), overlapping(servers, "idle")
        accepted = together(
            lambda: train(servers, busy, "busy", busy_lease),
            lambda: train(servers, idle, "idle", lambda done: NoRange.FINISHED if through.is_set() else NoRange.WAIT),
        )
        assert accepted == [20, 0]
        np.testing.assert_array_equal(servers.values()["w"], gradient(-20)["w"])
        if bound := getattr(mode, "bound", 0):
            assert max(entry.step - entry.slowest for history in histories(servers) for entry in history) <= bound


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_worker_that_leaves_is_waited_for_no_longer(mode: consistency.Consistency) -> None:
    def lease(done: int) -> Lease | NoRange:
        return NoRange.FINISHED if done else Lease(1, DataRange(0, 0, 40))

    with servers_with(mode) as servers:
        stays, leaves = overlapping(servers, "stays"), overlapping(servers, "leaves")
        accepted = together(
            lambda: train(servers, stays, "stays", lease),
            lambda: train(servers, leaves, "leaves", lease, max_steps=3),
        )
        assert accepted == [20, 3]
        np.testing.assert_array_equal(servers.values()["w"], gradient(-23)["w"])


def test_dead_worker_loses_only_its_push_in_flight() -> None:
    with servers_with(consistency.BoundedStaleness(1)) as servers, servers.worker("slow") as slow:
        with overlapping(servers, "fast") as fast:
            step(fast, gradient(1))
            step(fast, gradient(1))
            wait_until(lambda: servers.waiting() == len(servers.stores), what="the pull that the push is behind")
            servers.remove("fast")
            with pytest.raises(errors.Fenced):
                fast.settle()
            with pytest.raises(errors.Fenced):
                fast.pull()
        for _ in range(4):
            slow.pull()
            slow.push(gradient(1))
        np.testing.assert_array_equal(servers.values()["w"], gradient(-5)["w"])


def test_nan_changes_nothing_and_the_next_steps_count() -> None:
    with servers_with(consistency.BoundedStaleness(1)) as servers, overlapping(servers, "a") as pipeline:
        step(pipeline, gradient(1))
        step(pipeline, gradient(np.nan))
        pipeline.pull()
        with pytest.raises(errors.NonFiniteGradient, match="'w' contains nan"):
            pipeline.settle()
        pipeline.push(gradient(1))
        assert settled(pipeline) == "accepted"
        np.testing.assert_array_equal(servers.values()["w"], gradient(-2)["w"])
        assert servers.versions() == [2] * 3


@pytest.mark.parametrize("transport", ["auto", "tcp", "grpc"])
def test_closing_ends_a_pull_that_waits(transport: str) -> None:
    mode = consistency.BoundedStaleness(1)
    with servers_with(mode, transport=transport) as servers, servers.worker("slow"):
        fast = overlapping(servers, "fast")
        for _ in range(2):
            step(fast, gradient(1))
        wait_until(lambda: servers.waiting() == len(servers.stores), what="the pull that waits")
        with ThreadPoolExecutor(1) as thread:
            thread.submit(fast.close).result(10)
        wait_until(lambda: servers.waiting() == 0, what="the end of the pull")
        np.testing.assert_array_equal(servers.values()["w"], gradient(-1)["w"])


def test_closing_ends_a_pull_whose_lane_is_just_being_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = consistency.BoundedStaleness(0)
    with servers_with(mode, servers=1, transport="tcp") as servers, servers.worker("slow"):
        servers.admit("fast")
        client = servers.client("fast", step=1)  # which waits for the slow one
        pipeline, connecting, connect = Pipeline(client, overlap=True), threading.Event(), Lane.connect

        def slowly(*address: Any, **options: Any) -> Lane:
            connecting.set()
            wait_until(lambda: client.servers.connections[0].closed, what="the end of the link")
            return connect(*address, **options)

        monkeypatch.setattr(Lane, "connect", slowly)
        with ThreadPoolExecutor(2) as threads:
            pull = threads.submit(pipeline.pull)
            assert connecting.wait(PATIENCE_S)
            threads.submit(pipeline.close).result(10)
            assert isinstance(pull.exception(10), errors.Cancelled)
        wait_until(lambda: servers.waiting() == 0 and servers.lanes[0].count == 0, what="the end of all that was open")


@pytest.mark.parametrize("transport", ["auto", "tcp", "grpc"])
def test_ctrl_c_ends_a_pull_on_all_servers_and_the_next_pull_has_connections_of_its_own(transport: str) -> None:
    with servers_with(consistency.Synchronous(), transport=transport) as servers, servers.worker("slow") as slow:
        pipeline = Pipeline(servers.worker("fast"), overlap=False)
        with closing(pipeline), ThreadPoolExecutor(1) as thread:
            pipeline.pull()
            pipeline.push(gradient(1))

            def interrupt() -> None:
                wait_until(lambda: servers.waiting() == len(servers.stores), what="the pulls that wait")
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

            interrupting = thread.submit(interrupt)
            with pytest.raises(KeyboardInterrupt):
                pipeline.pull()
            interrupting.result()
            wait_until(lambda: servers.waiting() == 0, what="the end of the interrupted pulls")
            slow.push(gradient(3))
            np.testing.assert_array_equal(pipeline.pull()["w"], gradient(-2)["w"])


LAYERS = {f"layer_{number}": Variable((400_000 if number % 2 else 70,)) for number in range(8)}


@pytest.mark.parametrize(("transport", "count"), PLACEMENTS)
@pytest.mark.parametrize("overlap", [False, True], ids=["no overlap", "overlap"])
class TestGradientsOneByOne:
    """Gradients from a generator: each is sent as it comes, in any order, and all together count as a mapping does."""

    @pytest.fixture
    def servers(self, transport: str, count: int) -> Iterator[ShardServers]:
        with ShardServers(LAYERS, servers=count, shards=3, optimizer=optim.SGD(1.0), transport=transport) as servers:
            yield servers

    @pytest.fixture
    def pipeline(self, servers: ShardServers, overlap: bool) -> Iterator[Pipeline]:
        with Pipeline(servers.worker("a"), overlap=overlap) as pipeline:
            yield pipeline

    def drawn(self, seed: int = 0) -> dict[str, np.ndarray]:
        random = np.random.default_rng(seed)
        return {name: random.standard_normal(spec.shape, np.float32) for name, spec in LAYERS.items()}

    def outcome(self, pipeline: Pipeline, result: PushResult) -> str:
        return settled(pipeline) if result.outcome == "sent" else result.outcome

    def test_they_count_as_a_mapping_does(self, servers: ShardServers, pipeline: Pipeline) -> None:
        before = servers.values()
        grads = [self.drawn(step) for step in range(3)]
        for drawn in grads:
            pipeline.pull()
            result = pipeline.push(reversed(drawn.items()))  # as backpropagation gives them
            assert self.outcome(pipeline, result) == "accepted"
        for name, value in servers.values().items():
            expected = before[name]
            for drawn in grads:
                expected = expected - drawn[name]
            np.testing.assert_array_equal(value, expected)

    def test_a_program_that_fails_in_between_leaves_no_trace(self, servers: ShardServers, pipeline: Pipeline) -> None:
        before, grads = servers.values(), self.drawn()

        def failing() -> Iterator[tuple[str, np.ndarray]]:
            yield from list(grads.items())[:5]
            raise ZeroDivisionError

        pipeline.pull()
        with pytest.raises(ZeroDivisionError):
            pipeline.push(failing())
        assert pipeline.step == 0
        assert not any(servers.versions())
        assert self.outcome(pipeline, pipeline.push(grads.items())) == "accepted"
        for name, value in servers.values().items():
            np.testing.assert_array_equal(value, before[name] - grads[name])

    @pytest.mark.parametrize(
        ("spoil", "said"),
        [
            (lambda items: items[1:], "'layer_0' is missing"),
            (lambda items: [*items, items[0]], "'layer_0' twice"),
            (lambda items: [*items, ("layer_9", items[0][1])], "'layer_9' is not a variable"),
            (lambda items: [(name, array[1:]) for name, array in items], r"'layer_0' has shape \(69,\), not \(70,\)"),
            (lambda items: [], "'layer_0' is missing"),
        ],
        ids=["missing", "twice", "unknown", "misshapen", "none"],
    )
    def test_arrays_that_do_not_fit(
        self, servers: ShardServers, pipeline: Pipeline, spoil: Callable[..., Any], said: str
    ) -> None:
        pipeline.pull()
        grads = self.drawn()
        with pytest.raises(errors.InvalidGradient, match=said):
            pipeline.push(iter(spoil(list(grads.items()))))
        assert not any(servers.versions())
        assert self.outcome(pipeline, pipeline.push(iter(grads.items()))) == "accepted"

    def test_updates_may_be_changed_as_soon_as_push_returns(self, count: int, transport: str, overlap: bool) -> None:
        variables = {"w": Variable((400_000,)), "mean": Variable((9,), trainable=False, aggregation="last")}
        with (
            ShardServers(variables, servers=count, shards=3, transport=transport) as servers,
            Pipeline(servers.worker("a"), overlap=overlap) as pipeline,
        ):
            pipeline.pull()
            mean = np.ones(9, np.float32)
            pipeline.push(iter([("w", np.ones(400_000, np.float32))]), updates={"mean": mean})
            mean[:] = 7
            pipeline.settle()
            np.testing.assert_array_equal(servers.values()["mean"], np.ones(9, np.float32))

    @pytest.mark.parametrize("call", ["pull", "push", "skip", "barrier"])
    def test_generator_may_not_use_the_pipeline_that_waits_for_it(
        self, servers: ShardServers, pipeline: Pipeline, call: str
    ) -> None:
        grads = self.drawn()

        def meddling() -> Iterator[tuple[str, np.ndarray]]:
            yield from list(grads.items())[:3]
            getattr(pipeline, call)(*([grads] if call == "push" else []))

        pipeline.pull()
        with pytest.raises(errors.BadRequest, match="make this call after the push"):
            pipeline.push(meddling())
        assert not any(servers.versions())
        assert self.outcome(pipeline, pipeline.push(iter(grads.items()))) == "accepted"

    def test_closing_ends_a_push_that_waits_for_gradients(self, servers: ShardServers, pipeline: Pipeline) -> None:
        grads = self.drawn()

        def closing() -> Iterator[tuple[str, np.ndarray]]:
            yield from list(grads.items())[:3]
            pipeline.close()
            yield from list(grads.items())[3:]

        pipeline.pull()
        with pytest.raises(errors.Cancelled):
            self.outcome(pipeline, pipeline.push(closing()))
        assert not any(servers.versions())

    def test_nan_is_refused(self, servers: ShardServers, pipeline: Pipeline) -> None:
        pipeline.pull()
        grads = self.drawn()
        grads["layer_7"][5] = np.nan
        with pytest.raises(errors.NonFiniteGradient, match="layer_7"):
            self.outcome(pipeline, pipeline.push(iter(grads.items())))
        assert not any(servers.versions())


@pytest.mark.parametrize("transport", ["auto", "tcp", "grpc"])
@pytest.mark.parametrize("overlap", [False, True], ids=["no overlap", "overlap"])
@pytest.mark.parametrize("values", [("a", "b", "c"), ("b", "a", "c"), ("b", "c", "a"), ("c", "c", "c")])
def test_buffers_may_trade_places(transport: str, overlap: bool, values: tuple[str, str, str]) -> None:
    """Each array is then where the gradient of another variable will be written."""
    variables = {name: Variable(100) for name in "abc"}
    number = {"a": 1, "b": 2, "c": 3}
    with (
        ShardServers(variables, optimizer=optim.SGD(1.0), transport=transport) as servers,
        Pipeline(servers.worker("a"), overlap=overlap) as pipeline,
    ):
        before = servers.values()
        pipeline.pull()
        buffers = pipeline.buffers()
        for name, array in buffers.items():
            array[:] = number[name]
        buffers.update(zip("abc", [buffers[name] for name in values], strict=True))
        pipeline.push(buffers)
        pipeline.settle()
        for name, value in servers.values().items():
            assert np.all(value == before[name] - number[values["abc".index(name)]])


MIXED = {
    "whole": Variable((300_000,)),
    "cut": Variable((500, 300), partitioner=FixedShards(3)),
    "small": Variable((7, 3)),
    "number": Variable(()),
    "half": Variable((600,), dtype="float16"),
    "mean": Variable((4,), trainable=False, aggregation="last"),
}
TRAINED = [name for name in MIXED if name != "mean"]


@pytest.mark.parametrize(("transport", "count"), PLACEMENTS)
@pytest.mark.parametrize("overlap", [False, True], ids=["no overlap", "overlap"])
class TestBuffers:
    """Gradients that are computed in the memory from which they are pushed count like all others."""

    @pytest.fixture
    def servers(self, transport: str, count: int) -> Iterator[ShardServers]:
        with ShardServers(MIXED, servers=count, shards=3, optimizer=optim.SGD(1.0), transport=transport) as servers:
            yield servers

    @pytest.fixture
    def pipeline(self, servers: ShardServers, overlap: bool) -> Iterator[Pipeline]:
        with Pipeline(servers.worker("a"), overlap=overlap) as pipeline:
            yield pipeline

    def check_step(
        self,
        pipeline: Pipeline,
        change: Callable[[GradientBuffers], Any] = lambda buffers: buffers,
        **options: Any,
    ) -> GradientBuffers:
        """Every element's gradient is 1."""
        pipeline.pull()
        buffers = pipeline.buffers()
        assert sorted(buffers) == sorted(TRAINED)
        for array in buffers.values():
            array[...] = 1
        pipeline.settle()
        pipeline.push(change(buffers), **options)
        return buffers

    def check(self, servers: ShardServers, before: Mapping[str, np.ndarray], steps: int) -> None:
        for name, value in servers.values().items():
            expected = before[name] - np.asarray(steps, before[name].dtype) if name in TRAINED else before[name]
            np.testing.assert_allclose(value, expected, rtol=2e-3, atol=1e-2 if name == "half" else 1e-5)

    def test_they_count_step_after_step_though_the_program_keeps_them(
        self, servers: ShardServers, pipeline: Pipeline
    ) -> None:
        before = servers.values()
        kept = [self.check_step(pipeline) for _ in range(5)]
        pipeline.settle()
        self.check(servers, before, 5)
        assert len({id(buffers["whole"]) for buffers in kept}) == 5

    def test_arrays_that_were_replaced_count_too(self, servers: ShardServers, pipeline: Pipeline) -> None:
        def replace(buffers: GradientBuffers) -> GradientBuffers:
            for name in ("whole", "cut", "number"):
                buffers[name][...] = np.nan
                buffers[name] = np.ones(MIXED[name].shape, np.float32)
            return buffers

        before = servers.values()
        self.check_step(pipeline, replace)
        pipeline.settle()
        self.check(servers, before, 1)

    def test_a_copy_of_the_mapping_counts_too(self, servers: ShardServers, pipeline: Pipeline) -> None:
        before = servers.values()
        self.check_step(pipeline, dict)
        pipeline.settle()
        self.check(servers, before, 1)

    def test_they_may_be_pushed_again_once_they_are_settled(
        self, servers: ShardServers, pipeline: Pipeline, overlap: bool
    ) -> None:
        before = servers.values()
        buffers = self.check_step(pipeline)
        pipeline.settle()
        buffers["whole"][:] = 1
        pipeline.pull()
        if overlap:
            with pytest.raises(errors.BadRequest, match="request new buffers"):
                pipeline.push(buffers)
        pipeline.push(dict(buffers) if overlap else buffers)
        pipeline.settle()
        self.check(servers, before, 2)

    def test_foreign_array_may_replace_a_buffer(self, servers: ShardServers, pipeline: Pipeline) -> None:
        """For example, an array of another framework."""

        class Foreign:
            def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
                return np.ones(MIXED["small"].shape, np.float32)

        def replace(buffers: GradientBuffers) -> GradientBuffers:
            buffers["small"][:] = np.nan
            buffers["small"] = Foreign()  # type: ignore[assignment]  # converted, as its type says
            return buffers

        before = servers.values()
        self.check_step(pipeline, replace)
        pipeline.settle()
        self.check(servers, before, 1)

    def test_updates_go_with_them(self, servers: ShardServers, pipeline: Pipeline) -> None:
        before = servers.values()
        before["mean"][:] = 5
        self.check_step(pipeline, updates={"mean": np.full(4, 5, np.float32)})
        pipeline.settle()
        self.check(servers, before, 1)

    @pytest.mark.parametrize(
        ("spoil", "said"),
        [
            (lambda buffers: buffers.pop("small"), "'small' is missing"),
            (lambda buffers: buffers.update(small=np.ones(3, np.float32)), "'small' has shape"),
            (lambda buffers: buffers.update(other=np.ones(3, np.float32)), "'other' is not a variable"),
        ],
        ids=["missing", "misshapen", "unknown"],
    )
    def test_arrays_that_do_not_fit_are_refused(
        self, servers: ShardServers, pipeline: Pipeline, spoil: Callable[..., Any], said: str
    ) -> None:
        def spoiled(buffers: GradientBuffers) -> GradientBuffers:
            spoil(buffers)
            return buffers

        with pytest.raises(errors.InvalidGradient, match=said):
            self.check_step(pipeline, spoiled)
        assert not any(servers.versions())

    def test_nan_is_refused(self, servers: ShardServers, pipeline: Pipeline) -> None:
        def spoiled(buffers: GradientBuffers) -> GradientBuffers:
            buffers["whole"][77] = np.nan
            return buffers

        def pushed() -> None:
            self.check_step(pipeline, spoiled)
            pipeline.settle()

        with pytest.raises(errors.NonFiniteGradient, match="whole"):
            pushed()
        assert not any(servers.versions())


@pytest.mark.parametrize("overlap", [False, True], ids=["no overlap", "overlap"])
class TestGradientsThatTakeTheirTime:
    @pytest.fixture
    def servers(self) -> Iterator[ShardServers]:
        with ShardServers(LAYERS, optimizer=optim.SGD(1.0), transport="tcp", stall_s=0.2) as servers:
            yield servers

    def received(self, servers: ShardServers) -> float:
        return servers.sample("shoal_server_received_bytes_total")

    def test_the_first_are_at_the_server_before_the_last_are_computed(
        self, servers: ShardServers, overlap: bool
    ) -> None:
        seen = []

        def slowly() -> Iterator[tuple[str, np.ndarray]]:
            for number, (name, spec) in enumerate(LAYERS.items()):
                yield name, np.ones(spec.shape, np.float32)
                if number == 5:
                    wait_until(lambda: self.received(servers) >= 2 << 20, what="the first gradients' arrival")
                    seen.append(self.received(servers))

        with Pipeline(servers.worker("a"), overlap=overlap) as pipeline:
            pipeline.pull()
            pipeline.push(slowly())
            pipeline.settle()
        assert servers.versions() == [1] * len(servers.versions())
        assert seen
        assert seen[0] < self.received(servers)

    @pytest.mark.parametrize("times", [1, 2], ids=["once", "and again when it is sent again"])
    def test_a_lane_that_breaks_meanwhile_is_no_failure(
        self, servers: ShardServers, overlap: bool, monkeypatch: pytest.MonkeyPatch, times: int
    ) -> None:
        broken: list[Lane] = []
        stream = Lane.stream

        def breaking(lane: Lane, kind: Frame, payloads: Iterable[Sequence[Buffer]], **options: Any) -> None:
            def watched() -> Iterator[Sequence[Buffer]]:
                for pieces in payloads:
                    if kind is Frame.PUSH and len(broken) < times and self.received(servers) >= 2 << 20:
                        broken.append(lane)
                        lane.close()
                    yield pieces

            stream(lane, kind, watched(), **options)

        monkeypatch.setattr(Lane, "stream", breaking)

        def slowly() -> Iterator[tuple[str, np.ndarray]]:
            for number, (name, spec) in enumerate(LAYERS.items()):
                if number == 6:
                    wait_until(lambda: self.received(servers) >= 2 << 20, what="the first gradients' arrival")
                yield name, np.ones(spec.shape, np.float32)

        before = servers.values()
        with Pipeline(servers.worker("a"), overlap=overlap) as pipeline:
            pipeline.pull()
            pipeline.push(slowly())
            pipeline.settle()
        assert len(broken) == times
        for name, value in servers.values().items():
            np.testing.assert_array_equal(value, before[name] - 1)
