"""A small model that `fit` trains under any strategy, with the same initial values each time."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal_distribute import OneDeviceStrategy, Strategy, keras

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(32, 6)), RNG.integers(0, 3, 32)
WEIGHTS = [RNG.normal(size=shape) for shape in ((6, 8), (8,), (8, 3), (3,))]


def fitted(
    strategy: Strategy | None,
    callbacks: Sequence[Any] = (),
    data: tuple[Any, Any] = (X, Y),
    validation_data: Any = None,
) -> tuple[list[np.ndarray], list[float]]:
    """Trains the model in float64; returns its weights and the loss of each epoch. None means one process."""
    with (strategy or OneDeviceStrategy("/cpu:0")).scope():
        # With names: otherwise, workers that are threads of one process would number each other's layers.
        hidden = keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2", dtype="float64", name="hidden")
        model = keras.Sequential([keras.Input((6,)), hidden, keras.layers.Dense(3, dtype="float64", name="head")])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    model.set_weights(WEIGHTS)
    history = model.fit(
        *data,
        batch_size=8 if data[1] is not None else None,
        epochs=8,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
        validation_data=validation_data,
    )
    return model.get_weights(), history.history["loss"]


def check_equals_one_process(found: tuple[list[np.ndarray], list[float]], *, all_samples: bool = True) -> None:
    """Fails unless the result is that of one process, in 32 steps. The losses are equal if they are of all samples."""
    weights, losses = fitted(None)
    for own, expected in zip(found[0], weights, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-10)
    if all_samples:
        np.testing.assert_allclose(found[1], losses, rtol=1e-10)
