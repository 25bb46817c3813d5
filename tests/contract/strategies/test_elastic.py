"""Elastic groups over a real coordinator, with processes that are threads of this process."""

import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

import shoal
from shoal import errors, optim
from shoal.data import from_arrays
from shoal_coordinator.process import CoordinatorConfig, start_coordinator
from shoal_distribute import MultiWorkerMirroredStrategy, OneDeviceStrategy, Strategy, keras
from support.programs.fitted_model import X, Y, fitted
from support.waiting import wait_until

T = TypeVar("T")
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def coordinator() -> Iterator[str]:
    running = start_coordinator(CoordinatorConfig(listen="127.0.0.1:0"), CollectorRegistry())
    yield running.address
    running.stop()


class Processes:
    """Threads that each have a strategy of one elastic group."""

    def __init__(self, coordinator: str, name: str, work: Callable[[MultiWorkerMirroredStrategy], T]) -> None:
        self._coordinator, self._name, self._work = coordinator, name, work
        self._threads: list[threading.Thread] = []
        self.results: list[Any] = []

    def start(self, count: int) -> None:
        for _ in range(count):
            thread = threading.Thread(target=self._run, daemon=True)
            self._threads.append(thread)
            thread.start()

    def ended(self) -> list[Any]:
        for thread in self._threads:  # it may grow
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        return self.results

    def _run(self) -> None:
        try:
            strategy = MultiWorkerMirroredStrategy(
                devices=["/cpu:0"], workers=3, coordinator=self._coordinator, group_name=self._name
            )
            try:
                self.results.append(self._work(strategy))
            finally:
                strategy.close()
        except BaseException as error:
            self.results.append(error)


class Gives(Exception):
    """The process gives up."""


def test_survivors_go_on_and_a_new_process_takes_their_state(coordinator: str) -> None:
    def work(strategy: MultiWorkerMirroredStrategy) -> tuple[int, float, dict[int, int]]:
        with strategy.scope():
            optimizer = optim.Momentum(1.0, momentum=0.5)
            weights = strategy.create_variable("w", np.full(5, float(strategy.rank)))
            scalar = strategy.create_variable("scalar", np.array(float(strategy.rank)))
            strategy.adopt_optimizer(optimizer)
        sizes: dict[int, int] = {}

        def step(number: int) -> None:
            if number == 4 and strategy.input_pipelines == 3 and strategy.rank == 1:
                raise Gives
            if number == 8 and strategy.input_pipelines == 2:
                if strategy.rank == 0:
                    processes.start(1)
                while True:  # until the new process joins
                    strategy.reduce("sum", 1.0)
            strategy.run(lambda: strategy.apply_gradients(optimizer, [(np.ones(5), weights), (np.ones(()), scalar)]))
            sizes[number] = strategy.num_replicas_in_sync

        assert strategy.progress == 0  # until the process takes the state of another one
        while strategy.progress < 12:
            strategy.elastic(step, strategy.progress)
        assert strategy.iterations(optimizer) == strategy.progress
        assert np.ptp(weights.numpy()) == 0
        assert scalar.numpy() == weights.numpy()[0]
        return strategy.progress, float(weights.numpy()[0]), sizes

    processes = Processes(coordinator, "custom", work)
    processes.start(3)
    results = processes.ended()
    failed = [it for it in results if isinstance(it, BaseException)]
    assert [type(it) for it in failed] == [Gives]
    done = [it for it in results if it not in failed]
    assert len(done) == 3
    assert len({(progress, value) for progress, value, _ in done}) == 1
    sizes = {step: size for _, _, own in done for step, size in own.items()}
    assert [sizes[number] for number in range(12)] == [3] * 4 + [2] * 4 + [3] * 4
    weights = velocity = 0.0
    for number in range(12):
        velocity = 0.5 * velocity + sizes[number]
        weights -= velocity
    assert done[0][1] == weights


