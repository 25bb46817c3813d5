"""Bytes that pullbacks hold."""

import functools

import numpy as np

from shoal_distribute import GradientTape, keras
from shoal_distribute.pipeline.saved import saved_bytes


def test_views_of_an_array_count_once_and_variables_not_at_all() -> None:
    layer = keras.layers.Dense(50, dtype="float32")
    x = np.zeros((4, 10), np.float32)
    with GradientTape() as tape:
        layer(x)
    assert saved_bytes(tape.pullbacks, [it.values[0] for it in layer.weights]) == x.nbytes
    assert saved_bytes([x, x[:2], x.T], []) == x.nbytes
    assert saved_bytes([x[:2]], [x]) == 0


def test_arrays_within_functions_and_containers_count() -> None:
    a, b = np.zeros(3), np.zeros(5)
    held = {"a": (a, [b])}
    assert saved_bytes([lambda: held], []) == 64
    assert saved_bytes([functools.partial(max, a, key=b)], []) == 64
    assert saved_bytes([lambda given=a: given], [b]) == 24
