"""ParameterServerStrategy before training begins and after its end, with servers that are objects of this process."""

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import shoal
from shoal import errors, optim
from shoal_distribute import ParameterServerStrategy, get_strategy, keras
from shoal_distribute.strategies.pulled_values import PulledValues
from shoal_distribute.strategies.server_variable import ServerVariable

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
Y = X @ np.array([[1.0], [-2.0], [3.0]], np.float32)


class Servers:
    """A client and its only session: gradient descent on arrays. `fails` is what a pull raises."""

    rank = 0

    def __init__(self) -> None:
        self.sessions, self.step, self.fails = 0, 0, cast(errors.ShoalError | None, None)
        self.values: dict[str, np.ndarray] = {}
        self.rate: Any = None

    def session(self, job: str, *, variables: Mapping[str, Any], optimizer: optim.Optimizer, **options: Any) -> Any:
        del job, options
        self.values = {name: np.array(it.values) for name, it in variables.items()}
        self.rate, self.sessions = optimizer.learning_rate, self.sessions + 1
        return self

    def pull(self) -> dict[str, np.ndarray]:
        if self.fails:
            raise self.fails
        return {name: it.copy() for name, it in self.values.items()}

    def push(self, gradients: Mapping[str, np.ndarray], **options: Any) -> None:
        del options
        for name, gradient in gradients.items():
            self.values[name] -= np.float32(self.rate) * gradient
        self.step += 1

    def set_learning_rate(self, rate: float) -> None:
        self.rate = rate

    def close(self, error: str = "") -> None:
        pass


@pytest.fixture
def servers() -> Servers:
    return Servers()


@pytest.fixture(params=[1, 2], ids=["one device", "two devices"])
def strategy(request: pytest.FixtureRequest, servers: Servers) -> Iterator[ParameterServerStrategy]:
    devices = ["/cpu:0", "/cpu:1"][: request.param]
    made = ParameterServerStrategy(client=cast(shoal.Client, servers), job="job", devices=devices)
    yield made
    made.close()


def compiled(strategy: ParameterServerStrategy, *layers: Any) -> keras.Sequential:
    with strategy.scope():
        model = keras.Sequential([*layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def test_the_last_values_stay_after_the_end(
    strategy: ParameterServerStrategy, servers: Servers, tmp_path: Path
) -> None:
    model = compiled(strategy, keras.Input((3,)))
    model.fit(X, Y, epochs=3, verbose=0)
    assert model.optimizer is not None
    strategy.close()
    trained = list(servers.values.values())
    np.testing.assert_array_equal(model.get_weights()[0], trained[0])
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(((X @ trained[0] + trained[1] - Y) ** 2).mean(), rel=1e-5)
    model.save(str(tmp_path / "model.keras"))
    loaded = keras.models.load_model(str(tmp_path / "model.keras"))
    np.testing.assert_array_equal(loaded.get_weights()[0], trained[0])
    assert (model.optimizer.iterations, servers.sessions) == (3, 1)
    for train in (model.fit, model.train_on_batch):
        with pytest.raises(errors.WrongContext, match="make another ParameterServerStrategy to train further"):
            train(X, Y)
    with pytest.raises(errors.WrongContext, match="cannot be assigned after training has begun"):
        model.set_weights(model.get_weights())


def test_values_that_are_not_known_after_the_end_are_refused(
    strategy: ParameterServerStrategy, servers: Servers
) -> None:
    model = compiled(strategy, keras.Input((3,)))
    model.fit(X, Y, verbose=0)
    servers.fails = errors.Unreachable("the servers are gone")
    strategy.close()
    with pytest.raises(errors.WrongContext, match="closed without its last values"):
        model.get_weights()


def test_the_wait_for_the_last_values_is_bounded() -> None:
    class Waiting:
        """A session whose pull waits for other workers, until it is closed."""

        def __init__(self) -> None:
            self.closed = threading.Event()

        def pull(self) -> dict[str, np.ndarray]:
            assert self.closed.wait(60)
            raise errors.Cancelled("the session is closed")

    session, values = Waiting(), PulledValues(last_pull_s=0.01)
    variable = ServerVariable(get_strategy(), values, "v", np.zeros(2), trainable=True)
    values.open(session)
    values.close(keeps=True)
    with pytest.raises(errors.WrongContext, match="closed without its last values"):
        variable.read()
    session.closed.set()


def test_the_times_of_a_worker(strategy: ParameterServerStrategy) -> None:
    model = compiled(strategy, keras.Input((3,)))
    model.fit(X, Y, batch_size=8, verbose=0)
    (times,) = strategy.timings().ranks
    assert (times.steps, times.local_reduce > 0) == (2, strategy.local_replicas > 1)


def test_a_rate_that_is_set_before_the_first_step_holds_from_there_on(
    strategy: ParameterServerStrategy, servers: Servers
) -> None:
    model = compiled(strategy, keras.Input((3,)))
    rates: list[float] = []
    callbacks: list[keras.callbacks.Callback] = [
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.5 / (epoch + 1)),
        keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_: rates.append(servers.rate)),
    ]
    model.fit(X, Y, epochs=2, verbose=0, callbacks=callbacks)
    assert rates == [0.5, 0.25]


@pytest.mark.parametrize(
    "callback", [keras.callbacks.EarlyStopping(restore_best_weights=True), keras.callbacks.BackupAndRestore("backup")]
)
def test_callbacks_that_set_variables_are_refused(
    strategy: ParameterServerStrategy, servers: Servers, callback: keras.callbacks.Callback
) -> None:
    model = compiled(strategy, keras.Input((3,)))
    match = rf"{type(callback).__name__} sets variables, .*ParameterServerStrategy\(checkpoints="
    with pytest.raises(errors.WrongContext, match=match):
        model.fit(X, Y, verbose=0, callbacks=[callback])
    assert servers.sessions == 0


def test_a_model_without_variables_is_built_by_its_first_batch_or_named(strategy: ParameterServerStrategy) -> None:
    model = compiled(strategy)
    with pytest.raises(errors.WrongContext, match="the model has no variables yet; give it an Input, or call build"):
        model.fit([(X, Y)], verbose=0)
    assert model.train_on_batch(X, Y) > 0
    model.fit([(X, Y)], verbose=0)
