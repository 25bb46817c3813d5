"""Habits of Keras that `shoal.keras.DistributedOptimizer` keeps: python keras_habits.py COORDINATOR FOLDER.

KERAS_BACKEND chooses the backend. One worker trains, and an optimizer of Keras trains the same beside it.
"""

import sys
import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import shoal
import shoal.keras
from shoal import errors, optim

SAMPLES, FEATURES, BATCH = 48, 6, 8
_names = count()


def data() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
    return x, (x @ draw.normal(size=(FEATURES, 1))).astype(np.float32)


def network(policy: str = "float32", **options: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(8, activation="tanh", dtype=policy, name="hidden", **options)
    output = keras.layers.Dense(1, dtype=policy, name="output")
    model = keras.Sequential([keras.Input((FEATURES,)), hidden, output])
    model.dtype_policy = keras.dtype_policies.get(policy)
    return model


def adam(rate: Any = 1e-2) -> optim.Optimizer:
    return optim.Adam(rate, eps=1e-7, eps_uncorrected=True)


def distributed(client: shoal.Client, given: optim.Optimizer) -> Any:
    return shoal.keras.DistributedOptimizer(given, job=f"habit-{next(_names)}", client=client)


def fit(model: keras.Model, optimizer: Any, *callbacks: Any, epochs: int = 3) -> keras.Model:
    model.compile(optimizer, loss="mse")
    x, y = data()
    model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=[*callbacks])
    return model


def same(one: keras.Model, other: keras.Model, bound: float = 1e-5) -> None:
    for mine, wanted in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(mine, wanted, atol=bound, rtol=0)


def refused(work: Callable[[], object], told: str) -> None:
    with pytest.raises(errors.ShoalError, match=told):
        work()


def callbacks_change_the_rate(client: shoal.Client) -> None:
    def halved(_: int, rate: float) -> float:
        return rate / 2

    with distributed(client, adam()) as optimizer:
        model = fit(network(), optimizer, keras.callbacks.LearningRateScheduler(halved))
        same(model, fit(network(), keras.optimizers.Adam(1e-2), keras.callbacks.LearningRateScheduler(halved)))
        assert np.isclose(float(optimizer.learning_rate), 1e-2 / 8)


def the_schedule_of_the_job_is_shown(client: shoal.Client) -> None:
    given = optim.LinearLR(1e-2, steps=36)
    shown: list[float] = []
    with distributed(client, adam(given)) as optimizer:
        read = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: shown.append(float(optimizer.learning_rate)))
        fit(network(), optimizer, read)
    np.testing.assert_allclose(shown, [given.rate(6), given.rate(12), given.rate(18)], rtol=1e-6)


def an_unused_layer_stays(client: shoal.Client) -> None:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((FEATURES,))
    used = keras.layers.Dense(1, name="used")

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = used, keras.layers.Dense(2, name="unused")
            self.unused.build((None, 2))

        def call(self, x: Any) -> Any:
            return self.used(x)

    model = Model()
    model(inputs)
    before = model.unused.get_weights()
    start = used.get_weights()
    with distributed(client, adam()) as optimizer, warnings.catch_warnings(action="ignore"):
        fit(model, optimizer)
    assert all(np.array_equal(one, other) for one, other in zip(before, model.unused.get_weights(), strict=True))
    assert not np.array_equal(start[0], used.get_weights()[0])


def half_precision_trains(client: shoal.Client) -> None:
    for policy in ("mixed_float16", "mixed_bfloat16"):
        with distributed(client, adam()) as optimizer:
            model = fit(network(policy), optimizer, shoal.keras.ReportMetrics())
            job, steps = optimizer.session.job, optimizer.session.step
        assert steps > 0
        assert client.job(job).status().progress.loss > 0
        same(model, fit(network(policy), keras.optimizers.Adam(1e-2)), 2e-3)


def a_saved_model_loads(client: shoal.Client, folder: Path) -> None:
    path = folder / "model.keras"
    with distributed(client, adam()) as optimizer:
        model = fit(network(), optimizer, keras.callbacks.ModelCheckpoint(path))
    loaded = keras.models.load_model(path)
    same(loaded, model, 0)
    x, y = data()
    assert np.isclose(loaded.evaluate(x, y, verbose=0), model.evaluate(x, y, verbose=0))
    loaded.save(folder / "again.keras")
    fit(loaded, keras.optimizers.Adam(1e-2), epochs=1)
    refused(lambda: keras.models.load_model(folder / "again.keras").fit(x, y, verbose=0), "was loaded with a model")


def embeddings_train(client: shoal.Client) -> None:
    """Their gradients are sparse in TensorFlow, where Keras' own Adam squares the parts of a gradient one by one."""

    def model() -> keras.Model:
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Embedding(5, 3, name="table"), keras.layers.Flatten(), keras.layers.Dense(1, name="out")]
        return keras.Sequential([keras.Input((2,), dtype="int32"), *layers])

    x, y = np.arange(20, dtype=np.int32).reshape(10, 2) % 5, np.ones((10, 1), np.float32)
    one, other = model(), model()
    with distributed(client, optim.SGD(0.1)) as optimizer:
        for each, given in ((one, optimizer), (other, keras.optimizers.SGD(0.1))):
            each.compile(given, loss="mse")
            each.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0)
    same(one, other)


def xla_of_tensorflow_is_refused(client: shoal.Client) -> None:
    model = network()
    model.compile(distributed(client, adam()), loss="mse", jit_compile=True)
    refused(lambda: model.fit(*data(), verbose=0), "jit_compile=False")


def a_constraint_is_refused(client: shoal.Client) -> None:
    model = network(kernel_constraint="non_neg")
    refused(lambda: fit(model, distributed(client, adam())), "hidden/kernel' has a constraint")


def main(address: str, folder: str) -> None:
    with shoal.Client(address) as client:
        callbacks_change_the_rate(client)
        the_schedule_of_the_job_is_shown(client)
        an_unused_layer_stays(client)
        half_precision_trains(client)
        a_saved_model_loads(client, Path(folder))
        embeddings_train(client)
        a_constraint_is_refused(client)
        if keras.config.backend() == "tensorflow":
            xla_of_tensorflow_is_refused(client)


if __name__ == "__main__":
    main(*sys.argv[1:])
