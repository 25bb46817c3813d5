"""Places of `fit`: calls for models of the same strategy, one within the other and at the same time."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from shoal import errors
from shoal_distribute import OneDeviceStrategy, keras

X, Y = np.ones((4, 2)), np.ones((4, 1))


class Elastic(OneDeviceStrategy):
    """Stands for an elastic group: its progress is that of all processes."""

    may_grow = True


def compiled() -> keras.Sequential:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def fits_within(event: str) -> keras.callbacks.LambdaCallback:
    """Returns a callback that trains another model."""
    other = compiled()
    return keras.callbacks.LambdaCallback(**{event: lambda *_: other.fit(X, Y, epochs=2, verbose=0)})


def test_fit_within_a_callback_leaves_the_outer_fit_alone() -> None:
    history = compiled().fit(X, Y, epochs=3, verbose=0, callbacks=[fits_within("on_epoch_end")])
    assert history.epoch == [0, 1, 2]


@pytest.mark.parametrize("event", ["on_epoch_end", "on_train_batch_end"])
def test_fit_within_the_fit_of_an_elastic_group_is_refused(event: str) -> None:
    with Elastic("/cpu:0").scope():
        model, callback = compiled(), fits_within(event)
    with pytest.raises(errors.WrongContext, match="fit was called while another fit of the same elastic strategy"):
        model.fit(X, Y, epochs=3, verbose=0, callbacks=[callback])


def test_threads_train_models_of_one_strategy_at_the_same_time() -> None:
    together = Barrier(2, timeout=20)
    callback: Any = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: together.wait())

    def trained(model: keras.Sequential) -> list[int]:
        return model.fit(X, Y, epochs=4, verbose=0, callbacks=[callback]).epoch

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(trained, [compiled(), compiled()])) == [[0, 1, 2, 3]] * 2
