"""Losses by Keras' names, on probabilities or logits, with its reductions."""

from typing import Any

from shoal import errors
from shoal_distribute.keras.losses.base import FunctionLoss, Loss
from shoal_distribute.keras.losses.classes import (
    BinaryCrossentropy,
    CategoricalCrossentropy,
    Hinge,
    Huber,
    KLDivergence,
    LogCosh,
    MeanAbsoluteError,
    MeanAbsolutePercentageError,
    MeanSquaredError,
    MeanSquaredLogarithmicError,
    Poisson,
    SparseCategoricalCrossentropy,
)
from shoal_distribute.keras.losses.functions import (
    binary_crossentropy,
    categorical_crossentropy,
    hinge,
    huber,
    kl_divergence,
    log_cosh,
    mean_absolute_error,
    mean_absolute_percentage_error,
    mean_squared_error,
    mean_squared_logarithmic_error,
    poisson,
    sparse_categorical_crossentropy,
)
from shoal_distribute.keras.names import named, snake_case

_CLASSES = (
    BinaryCrossentropy,
    CategoricalCrossentropy,
    Hinge,
    Huber,
    KLDivergence,
    LogCosh,
    MeanAbsoluteError,
    MeanAbsolutePercentageError,
    MeanSquaredError,
    MeanSquaredLogarithmicError,
    Poisson,
    SparseCategoricalCrossentropy,
)
_BY_NAME: dict[str, type[Loss]] = {
    **{snake_case(it.__name__): it for it in _CLASSES},
    "mse": MeanSquaredError,
    "mae": MeanAbsoluteError,
    "mape": MeanAbsolutePercentageError,
    "msle": MeanSquaredLogarithmicError,
    "kld": KLDivergence,
    "kl_divergence": KLDivergence,
    "log_cosh": LogCosh,
    "logcosh": LogCosh,
    **{it.__name__: it for it in _CLASSES},
}


def get(identifier: Any) -> Loss:
    """Returns the loss of this name, of this function, or the loss itself.

    Args:
        identifier: a name such as "categorical_crossentropy", a function of labels and outputs, a `Loss`, or its
            class.

    Raises:
        BadRequest: there is no such loss. The message has the nearest name.
    """
    if isinstance(identifier, type) and issubclass(identifier, Loss):
        identifier = identifier()
    if isinstance(identifier, Loss):
        return identifier
    if isinstance(identifier, str):
        return named("loss", identifier, _BY_NAME)()
    if callable(identifier):
        return FunctionLoss(identifier)
    raise errors.BadRequest(f"loss is {identifier!r}; give a name, a function, or an object of keras.losses")


__all__ = [
    "BinaryCrossentropy",
    "CategoricalCrossentropy",
    "FunctionLoss",
    "Hinge",
    "Huber",
    "KLDivergence",
    "LogCosh",
    "Loss",
    "MeanAbsoluteError",
    "MeanAbsolutePercentageError",
    "MeanSquaredError",
    "MeanSquaredLogarithmicError",
    "Poisson",
    "SparseCategoricalCrossentropy",
    "binary_crossentropy",
    "categorical_crossentropy",
    "get",
    "hinge",
    "huber",
    "kl_divergence",
    "log_cosh",
    "mean_absolute_error",
    "mean_absolute_percentage_error",
    "mean_squared_error",
    "mean_squared_logarithmic_error",
    "poisson",
    "sparse_categorical_crossentropy",
]
