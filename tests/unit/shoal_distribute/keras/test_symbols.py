"""Operators of symbolic tensors, the symbols and variables of layers, and inputs by their names."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import errors
from shoal.data import from_arrays
from shoal_distribute import MirroredStrategy, OneDeviceStrategy, PipelineStrategy, Strategy, keras

RNG = np.random.default_rng(0)
X, Y = (RNG.normal(size=(6, 4)).astype(np.float32) for _ in range(2))
OPERATORS: list[Callable[[Any, Any], Any]] = [
    lambda x, y: x + y,
    lambda x, y: x - y * 2.0,
    lambda x, y: 1.0 - x / (3.0 + y * y),
    lambda x, y: abs(-x) ** 2 + np.arange(4.0, dtype=np.float32) * y,
    lambda x, y: np.float32(2) * x @ np.ones((4, 2), np.float32) + y[:, 1:3],
    lambda x, y: x[:, None, ..., 1::2] - y[..., 0][:, None, None],
]


@pytest.fixture(params=[1, 2], ids=["one replica", "two replicas"])
def scope(request: pytest.FixtureRequest) -> Iterator[None]:
    with MirroredStrategy(["/cpu:0", "/cpu:1"][: request.param]) as strategy, strategy.scope():
        yield


@pytest.mark.parametrize("of", OPERATORS)
def test_operators_are_layers_of_the_model(of: Callable[[Any, Any], Any], tmp_path: Path) -> None:
    inputs = [keras.Input((4,)), keras.Input((4,))]
    output = of(*inputs)
    model = keras.Model(inputs, output)
    model.save(str(tmp_path / "model.keras"))
    expected = of(X, Y)
    assert output.shape == (None, *expected.shape[1:]) == model.output_shape
    for each in (model, keras.models.load_model(str(tmp_path / "model.keras"))):
        found = each([X, Y])
        assert found.dtype == np.float32
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


def test_images_of_integers_are_scaled_to_floats() -> None:
    images = keras.Input((2, 2, 1), dtype="uint8")
    scaled = images / 255.0
    assert (scaled.dtype, (images[:, 0]).dtype, (images + 0.5).dtype) == ("float32", "uint8", "float32")
    found = keras.Model(images, scaled)(np.full((1, 2, 2, 1), 51, np.uint8))
    np.testing.assert_allclose(found.numpy(), 0.2, rtol=1e-6)


def test_what_symbolic_tensors_cannot_do_is_named() -> None:
    x = keras.Input((4,))
    with pytest.raises(errors.InvalidShape, match=r"add of symbolic tensors of the shape \(None, 4\) and \(None, 3\)"):
        x + keras.Input((3,))
    with pytest.raises(errors.InvalidLayer, match="changes the first axis, which is the batch"):
        x[0]
    with pytest.raises(errors.InvalidLayer, match="multiply of a symbolic tensor got a str"):
        x * "2"
    with pytest.raises(errors.InvalidLayer, match="was indexed by a list"):
        x[:, [0, 1]]


def test_layers_know_their_symbols_and_variables() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, use_bias=False)])
    dense: Any = model.layers[0]
    model.add(keras.layers.BatchNormalization(scale=False))
    assert (dense.input_shape, dense.output_shape, model.input_shape) == ((None, 4), (None, 3), (None, 4))
    features = keras.Model(model.input, dense.output)
    np.testing.assert_allclose(features(X).numpy(), X @ dense.kernel.numpy(), rtol=1e-5)
    norm: Any = model.layers[1]
    assert (dense.bias, norm.gamma) == (None, None)
    assert [norm.beta, norm.moving_mean, norm.moving_variance] == norm.weights
    assert keras.Input((4,)).input_layer.output_shape == (None, 4)
    with pytest.raises(AttributeError, match="has no variable kernel, because it is not built"):
        keras.layers.Dense(1).kernel  # noqa: B018 - it raises
    with pytest.raises(AttributeError, match="was not called on a symbolic tensor"):
        keras.layers.Dense(1).output  # noqa: B018 - it raises
    assert not hasattr(norm, "kernel")


@pytest.mark.usefixtures("scope")
@pytest.mark.parametrize("keyed", [True, False], ids=["dict", "list"])
def test_inputs_by_their_names(keyed: bool, tmp_path: Path) -> None:
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    model = keras.Model({"b": b, "a": a} if keyed else [a, b], keras.layers.Dense(1)(a) - b[:, :1])
    model.compile("sgd", "mse")
    named, labels = {"a": X, "b": Y}, X[:, :1]
    model.fit(named, labels, batch_size=4, validation_split=0.4, verbose=0)
    model.fit(from_arrays((named, labels)).batch(3), verbose=0)
    found = model.predict(named, verbose=0)
    assert model.evaluate(named, labels, verbose=0) == pytest.approx(((found - labels) ** 2).mean(), rel=1e-5)
    model.save(str(tmp_path / "model.keras"))
    loaded = keras.models.load_model(str(tmp_path / "model.keras"))
    np.testing.assert_array_equal(loaded.predict(named, verbose=0), found)
    with pytest.raises(errors.InvalidData, match="got the inputs a, c, but needs"):
        model({"a": X, "c": Y})


def test_a_model_of_a_user_gets_a_dict() -> None:
    class Sum(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, inputs: Any, training: bool = False) -> Any:
            return self.dense(inputs["a"]) + inputs["b"]

    model = Sum()
    model.compile("sgd", "mse")
    history = model.fit({"a": X, "b": Y[:, :1]}, X[:, :1], epochs=3, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]


def test_operators_and_inputs_by_name_in_a_pipeline() -> None:
    def trained(strategy: Strategy) -> np.ndarray:
        keras.utils.set_random_seed(1)
        with strategy, strategy.scope():
            a = keras.Input((4,), name="a")
            x = abs(keras.layers.Dense(3)(a / 2.0)) + 1.0
            model = keras.Model({"a": a}, keras.layers.Dense(1)(x) * 2.0)
            model.compile("sgd", "mse")
            model.fit({"a": X}, X[:, :1], shuffle=False, verbose=0)
            return model.get_weights()[0]

    pipeline = PipelineStrategy(["/cpu:0", "/cpu:1"], micro_batches=2)
    np.testing.assert_allclose(trained(pipeline), trained(OneDeviceStrategy("/cpu:0")), rtol=1e-5)
