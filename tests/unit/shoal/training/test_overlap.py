"""Pipeline over a fake client: the work on its thread, the order of this work, and the results for the caller."""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import numpy as np
import pytest

from shoal import errors
from shoal._training.overlap import Pipeline
from shoal._training.parameters import PullResult, Push, PushResult
from shoal._transport import ServerConnection
from shoal._wire import Cursor, PushPayload

PATIENCE_S = 20


def no_payload(_server: ServerConnection) -> PushPayload:
    raise AssertionError("the fake client sends nothing")


class FakeClient:
    """Values say which pushes they have: w is the list of the steps that were applied when they were pulled.

    Attributes:
        done: what was done, in order of its beginning: "pull 3", "push 2", "skip 1", "barrier 1".
        fails: what to raise, once, by what is done.
    """

    def __init__(self) -> None:
        self.step = 0
        self.done: list[str] = []
        self.fails: dict[str, Exception] = {}
        self.applied: list[int] = []
        self.rates: list[float | None] = []  # of the pushes that were applied
        self.threads: set[str] = set()
        self.prepared: list[Callable[[int], np.ndarray] | None] = []
        self._changed = threading.Condition()  # guards done, _held and _running
        self._held: set[str] = set()
        self._running = ""
        self._closed = False

    # What a test does.

    def hold(self, what: str) -> None:
        """From now on this waits until it is let go."""
        with self._changed:
            self._held.add(what)

    def let_go(self, what: str) -> None:
        with self._changed:
            self._held.discard(what)
            self._changed.notify_all()

    def await_begun(self, what: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: what in self.done, PATIENCE_S), f"{what} is not in {self.done}"

    # What the pipeline does.

    def pull(self) -> dict[str, np.ndarray]:
        return self.take(self.fetch(self.step))

    def push(
        self,
        gradients: Mapping[str, np.ndarray],
        *,
        updates: Mapping[str, np.ndarray] | None = None,
        weight: float = 1.0,
        cursor: Cursor | None = None,
        learning_rate: float | None = None,
    ) -> PushResult:
        return self.send(replace(self.prepare(gradients, updates, weight, cursor), learning_rate=learning_rate))

    def fetch(self, step: int, *, ahead: int = 0) -> PullResult:
        self._do(f"pull {step + ahead}")
        return PullResult({"w": np.array(self.applied, np.int64)}, {0: len(self.applied)}, step + ahead)

    def take(self, pulled: PullResult) -> dict[str, np.ndarray]:
        self.go_on(pulled.step)
        return pulled.values

    def go_on(self, step: int) -> None:
        self.step = max(self.step, step)

    def prepare(
        self,
        gradients: Mapping[str, np.ndarray],
        updates: Mapping[str, np.ndarray] | None,
        weight: float,
        cursor: Cursor | None = None,
        *,
        memory: Callable[[int], np.ndarray] | None = None,
    ) -> Push:
        if "v" in gradients:
            raise errors.InvalidGradient("'v' is not a variable")
        self.prepared.append(memory)
        return Push(self.step, weight, {}, no_payload, [])

    def send(self, push: Push) -> PushResult:
        self._do(f"push {push.step}")
        self.applied.append(push.step)
        self.rates.append(push.learning_rate)
        self.go_on(push.step + 1)
        return PushResult("accepted", len(self.applied), push.step + 1)

    def skip(self) -> PushResult:
        self._do(f"skip {self.step}")
        self.step += 1
        return PushResult("skipped", 0, self.step)

    def barrier(self) -> None:
        self._do(f"barrier {self.step}")

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _do(self, what: str) -> None:
        with self._changed:
            assert not self._running, f"{what} begins while {self._running} goes on"
            self._running = what
            self.done.append(what)
            self.threads.add(threading.current_thread().name)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: what not in self._held or self._closed, PATIENCE_S), f"{what} waits"
            self._running = ""
            if self._closed:
                raise errors.Cancelled("closed on this side")
        if what in self.fails:
            raise self.fails.pop(what)


GRADIENT = {"w": np.ones(3)}


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def pipeline(client: FakeClient) -> Iterator[Pipeline]:
    with Pipeline(client, overlap=True) as pipeline:  # type: ignore[arg-type]
        yield pipeline


def train(pipeline: Pipeline, steps: int) -> list[list[int]]:
    """The loop of a worker; which pushes each step's values had."""
    seen = []
    for _ in range(steps):
        seen.append(pipeline.pull()["w"].tolist())
        pipeline.settle()
        pipeline.push(GRADIENT)
    pipeline.settle()
    return seen


