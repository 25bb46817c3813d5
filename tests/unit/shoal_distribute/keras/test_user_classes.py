"""Layers, metrics and schedules of users by the base classes of Keras: variables, files, and limits of optimizers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import errors, optim
from shoal_distribute import MirroredStrategy, keras

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
Y = X.sum(1, keepdims=True)
DEVICES = [["/cpu:0"], ["/cpu:0", "/cpu:1"]]


class Scaled(keras.layers.Layer):
    """Has variables of its own. Its constructor takes no name."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.start, self.holder = start, None

    def build(self, shape: Any) -> None:
        ones = keras.initializers.Constant(self.start)
        self.scale = self.add_weight((shape[-1],), ones, name="scale", regularizer="l2", constraint="non_neg")
        self.offset = self.add_weight(shape=shape[-1], initializer="zeros")
        self.calls = self.add_weight(name="calls", initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:  # type: ignore[override]
        return x * self.scale + self.offset


@keras.utils.register_keras_serializable("tests")
class Halved(keras.layers.Layer):
    def __init__(self, parts: int = 2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.parts = parts

    def call(self, x: Any) -> Any:  # type: ignore[override]
        return x / self.parts


class Deviation(keras.metrics.Metric):
    def __init__(self, name: str = "deviation", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.total = self.add_weight(name="total")
        self.count = self.add_weight(name="count", initializer="ones")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(abs(np.asarray(y_true) - np.asarray(y_pred)).sum())
        self.count.assign(self.count + len(y_true))

    def result(self) -> Any:
        return self.total / self.count


class Rooted(keras.metrics.MeanSquaredError):
    def result(self) -> Any:
        return super().result() ** 0.5


class Falling(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, step: Any) -> Any:
        return self.rate / (step + 1)


def made() -> keras.Model:
    keras.utils.set_random_seed(2)
    return keras.Sequential([keras.Input((3,)), Scaled(0.5), Halved(4, name="quarter"), keras.layers.Dense(1)])


@pytest.mark.parametrize("devices", DEVICES)
def test_variables_of_layers_and_metrics(devices: list[str]) -> None:
    with MirroredStrategy(devices) as strategy, strategy.scope():
        model = made()
        model.compile("sgd", "mse", metrics=[Deviation(), Rooted(name="rooted")])
        layer: Any = model.layers[0]
        assert [it.name.partition("/")[2] for it in layer.weights] == ["scale", "variable", "calls"]
        assert len(layer.trainable_variables) == 2
        assert float(layer.losses[0]) == pytest.approx(0.01 * 3 * 0.25)
        before = layer.get_weights()[0]
        found = model.evaluate(X, Y, verbose=0, return_dict=True)
        errors_of = abs(model.predict(X, verbose=0) - Y)
        assert found["deviation"] == pytest.approx(errors_of.sum() / 9)  # the count begins with 1, once
        assert found["rooted"] == pytest.approx(np.sqrt((errors_of**2).mean()))
        model.fit(X, Y, verbose=0, batch_size=5)
        assert abs(layer.get_weights()[0] - before).min() > 0
        metric: Any = model.metrics[1]
        metric.reset_state()
        assert float(metric.total) == 0
        metric.count.assign(5)
        assert float(metric.count) == 5


def test_a_layer_may_hold_its_parent(tmp_path: Path) -> None:
    model, path = made(), str(tmp_path / "weights")
    first: Any = model.layers[0]
    first.holder = model
    assert model.count_params() == 11
    assert len(model.losses) == 1
    model.trainable = False
    assert not model.layers[2].trainable
    assert not model.trainable_variables
    model.save_weights(path)
    model.load_weights(path)


def test_layers_of_the_user_are_saved(tmp_path: Path) -> None:
    model, path = made(), str(tmp_path / "model.keras")
    model.layers[0].trainable = False
    model.save(path)
    with pytest.raises(errors.InvalidLayer, match=r"custom_objects=\{'Scaled': Scaled\}"):
        keras.models.load_model(path)
    loaded = keras.models.load_model(path, {"Scaled": Scaled})
    assert [it.name for it in loaded.layers] == [it.name for it in model.layers]
    assert len(loaded.trainable_variables) == 2
    assert [it.parts for it in loaded.layers if isinstance(it, Halved)] == [4]
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))


@pytest.mark.parametrize("devices", DEVICES)
def test_schedules_of_the_user(devices: list[str]) -> None:
    with MirroredStrategy(devices) as strategy, strategy.scope():
        optimizer = keras.optimizers.SGD(Falling(0.5))
        model = made()
        model.compile(optimizer, "mse")
        assert float(optimizer.learning_rate) == 0.5
        model.fit(X, Y, verbose=0, batch_size=4)
        assert float(optimizer.learning_rate) == pytest.approx(0.5 / 3)
    with pytest.raises(errors.InvalidOptimizer, match=r"use a schedule of shoal\.optim"):
        optim.SGD(Falling(0.5).schedule).to_proto()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"clipnorm": 1.0, "clipvalue": 1.0}, "clipnorm and clipvalue are given; give only one"),
        ({"clipvalue": 0.0}, "clipvalue is 0.0; it must be above 0"),
        ({"amsgrad": True}, r"Adam\(amsgrad=True\) is not supported"),
    ],
)
def test_wrong_limits(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(errors.InvalidOptimizer, match=match):
        keras.optimizers.Adam(**arguments)


class OfServers(MirroredStrategy):
    applies_constraints = False


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"clipnorm": 1.0}, "has clipnorm and clipvalue, but the servers of a OfServers .*; use global_clipnorm"),
        ({"learning_rate": Falling(0.5)}, "has a schedule that is a function, but the servers"),
    ],
)
def test_servers_get_nothing_that_they_cannot_compute(arguments: dict[str, Any], match: str) -> None:
    with OfServers(["/cpu:0"]) as strategy, strategy.scope():
        assert keras.optimizers.SGD(global_clipnorm=1.0).strategy is strategy
        with pytest.raises(errors.WrongContext, match=match):
            keras.optimizers.SGD(**arguments)


def test_dtypes_of_losses_and_metrics() -> None:
    assert keras.losses.MeanSquaredError(dtype="float32")(X, np.float64(X)).dtype == np.float32
    metric = keras.metrics.Mean(dtype="float32")
    assert metric(X).dtype == np.float32
    with pytest.raises(errors.BadRequest, match="deviation: dtype is 'mean'; give a dtype such as 'float32'"):
        Deviation(dtype="mean")
    assert float(keras.metrics.AUC(multi_label=True, label_weights=[1.0, 2.0]).result()) == 0
    assert len(np.asarray(keras.metrics.Precision([0.2, 0.5])([0, 1], [0.3, 0.7]))) == 2
