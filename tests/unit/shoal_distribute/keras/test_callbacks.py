"""Callbacks of `fit`: what they add to the history, and what they say of wrong arguments."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shoal_distribute import keras

X, Y = np.ones((4, 2), np.float32), np.ones(4, np.float32)
callbacks = keras.callbacks


def fitted(*given: Any, **arguments: Any) -> keras.callbacks.History:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model.fit(X, Y, verbose=0, callbacks=list(given), **{"epochs": 3, **arguments})


@pytest.mark.parametrize(
    ("made", "arguments", "match"),
    [
        (lambda: callbacks.EarlyStopping("val_mean"), {}, "EarlyStopping does nothing, .* give fit validation_data"),
        (
            lambda: callbacks.EarlyStopping("val_maes"),
            {"validation_data": (X, Y)},
            "no epoch has the metric 'val_maes'; did you mean 'val_mae'",
        ),
        (lambda: callbacks.ReduceLROnPlateau("mea"), {}, "ReduceLROnPlateau does nothing, .* did you mean 'mae'"),
        (lambda: callbacks.ModelCheckpoint("x", save_best_only=True), {}, "ModelCheckpoint does .* validation_data"),
    ],
)
def test_a_metric_that_no_epoch_has_is_warned_of_once(
    made: Callable[[], Any], arguments: dict[str, Any], match: str
) -> None:
    with pytest.warns(UserWarning, match=match) as warned:
        fitted(made(), **arguments)
    assert len(warned) == 1


def test_epochs_without_validation_are_no_reason_to_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted(callbacks.EarlyStopping(), validation_data=(X, Y), validation_freq=2)


@pytest.mark.parametrize(
    "callback",
    [callbacks.LearningRateScheduler(lambda _: 0.5), callbacks.ReduceLROnPlateau("loss", min_delta=100, patience=0)],
)
def test_the_history_has_the_learning_rates(callback: keras.callbacks.Callback) -> None:
    rates = fitted(callback).history["learning_rate"]
    scheduled = isinstance(callback, callbacks.LearningRateScheduler)
    assert rates == pytest.approx([0.5, 0.5, 0.5] if scheduled else [0.01, 0.01, 0.001])
