"""`fit`, `evaluate`, `predict` and loops of one's own: the same under every strategy, and their callbacks."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import shoal
from shoal import errors
from shoal_distribute import (
    CentralStorageStrategy,
    GradientTape,
    MirroredStrategy,
    OneDeviceStrategy,
    PerReplica,
    ReduceOp,
    Strategy,
    compute_average_loss,
    keras,
    scale_regularization_loss,
)
from shoal_distribute.keras.training.progress import Progbar
from shoal_distribute.strategies.step_metrics import StepMetrics

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(21, 4, 4, 2)), RNG.integers(0, 3, 21)
DEVICES = ["/cpu:0", "/cpu:1"]


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(5)
    yield
    keras.config.set_floatx("float32")


def made(optimizer: Any = None) -> keras.Model:
    inputs = keras.Input((4, 4, 2))
    x = keras.layers.Conv2D(3, 3, padding="same", activation="relu", kernel_regularizer="l2")(inputs)
    x = keras.layers.Add()([x, keras.layers.Conv2D(3, 1)(inputs)])
    model = keras.Model(inputs, keras.layers.Dense(3, "softmax")(keras.layers.GlobalAveragePooling2D()(x)))
    model.compile(optimizer or keras.optimizers.Adam(0.05), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def fitted(strategy: Strategy | None) -> tuple[list[np.ndarray], dict[str, list[float]]]:
    keras.utils.set_random_seed(5)
    with strategy.scope() if strategy else nullcontext():
        model = made()
    history = model.fit(X, Y, batch_size=8, epochs=4, validation_data=(X, Y), verbose=0)
    return model.get_weights(), history.history


@pytest.fixture(scope="module")
def alone() -> tuple[list[np.ndarray], dict[str, list[float]]]:
    keras.config.set_floatx("float64")
    return fitted(None)


@pytest.mark.parametrize("kind", ["mirrored", "three", "central", "one"])
def test_fit_is_the_same_under_every_strategy(kind: str, alone: Any) -> None:
    strategies: dict[str, Callable[[], Strategy]] = {
        "mirrored": lambda: MirroredStrategy(DEVICES),
        "three": lambda: MirroredStrategy([*DEVICES, "/cpu:2"]),
        "central": lambda: CentralStorageStrategy(DEVICES),
        "one": lambda: OneDeviceStrategy("/cpu:0"),
    }
    strategy = strategies[kind]()
    weights, history = fitted(strategy)
    for found, expected in zip(weights, alone[0], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
    assert history.keys() == {"loss", "accuracy", "val_loss", "val_accuracy"}
    for name, values in history.items():
        assert values == pytest.approx(alone[1][name], rel=1e-10)
    strategy.close()


def test_a_loop_of_ones_own_gives_the_same() -> None:
    found = []
    for custom in (False, True):
        keras.utils.set_random_seed(5)
        strategy = MirroredStrategy(DEVICES)
        with strategy.scope():
            model = made(keras.optimizers.SGD(0.1, momentum=0.9))
            loss_object = keras.losses.SparseCategoricalCrossentropy(reduction=None)
            accuracy = keras.metrics.SparseCategoricalAccuracy()

        def step(batch: Any) -> Any:
            x, y = batch
            with GradientTape() as tape:
                outputs = model(x, training=True)  # noqa: B023 - called within the loop
                loss = compute_average_loss(loss_object(y, outputs), global_batch_size=10)  # noqa: B023
                loss = loss + scale_regularization_loss(model.losses)  # noqa: B023
            gradients = tape.gradient(loss, model.trainable_variables)  # noqa: B023
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))  # type: ignore[union-attr] # noqa: B023
            accuracy.update_state(y, outputs)  # noqa: B023
            return loss

        if custom:
            for start in (0, 10):
                parts = [(X[i : i + 5], Y[i : i + 5]) for i in (start, start + 5)]
                losses = strategy.run(step, args=(PerReplica(parts),))
                assert float(strategy.reduce(ReduceOp.SUM, losses)) > 0
            assert 0 <= float(accuracy.result()) <= 1
        else:
            model.fit(X[:20], Y[:20], batch_size=10, shuffle=False, verbose=0)
        found.append(model.get_weights())
        strategy.close()
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_a_batch_may_leave_a_replica_without_samples() -> None:
    found = []
    for devices in (["/cpu:0"], DEVICES):
        keras.utils.set_random_seed(5)
        strategy = MirroredStrategy(devices)
        with strategy.scope():
            model = made()
        model.fit(X[:9], Y[:9], batch_size=8, verbose=0)
        assert model.predict(X[:9], batch_size=8, verbose=0).shape == (9, 3)
        found.append([model.evaluate(X[:9], Y[:9], batch_size=8, verbose=0), *model.get_weights()])
        strategy.close()
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)


@pytest.mark.parametrize("devices", [["/cpu:0"], DEVICES])
def test_penalties_are_part_of_the_loss_and_counted_once(devices: list[str]) -> None:
    x, y = X[:8].reshape(8, -1), Y[:8].astype(float)[:, None]
    with MirroredStrategy(devices) as strategy, strategy.scope():
        layer = keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.5), activity_regularizer="l1")
        model = keras.Sequential([keras.Input((32,)), layer, keras.layers.Activation("linear")])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        kernel, bias = model.get_weights()
        outputs = x @ kernel + bias
        penalties = [0.01 * abs(outputs).sum() / 8, 0.5 * (kernel**2).sum()]
        loss = ((outputs - y) ** 2).mean() + sum(penalties)
        assert model.evaluate(x, y, batch_size=8, verbose=0) == pytest.approx(loss)
        assert model.fit(x, y, batch_size=8, verbose=0).history["loss"] == pytest.approx([loss])
        slope = (2 * (outputs - y) + 0.01 * np.sign(outputs)) / 8
        np.testing.assert_allclose(layer.get_weights()[0], kernel - 0.1 * (x.T @ slope + kernel))
        model(x)
        added, own = model.losses
        assert float(own) == pytest.approx(0.5 * (layer.get_weights()[0] ** 2).sum())
        model(x[:4])
        assert 0 < float(model.losses[0]) != float(added)  # those of the last call alone
        layer.trainable = False
        assert len(model.losses) == 1


class Reporting(MirroredStrategy):
    """One that keeps what the replicas report in each step."""

    reports_metrics = True

    def __init__(self) -> None:
        super().__init__(DEVICES)
        self.reported: list[tuple[Mapping[str, float], int]] = []

    def report(self, metrics: Mapping[str, float], samples: int) -> None:
        self.reported.append((metrics, samples))


def test_each_replica_reports_the_metrics_of_its_samples_in_a_step() -> None:
    strategy = Reporting()
    with strategy.scope():
        model = made(keras.optimizers.SGD(0.0))  # the metrics of a sample stay the same
    model.fit(X, Y, batch_size=20, epochs=2, validation_data=(X, Y), shuffle=False, verbose=0)
    assert sorted(samples for _, samples in strategy.reported) == [0, 0, 1, 1, 10, 10, 10, 10]
    assert all(metrics == {"loss": 0.0, "accuracy": 0.0} for metrics, samples in strategy.reported if not samples)
    for name, expected in model.evaluate(X, Y, verbose=0, return_dict=True).items():
        mean = sum(metrics[name] * samples for metrics, samples in strategy.reported) / 42
        assert mean == pytest.approx(expected, rel=1e-10)
    strategy.close()


def test_accuracy_forgets_a_step_that_is_repeated() -> None:
    accuracy = keras.metrics.get("accuracy")
    assert float(accuracy.result()) == 0.0
    kept = accuracy.snapshot()
    accuracy.update_state(np.array([1]), np.array([[0.0, 1.0]]))
    accuracy.restore_snapshot(kept)
    assert float(accuracy.result()) == 0.0
    accuracy.update_state(np.array([0, 1]), np.array([[0.0, 1.0]] * 2))
    kept = accuracy.snapshot()
    accuracy.update_state(np.array([1]), np.array([[0.0, 1.0]]))
    assert accuracy.value_since(kept) == 1.0
    accuracy.restore_snapshot(kept)
    assert float(accuracy.result()) == float(accuracy.local_result()) == 0.5


def test_the_metrics_of_replicas_are_joined_by_their_samples() -> None:
    metrics = StepMetrics()
    assert metrics.joined(None) == {}
    metrics.add(0, {"loss": 1.0, "accuracy": 0.5}, 3)
    metrics.add(1, {"loss": 2.0, "accuracy": 1.0}, 1)
    assert metrics.joined(None) == {"loss": 1.25, "accuracy": 0.625}
    metrics.add(0, {"loss": 0.0, "accuracy": 0.0}, 0)
    assert metrics.joined(None) == {"loss": 2.0, "accuracy": 1.0}
    metrics.add(1, {"loss": 0.0, "accuracy": 0.0}, 0)
    assert metrics.joined(None) == {}
    metrics.clear()
    assert metrics.joined(None) == {}


def test_moving_averages_are_those_of_the_replicas() -> None:
    strategy = MirroredStrategy(DEVICES)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization(momentum=0.5)])
        model.compile("sgd", "mse")
    x = RNG.normal(size=(8, 2))
    model.fit(x, x, batch_size=8, shuffle=False, verbose=0)
    means = [x[:4].mean(axis=0) / 2, x[4:].mean(axis=0) / 2]
    np.testing.assert_allclose(model.weights[2].values, means)
    np.testing.assert_allclose(model.weights[2].numpy(), np.mean(means, axis=0))
    strategy.close()


def test_augmentation_differs_between_replicas_and_steps_and_follows_the_seed() -> None:
    found = []
    for _ in range(2):
        keras.utils.set_random_seed(5)
        with MirroredStrategy(DEVICES) as strategy, strategy.scope():
            layers = [keras.layers.RandomTranslation(0.3, 0.3), keras.layers.RandomBrightness(0.2, (-9, 9))]
            model = keras.Sequential([keras.Input((4, 4, 2)), *layers])
            model.trainable = False  # has no effect on random layers
            outputs = [strategy.run(lambda: model(X[:1], training=True)).values for _ in range(2)]  # noqa: B023
            np.testing.assert_array_equal(model.predict(X, verbose=0), X)
        found.append(np.array([np.asarray(it) for step in outputs for it in step]))
    np.testing.assert_array_equal(found[0], found[1])
    assert len({it.tobytes() for it in found[0]}) == 4


def test_dropout_differs_between_replicas_and_steps() -> None:
    strategy = MirroredStrategy(DEVICES)
    with strategy.scope():
        layer = keras.layers.Dropout(0.5)
    draws = [strategy.run(lambda: layer(np.ones((1, 64)), training=True)).values for _ in range(2)]
    for a, b in itertools.combinations([it.numpy() for both in draws for it in both], 2):
        assert (a != b).any()
    strategy.close()


@pytest.mark.parametrize("devices", [["/cpu:0"], DEVICES], ids=str)
def test_pipelines(devices: list[str]) -> None:
    pipeline = shoal.data.from_arrays(X, Y).batch(8)
    found = []
    for distributes in (False, True):
        keras.utils.set_random_seed(5)
        strategy = MirroredStrategy(devices)
        with strategy.scope():
            model = made()
        dataset = strategy.experimental_distribute_dataset(pipeline) if distributes else pipeline
        history = model.fit(dataset, epochs=2, validation_data=pipeline, verbose=0)
        found.append(history.history["loss"] + history.history["val_loss"])
        strategy.close()
    keras.utils.set_random_seed(5)
    history = made().fit(X, Y, batch_size=8, epochs=2, shuffle=False, validation_data=(X, Y), verbose=0)
    assert found[0] == pytest.approx(history.history["loss"] + history.history["val_loss"], rel=1e-10)
    assert found[1] == pytest.approx(found[0], rel=1e-10)


def test_single_batches() -> None:
    model = made()
    loss, accuracy = model.test_on_batch(X, Y)
    assert model.evaluate(X, Y, verbose=0) == pytest.approx([loss, accuracy])
    model.reset_metrics()
    assert model.train_on_batch(X, Y, return_dict=True)["loss"] == pytest.approx(loss)
    np.testing.assert_array_equal(model.predict_on_batch(X), model.predict(X, verbose=0))


def test_data_sets_weights_and_splits() -> None:
    model = made()
    batches = [(X[:4], Y[:4], np.ones(4)), (X[4:10], Y[4:10], np.zeros(6))]
    history = model.fit(batches, steps_per_epoch=3, epochs=2, verbose=0)
    assert len(history.history["loss"]) == 2
    weighted = model.evaluate(X[:10], Y[:10], sample_weight=np.r_[np.ones(4), np.zeros(6)], verbose=0, return_dict=True)
    penalty = float(sum(model.losses))
    few = model.evaluate(X[:4], Y[:4], verbose=0)[0]
    assert weighted["loss"] - penalty == pytest.approx((few - penalty) * 4 / 10)
    assert "val_loss" in model.fit(X, Y, validation_split=0.2, verbose=0).history
    np.testing.assert_allclose(model.predict([X], verbose=0), model.predict(iter([X]), steps=1, verbose=0))


def test_keras_callbacks() -> None:
    model, rates = made(keras.optimizers.SGD(0.1)), []
    stop = keras.callbacks.EarlyStopping("loss", min_delta=100, patience=2, restore_best_weights=True)
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: rates.append(float(model.optimizer.learning_rate)))  # type: ignore[union-attr]
    history = model.fit(X, Y, epochs=9, verbose=0, callbacks=[stop, schedule, note])
    assert rates == pytest.approx([0.1, 0.05, 0.1 / 3])
    assert history.epoch == [0, 1, 2]
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=100)
    model.fit(X, Y, epochs=3, verbose=0, callbacks=[plateau])
    assert model.optimizer is not None
    assert model.optimizer.learning_rate.numpy() == pytest.approx(0.1 / 3 / 4)
    with pytest.raises(errors.BadRequest, match="there is no method 'on_epoch_ends'"):
        keras.callbacks.LambdaCallback(on_epoch_ends=print)


def test_shoals_callbacks_get_events() -> None:
    events: list[shoal.events.Event] = []
    made().fit(X, Y, epochs=2, verbose=0, validation_data=(X, Y), callbacks=[events.append])
    kinds = [type(it).__name__ for it in events]
    assert kinds == ["StateChanged", *["MetricsReported", "EvaluationEnded"] * 2, "StateChanged"]
    reported, evaluated = events[3], events[4]
    assert isinstance(reported, shoal.events.MetricsReported)
    assert isinstance(evaluated, shoal.events.EvaluationEnded)
    assert reported.step == 2
    assert evaluated.result.values.keys() == {"loss", "accuracy"}


def test_tensorboard_gets_the_epochs(tmp_path: Any) -> None:
    pytest.importorskip("tensorboardX")
    made().fit(X, Y, epochs=1, verbose=0, callbacks=[keras.callbacks.TensorBoard(tmp_path)])
    assert list(tmp_path.rglob("*.shoal"))


def test_files_of_callbacks(tmp_path: Any) -> None:
    best = keras.callbacks.ModelCheckpoint(tmp_path / "best-{epoch}.npz", "loss", save_best_only=True, mode="max")
    model = made(keras.optimizers.SGD(0.1))
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[best])
    assert [it.name for it in tmp_path.iterdir()] == ["best-1.npz"]

    def fail(epoch: int, _logs: Any) -> None:
        if epoch == 1:
            raise RuntimeError("the machine is gone")

    failing = keras.callbacks.LambdaCallback(on_epoch_begin=fail)
    keras.utils.set_random_seed(5)
    with pytest.raises(RuntimeError):
        made().fit(X, Y, epochs=3, shuffle=False, verbose=0, callbacks=[failing, _backup(tmp_path)])
    again = made()
    history = again.fit(X, Y, epochs=3, shuffle=False, verbose=0, callbacks=[_backup(tmp_path)])
    assert history.epoch == [1, 2]
    keras.utils.set_random_seed(5)
    through = made()
    through.fit(X, Y, epochs=3, shuffle=False, verbose=0)
    np.testing.assert_allclose(again.get_weights()[0], through.get_weights()[0], rtol=1e-12)
    assert not list((tmp_path / "backup").iterdir())


def _backup(folder: Any) -> keras.callbacks.Callback:
    return keras.callbacks.BackupAndRestore(folder / "backup")


def test_the_progress_bar_is_that_of_keras(capsys: pytest.CaptureFixture[str]) -> None:
    now, text = itertools.count(), list[str]()
    bar = Progbar(2, 1, text.append, lambda: float(next(now)))
    assert bar.is_due()
    bar.update(1, {"loss": 0.5})
    bar.update(2, {"loss": 0.00025, "accuracy": 0.0}, finished=True)
    assert text[0] == "\r1/2 ━━━━━━━━━━           2s 2s/step - loss: 0.5000"
    assert text[1] == "\r2/2 ━━━━━━━━━━━━━━━━━━━━ 3s 2s/step - loss: 2.5000e-04 - accuracy: 0.0000\n"
    made().fit(X, Y, epochs=1, verbose=2)
    shown = capsys.readouterr().out
    assert shown.startswith("Epoch 1/1\n1/1 0s ")
    assert " - loss: " in shown


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"x": None}, errors.BadRequest, "there are no inputs"),
        ({"x": 3}, errors.BadRequest, "x is a int"),
        ({"x": [(X, Y)], "batch_size": 3}, errors.BadRequest, "batch_size cannot be given with a data set"),
        ({"x": X.tolist(), "y": Y}, errors.BadRequest, "x is a list: make an array of it"),
        ({"x": X, "y": Y[:3]}, errors.InvalidData, "the arrays have 3, 21 samples"),
        ({"x": X, "y": None}, errors.InvalidData, "the data has no labels"),
        ({"x": X, "y": Y + 3}, errors.InvalidData, "got the label 5 for outputs of 3 classes"),
        ({"x": X, "y": np.eye(3)[Y]}, errors.InvalidShape, "use categorical_crossentropy for one-hot"),
        ({"x": X, "y": Y, "validation_split": 1.0}, errors.InvalidData, "both parts need samples"),
        ({"x": X, "y": Y, "callbacks": [3]}, errors.BadRequest, "callbacks has 3"),
    ],
)
def test_wrong_data_is_explained(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    model = made()
    with pytest.raises(error, match=match):
        model.fit(**arguments, verbose=0)


def test_what_must_come_before() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(errors.BadRequest, match="is not compiled; call compile"):
        model.fit(X, Y, verbose=0)
    model.compile("sgd")
    with pytest.raises(errors.BadRequest, match="compiled without a loss"):
        model.fit(X, Y, verbose=0)
    strategy = MirroredStrategy(DEVICES)
    with strategy.scope():
        divided = made()
    with pytest.raises(errors.InvalidData, match="batch_size is 1, but 2 replicas"):
        divided.fit(X, Y, batch_size=1, verbose=0)
    strategy.close()
