"""Arguments of `compile` and `fit`: forms that Keras also takes, and what is said of wrong ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import errors
from shoal_distribute import MirroredStrategy, keras

X, Y = np.ones((8, 2), np.float32), np.ones(8, np.float32)


class Doubling(keras.layers.Layer):
    def compute_output_shape(self, shape: Any) -> Any:
        return shape

    def call(self, inputs: Any, training: bool = False) -> Any:
        return inputs + inputs


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


@pytest.mark.parametrize(
    "make", [Subclassed, lambda: keras.Sequential([keras.Input((2,)), Doubling(), keras.layers.Dense(1)])]
)
def test_classes_of_the_user_are_not_saved(make: Callable[[], keras.Model], tmp_path: Path) -> None:
    model, weights = make(), str(tmp_path / "weights.npz")
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


def test_classes_stand_for_objects_with_defaults() -> None:
    model = made(keras.losses.MeanSquaredError, metrics=[keras.metrics.MeanAbsoluteError])
    assert model.metrics_names == ["loss", "mean_absolute_error"]
    assert isinstance(model.loss, keras.losses.MeanSquaredError)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"metrics": "accuracy"}, r"metrics is 'accuracy'; give a list, such as metrics=\['accuracy'\]"),
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