@pytest.mark.parametrize("overlap", [True, False])
def test_values_are_brought_to_a_device_on_the_thread_that_fetched_them(client: FakeClient, overlap: bool) -> None:
    threads = []

    def upload(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        threads.append(threading.current_thread().name)
        return {name: np.append(value, 100) for name, value in values.items()}

    with Pipeline(client, overlap=overlap, upload=upload) as pipeline:  # type: ignore[arg-type]
        assert all(seen[-1] == 100 for seen in train(pipeline, 3))
    assert len(threads) == (4 if overlap else 3)
    assert (threading.current_thread().name in threads) is not overlap


def test_the_thread_takes_one_after_the_other_in_this_order(pipeline: Pipeline, client: FakeClient) -> None:
    train(pipeline, 3)
    assert client.done == ["pull 0", "pull 1", "push 0", "pull 2", "push 1", "pull 3", "push 2"]
    assert len(client.threads) == 1
    assert threading.current_thread().name not in client.threads


def test_the_values_of_a_step_have_all_own_pushes_but_the_last(pipeline: Pipeline) -> None:
    assert train(pipeline, 5) == [[], [], [0], [0, 1], [0, 1, 2]]


def test_step_does_not_wait_for_its_push_or_the_next_values(pipeline: Pipeline, client: FakeClient) -> None:
    client.hold("pull 1")
    client.hold("push 0")
    pipeline.pull()
    result = pipeline.push(GRADIENT)
    assert result == PushResult("sent", 0, 1)
    assert pipeline.step == 1
    client.let_go("pull 1")
    pipeline.pull()  # these values were there before the push was
    client.await_begun("push 0")
    client.let_go("push 0")
    assert pipeline.settle() == PushResult("accepted", 1, 1)


def test_push_result_is_returned_once(pipeline: Pipeline) -> None:
    assert pipeline.settle() is None
    pipeline.push(GRADIENT)
    assert pipeline.settle() == PushResult("accepted", 1, 1)
    assert pipeline.settle() is None


def test_the_last_push_is_settled_before_the_next_one(pipeline: Pipeline, client: FakeClient) -> None:
    pipeline.push(GRADIENT)
    with pytest.raises(errors.BadRequest, match="the last push is not settled"):
        pipeline.push(GRADIENT)
    pipeline.settle()
    pipeline.push(GRADIENT)
    pipeline.settle()
    assert client.applied == [0, 1]


def test_gradients_are_copied_where_they_travel_later(pipeline: Pipeline, client: FakeClient) -> None:
    pipeline.push(GRADIENT)
    (memory,) = client.prepared
    assert memory
    assert memory(1000).nbytes == 1000


def test_invalid_gradient_is_refused_at_once_and_not_sent(pipeline: Pipeline, client: FakeClient) -> None:
    with pytest.raises(errors.InvalidGradient):
        pipeline.push({"v": np.ones(3)})
    assert pipeline.settle() is None
    assert (pipeline.step, client.done) == (0, [])
    pipeline.push(GRADIENT)
    assert pipeline.settle()


def test_nan_is_raised_by_settle_and_training_continues(pipeline: Pipeline, client: FakeClient) -> None:
    client.fails["push 1"] = errors.NonFiniteGradient("w holds NaN")
    seen = []
    for step in range(4):
        seen.append(pipeline.pull()["w"].tolist())
        if step == 2:
            with pytest.raises(errors.NonFiniteGradient):
                pipeline.settle()
        else:
            pipeline.settle()
        assert pipeline.step == step
        pipeline.push(GRADIENT)
    pipeline.settle()
    assert client.applied == [0, 2, 3]
    assert seen == [[], [], [0], [0]]


@pytest.mark.parametrize("error", [errors.Fenced("declared lost"), errors.Unreachable("nobody there")], ids=repr)
@pytest.mark.parametrize("what", ["pull 0", "pull 1", "push 0"])
def test_error_is_raised_by_the_call_that_waits_for_it(
    pipeline: Pipeline, client: FakeClient, error: errors.ShoalError, what: str
) -> None:
    client.fails[what] = error
    raised = []
    for call in (pipeline.pull, lambda: pipeline.push(GRADIENT), pipeline.pull, pipeline.settle):
        try:
            call()
        except errors.ShoalError as caught:
            raised.append((call, caught))
    ((failed, found),) = raised
    assert found is error
    assert failed == (pipeline.settle if what == "push 0" else pipeline.pull)


def test_a_pull_that_failed_may_be_tried_again(pipeline: Pipeline, client: FakeClient) -> None:
    client.fails["pull 1"] = errors.Unreachable("away")
    pipeline.pull()
    pipeline.push(GRADIENT)
    with pytest.raises(errors.Unreachable):
        pipeline.pull()
    assert pipeline.pull()["w"].tolist() == [0]
    assert pipeline.step == 1


@pytest.mark.parametrize("call", ["skip", "barrier"])
def test_values_fetched_ahead_are_discarded_after_a_step_without_data(
    pipeline: Pipeline, client: FakeClient, call: str
) -> None:
    pipeline.pull()
    pipeline.push(GRADIENT)
    pipeline.settle()
    getattr(pipeline, call)()
    client.applied.append(99)  # by another worker
    assert pipeline.pull()["w"].tolist() == [0, 99]
    following = pipeline.step
    client.await_begun(f"pull {following + 1}")
    assert client.done == ["pull 0", "pull 1", "push 0", f"{call} 1", f"pull {following}", f"pull {following + 1}"]


@pytest.mark.parametrize("call", ["skip", "barrier"])
def test_fetch_ahead_completes_before_another_call(pipeline: Pipeline, client: FakeClient, call: str) -> None:
    client.hold("pull 1")
    pipeline.pull()
    client.await_begun("pull 1")
    with ThreadPoolExecutor(1) as other:
        called = other.submit(getattr(pipeline, call))
        assert not wait([called], timeout=0.1).done, "the call did not wait for the values"
        client.let_go("pull 1")
        called.result(PATIENCE_S)
    assert client.done == ["pull 0", "pull 1", f"{call} 0"]


def test_second_pull_of_a_step_keeps_the_step(pipeline: Pipeline, client: FakeClient) -> None:
    assert pipeline.pull()["w"].tolist() == []
    client.applied.append(99)
    assert pipeline.pull()["w"].tolist() == [99]
    assert pipeline.step == 0
    pipeline.push(GRADIENT)
    pipeline.settle()
    assert client.applied == [99, 0]


def test_values_after_pushes_without_pulls_are_fresh(pipeline: Pipeline, client: FakeClient) -> None:
    pipeline.pull()
    for _ in range(3):
        pipeline.push(GRADIENT)
        pipeline.settle()
    assert pipeline.pull()["w"].tolist() == [0, 1, 2]
    assert pipeline.step == 3


def test_close_ends_a_waiting_pull_and_drops_the_queued_push(client: FakeClient) -> None:
    before = threading.active_count()
    pipeline = Pipeline(client, overlap=True)  # type: ignore[arg-type]
    client.hold("pull 1")
    pipeline.pull()
    pipeline.push(GRADIENT)
    client.await_begun("pull 1")
    with ThreadPoolExecutor(1) as other:
        other.submit(pipeline.close).result(PATIENCE_S)
    assert client.applied == []
    assert threading.active_count() == before
    pipeline.close()  # again: nothing happens


@pytest.mark.parametrize("overlap", [False, True])
def test_the_last_barrier_ends_with_its_time_on_the_thread_of_its_caller(client: FakeClient, overlap: bool) -> None:
    with Pipeline(client, overlap=overlap) as pipeline:  # type: ignore[arg-type]
        pipeline.last_barrier(PATIENCE_S)
        client.hold("barrier 0")
        with pytest.raises(errors.Cancelled):
            pipeline.last_barrier(0.01)
    assert client.threads == {threading.current_thread().name}


@pytest.mark.parametrize("overlap", [False, True])
def test_each_push_has_its_learning_rate(client: FakeClient, overlap: bool) -> None:
    with Pipeline(client, overlap=overlap) as pipeline:  # type: ignore[arg-type]
        for rate in (0.5, None, 0.0):
            pipeline.pull()
            pipeline.push(GRADIENT, learning_rate=rate)
            pipeline.settle()
    assert client.rates == [0.5, None, 0.0]


def test_pipeline_without_overlap_behaves_as_the_client(client: FakeClient) -> None:
    with Pipeline(client, overlap=False) as pipeline:  # type: ignore[arg-type]
        assert train(pipeline, 2) == [[], [0]]
        assert pipeline.push(GRADIENT) == PushResult("accepted", 3, 3)
        assert pipeline.settle() is None
        pipeline.barrier()
        assert pipeline.skip() == PushResult("skipped", 0, 4)
        client.fails["push 4"] = errors.NonFiniteGradient("w holds NaN")
        with pytest.raises(errors.NonFiniteGradient):
            pipeline.push(GRADIENT)
        assert pipeline.step == 4
    assert client.done == ["pull 0", "push 0", "pull 1", "push 1", "push 2", "barrier 3", "skip 3", "push 4"]
    assert client.threads == {threading.current_thread().name}
    assert client.prepared == [None] * 4, "no copy: the arrays stay as they are until the call returns"
