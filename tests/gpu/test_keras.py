"""Keras-shaped models on a GPU, and on a GPU and the CPU together."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from shoal_distribute import MirroredStrategy, keras

pytestmark = pytest.mark.gpu

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(40, 8, 8, 3)).astype(np.float32), RNG.integers(0, 4, 40)


def fitted(devices: list[str]) -> tuple[list[np.ndarray], dict[str, list[float]]]:
    keras.utils.set_random_seed(5)
    strategy: Any = MirroredStrategy(devices) if devices else None
    with strategy.scope() if strategy else nullcontext():
        inputs = keras.Input((8, 8, 3))
        x = keras.layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
        x = keras.layers.Concatenate()([x, keras.layers.LayerNormalization()(x)])
        x = keras.layers.GlobalAveragePooling2D()(keras.layers.MaxPooling2D()(x))
        model = keras.Model(inputs, keras.layers.Dense(4, "softmax")(x))
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(X, Y, batch_size=16, epochs=3, validation_data=(X, Y), verbose=0)
    assert model.predict(X, verbose=0).shape == (40, 4)
    return model.get_weights(), history.history


@pytest.mark.usefixtures("device")  # skips the test without a GPU
@pytest.mark.parametrize("devices", [["/gpu:0"], ["/gpu:0", "/cpu:0"], []], ids=str)
def test_fit_is_the_same_as_on_the_cpu(devices: list[str]) -> None:
    weights, history = fitted(devices)
    expected, measured = fitted(["/cpu:0"])
    for found, wants in zip(weights, expected, strict=True):
        np.testing.assert_allclose(found, wants, rtol=1e-3, atol=1e-4)
    assert history["loss"] == pytest.approx(measured["loss"], rel=1e-3)