def test_a_step_that_was_applied_before_a_loss_is_not_repeated(coordinator: str) -> None:
    def work(strategy: MultiWorkerMirroredStrategy) -> tuple[int, int]:
        with strategy.scope():
            optimizer = optim.SGD(1.0)
            weights = strategy.create_variable("w", np.zeros(1))
            strategy.adopt_optimizer(optimizer)

        def step(number: int) -> None:
            strategy.run(lambda: strategy.apply_gradients(optimizer, [(np.ones(1), weights)]))
            if number == 2 and strategy.input_pipelines == 3 and strategy.rank == 1:
                raise Gives
            strategy.reduce("sum", 1.0)

        while strategy.progress < 4:
            strategy.elastic(step, strategy.progress)
        return strategy.iterations(optimizer), round(float(weights.numpy()[0]))

    processes = Processes(coordinator, "applied", work)
    processes.start(3)
    done = [it for it in processes.ended() if not isinstance(it, Gives)]
    assert done == [(4, -(3 * 3 + 2))] * 2


@pytest.mark.parametrize("kind", ["arrays", "data set"])
def test_fit_goes_on_with_the_samples_of_all_batches(coordinator: str, kind: str) -> None:
    class Changes(keras.callbacks.Callback):
        """In step 10, a process gives up. In step 22, another one joins."""

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            strategy = self.model.strategy
            assert self.model.optimizer
            step, size = self.model.optimizer.iterations, strategy.input_pipelines
            if step == 10 and size == 3 and strategy.input_pipeline_id == 2:
                raise Gives
            if step == 22 and size == 2:
                if strategy.input_pipeline_id == 0:
                    processes.start(1)
                while True:  # until the new process joins
                    strategy.reduce("sum", 1.0)

    def work(strategy: MultiWorkerMirroredStrategy) -> list[np.ndarray]:
        data = (X, Y) if kind == "arrays" else (from_arrays(X, Y).batch(8), None)
        return fitted(strategy, callbacks=[Changes()], data=data, validation_data=(X, Y))[0]

    processes = Processes(coordinator, f"fit-{kind[0]}", work)
    processes.start(3)
    results = processes.ended()
    assert sum(isinstance(it, Gives) for it in results) == 1
    expected, _ = fitted(None)
    done = [it for it in results if not isinstance(it, BaseException)]
    assert len(done) == 3
    for weights in done:
        for own, wanted in zip(weights, expected, strict=True):
            np.testing.assert_allclose(own, wanted, rtol=1e-10)


def loses_a_rank() -> None:
    raise errors.RankLost("rank 1 of 2 has ended")


def test_evaluate_begins_again_when_a_process_is_lost_or_joins(coordinator: str) -> None:
    failed = threading.Event()

    class Joins(keras.callbacks.Callback):
        """In the second evaluation, another process joins."""

        def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
            strategy = self.model.strategy
            if batch == 1 and strategy.input_pipelines == 2:
                if strategy.input_pipeline_id == 0:
                    processes.start(1)
                while True:  # until the new process joins
                    strategy.reduce("sum", 1.0)

    def evaluated(strategy: Strategy) -> tuple[list[float], list[float]]:
        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, dtype="float64", name="head")])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("sgd", loss, metrics=["accuracy"])
        model.set_weights([np.full((6, 3), 0.1) * np.arange(3), np.zeros(3)])
        model.fit(X, Y, batch_size=16, epochs=2, verbose=0, shuffle=False)
        if strategy.input_pipeline_id == 2 and not failed.is_set():
            failed.set()
            raise Gives
        first = model.evaluate(X, Y, batch_size=8, verbose=0)
        return first, model.evaluate(X[:16], Y[:16], batch_size=8, verbose=0, callbacks=[Joins()])

    processes = Processes(coordinator, "evaluates", evaluated)
    processes.start(3)
    done = [it for it in processes.ended() if not isinstance(it, Gives)]
    first, second = evaluated(OneDeviceStrategy("/cpu:0"))
    assert len(done) == 3
    np.testing.assert_allclose([it[1] for it in done], [second] * 3)
    assert sum(np.allclose(it[0], first) for it in done) == 2  # the process that joined has not evaluated


