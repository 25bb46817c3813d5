"""Arguments of `compile` and `fit`: forms that Keras also takes, and what is said of wrong ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import errors
from shoal_distribute import MirroredStrategy, keras

X, Y = np.ones((8, 2), np.float32), np.ones(8, np.float32)


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.last = keras.layers.Dense(1)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.last(inputs, training=training)


def made(loss: Any = "mse", **arguments: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", loss, **arguments)
    return model


def test_models_of_the_user_are_not_saved(tmp_path: Path) -> None:
    model, weights = Subclassed(), str(tmp_path / "weights.npz")
    model(X)
    with pytest.raises(errors.InvalidLayer, match="is no class of keras; use save_weights"):
        model.save(str(tmp_path / "model.npz"))
    assert not [*tmp_path.iterdir()]
    model.save_weights(weights)
    model.load_weights(weights)


@pytest.mark.parametrize("devices", [["/cpu:0"], ["/cpu:0", "/cpu:1"]])
def test_lists_are_batches_as_tuples_are(devices: list[str]) -> None:
    with MirroredStrategy(devices) as strategy, strategy.scope():
        model = made()
        history = model.fit([[X, Y]], validation_data=[X, Y], verbose=0).history
        assert history["val_loss"] == [pytest.approx(model.evaluate(X, Y, verbose=0))]
        assert model.evaluate([[X, Y]], verbose=0) == pytest.approx(model.evaluate(X, Y, verbose=0))
        labels = list(np.ones(8, np.int64))
        assert model.evaluate(X, labels, verbose=0) == pytest.approx(model.evaluate(X, Y, verbose=0))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"x": [(X, Y)], "validation_split": 0.5}, errors.BadRequest, "validation_split needs arrays, but x is a list"),
        ({"x": X, "y": Y, "sample_weight": Y, "class_weight": {}}, errors.BadRequest, "class_weight and sample_weight"),
        ({"x": X, "class_weight": {0: 1.0}}, errors.InvalidData, "class_weight needs one array of labels"),
        ({"x": [(X, Y, Y, Y)]}, errors.InvalidData, "a batch has 4 values"),
        (
            {"x": X, "y": Y, "validation_data": (X, Y), "validation_freq": 0},
            errors.BadRequest,
            "validation_freq is 0; give 1 or more",
        ),
        ({"x": X, "y": Y, "steps_per_epoch": 0}, errors.BadRequest, "the number of steps is 0; give 1 or more"),
        ({"x": X, "y": Y, "batch_size": 0}, errors.BadRequest, "batch_size is 0; give 1 or more"),
        (
            {"x": X, "y": Y, "callbacks": [keras.callbacks.EarlyStopping]},
            errors.BadRequest,
            r"the class EarlyStopping; give an object, such as EarlyStopping\(\)",
        ),
        (
            {"x": X, "y": Y, "callbacks": keras.callbacks.ModelCheckpoint("{val_loss}")},
            errors.BadRequest,
            "has {val_loss}, but no epoch has it; did you mean 'loss'",
        ),
    ],
)
def test_wrong_arguments_of_fit(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    model = made()
    with pytest.raises(error, match=match):
        model.fit(**arguments, verbose=0)


def test_validation_data_win_against_a_split() -> None:
    model = made()
    history = model.fit(X, Y, batch_size=8, validation_split=0.25, validation_data=(X, 0 * Y), verbose=0).history
    assert history["val_loss"] == [pytest.approx(model.evaluate(X, 0 * Y, verbose=0))]


@pytest.mark.parametrize("devices", [["/cpu:0"], ["/cpu:0", "/cpu:1"]])
@pytest.mark.parametrize("kind", ["arrays", "batches", "one batch"])
def test_class_weights_are_weights_of_samples(devices: list[str], kind: str) -> None:
    x, labels = np.eye(8, 2, dtype=np.float32), np.array([0, 1, 2, 1, 0, 2, 1, 0])
    weights = np.array([3.0, 1.0, 0.5], np.float32)[labels]  # the class 1 has no entry
    found = []
    for arguments in ({"class_weight": {0: 3.0, 2: 0.5}}, {"sample_weight": weights}):
        keras.utils.set_random_seed(3)
        with MirroredStrategy(devices) as strategy, strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, "softmax")])
            model.compile("sgd", "sparse_categorical_crossentropy")
            if kind == "one batch":
                model.train_on_batch(x, labels, **arguments)
            elif kind == "arrays":
                model.fit(x, labels, batch_size=8, verbose=0, shuffle=False, **arguments)
            else:
                batch = (x, labels, weights) if "sample_weight" in arguments else (x, labels)
                model.fit([batch], verbose=0, class_weight=arguments.get("class_weight"))
            found.append(model.get_weights())
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-6)
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-6)


def test_loss_weights_and_weighted_metrics() -> None:
    weights = np.r_[np.ones(4), np.zeros(4)].astype(np.float32)
    y = np.r_[np.zeros(4), np.ones(4)].astype(np.float32)
    model, plain = made(loss_weights=[3.0], metrics=["mae"], weighted_metrics=["mae", "mse"]), made()
    plain.set_weights(model.get_weights())
    found = model.evaluate(X, y, sample_weight=weights, verbose=0, return_dict=True)
    assert list(found) == ["loss", "mae", "weighted_mae", "mse"]
    assert found["loss"] == pytest.approx(3 * plain.evaluate(X, y, sample_weight=weights, verbose=0))
    output = model.predict(X, verbose=0)[0, 0]
    assert found["mae"] == pytest.approx((abs(output) + abs(output - 1)) / 2)
    assert found["weighted_mae"] == pytest.approx(abs(output))
    before = model.get_weights()[0]
    model.train_on_batch(X, y)
    plain.train_on_batch(X, y)
    np.testing.assert_allclose(model.get_weights()[0] - before, 3 * (plain.get_weights()[0] - before), rtol=1e-5)


def test_classes_stand_for_objects_with_defaults() -> None:
    model = made(keras.losses.MeanSquaredError, metrics=[keras.metrics.MeanAbsoluteError])
    assert model.metrics_names == ["loss", "mean_absolute_error"]
    assert isinstance(model.loss, keras.losses.MeanSquaredError)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"metrics": "accuracy"}, r"metrics is 'accuracy'; give a list, such as metrics=\['accuracy'\]"),
        ({"loss_weights": {"a": 1, "b": 2}}, "loss_weights is .*; give a number"),
        ({"weighted_metrics": "mae"}, r"weighted_metrics is 'mae'; give a list"),
        ({"optimizer": keras.optimizers.Adam}, r"optimizer is the class Adam; give an object, such as Adam\(\)"),
    ],
)
def test_wrong_arguments_of_compile(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(errors.BadRequest, match=match):
        keras.Sequential().compile(**arguments)


def test_what_cannot_train_is_explained() -> None:
    with pytest.raises(errors.InvalidLayer, match="Input got the shape 4; give the lengths"):
        keras.Input(4)  # type: ignore[arg-type]
    model = made()
    model.trainable = False
    with pytest.raises(errors.InvalidGradient, match="a layer with trainable=False has no trainable variables"):
        model.fit(X, Y, verbose=0)