def test_a_group_predicts_and_evaluates_before_the_first_fit(coordinator: str) -> None:
    failed = threading.Event()

    class Changes(keras.callbacks.Callback):
        """In the first evaluation, a process gives up. In the second one, another joins."""

        def __init__(self, evaluation: int) -> None:
            super().__init__()
            self._evaluation = evaluation

        def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
            strategy = self.model.strategy
            if batch == 1 and self._evaluation == 0 and strategy.input_pipeline_id == 2 and not failed.is_set():
                failed.set()
                raise Gives
            if batch == 1 and self._evaluation == 1 and strategy.input_pipelines == 2:
                if strategy.input_pipeline_id == 0:
                    processes.start(1)
                while True:  # until the new process joins
                    strategy.reduce("sum", 1.0)

    def work(strategy: Strategy) -> list[np.ndarray]:
        with strategy.scope():  # a model whose first batch makes its variables
            model = keras.Sequential([keras.layers.Dense(3, dtype="float64", name="head")])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("sgd", loss, metrics=["accuracy"])
        before = model.predict(X, verbose=0)
        model.set_weights([np.full((6, 3), 0.1) * np.arange(3), np.zeros(3)])
        # Some processes get no sample, and so do not know the kind of "accuracy" yet.
        one = model.evaluate(X[:1], Y[:1], verbose=0)
        found = [model.evaluate(X, Y, batch_size=8, verbose=0, callbacks=[Changes(number)]) for number in (0, 1)]
        model.fit(X, Y, batch_size=16, epochs=2, verbose=0, shuffle=False)
        return [before, *map(np.asarray, found), *model.get_weights(), np.asarray(one)]

    processes = Processes(coordinator, "before", work)
    processes.start(3)
    done = [it for it in processes.ended() if not isinstance(it, Gives)]
    expected = work(OneDeviceStrategy("/cpu:0"))
    assert len(done) == 3
    for part in (2, 3, 4):
        for own in done:
            np.testing.assert_allclose(own[part], expected[part], rtol=1e-10)
    for part in (1, 5):
        assert sum(np.allclose(own[part], expected[part]) for own in done) == 2  # the one that joined has not evaluated
    assert len({own[0].tobytes() for own in done}) <= 2, "the first processes have the values of one"


def test_the_coordinator_shows_the_times_of_a_group(coordinator: str) -> None:
    strategy = MultiWorkerMirroredStrategy(devices=["/cpu:0"], workers=1, coordinator=coordinator, group_name="shown")
    with shoal.Client(coordinator) as client:
        with strategy:
            strategy.reduce("sum", 1.0)
            wait_until(lambda: client.group("shown").members[0].times.calls > 0, what="a heartbeat has told the times")
            assert [it.size for it in client.groups() if it.name == "shown"] == [1]
        with pytest.raises(errors.UnknownGroup):
            client.group("shown")


def test_mistakes_are_named(coordinator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.BadRequest, match="give workers=N"):
        MultiWorkerMirroredStrategy(devices=["/cpu:0"], coordinator=coordinator)
    monkeypatch.setenv("SHOAL_COORDINATOR", coordinator)
    with pytest.raises(errors.BadRequest, match="give workers=N"):
        MultiWorkerMirroredStrategy(devices=["/cpu:0"])
    with pytest.raises(errors.LimitExceeded, match="the limit GROUP_RANKS is 256"):
        MultiWorkerMirroredStrategy(devices=["/cpu:0"], coordinator=coordinator, workers=257, group_name="large")
    with pytest.raises(errors.BadRequest, match="has 2 ranks, but a minimum of 3; give 1 to 2"):
        MultiWorkerMirroredStrategy(
            devices=["/cpu:0"], coordinator=coordinator, workers=2, min_workers=3, group_name="minimum"
        )

    monkeypatch.delenv("SHOAL_COORDINATOR")
    with MultiWorkerMirroredStrategy(devices=["/cpu:0"]) as fixed, pytest.raises(errors.RankLost) as lost:
        fixed.elastic(loses_a_rank)
    assert lost.value.__notes__ == ["start all processes again, from a checkpoint, or use an elastic group (workers=N)"]

    def work(strategy: MultiWorkerMirroredStrategy) -> int:
        own = strategy.create_variable("w", np.zeros(2 + strategy.rank))
        return strategy.run(own.read).size  # type: ignore[no-any-return]  # as `run` returns anything

    processes = Processes(coordinator, "others", work)
    processes.start(3)
    assert sum(isinstance(it, errors.RanksDisagree) for it in processes.ended()) == 2
