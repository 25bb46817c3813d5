"""Metrics by Keras' names. Their sums are added over replicas and processes."""

from collections.abc import Callable
from typing import Any

from shoal import errors
from shoal_distribute.keras.losses import Loss
from shoal_distribute.keras.metrics.base import Mean, MeanMetricWrapper, Metric, Sum
from shoal_distribute.keras.metrics.classes import (
    Accuracy,
    BinaryAccuracy,
    BinaryCrossentropy,
    CategoricalAccuracy,
    CategoricalCrossentropy,
    MeanAbsoluteError,
    MeanSquaredError,
    RootMeanSquaredError,
    SparseCategoricalAccuracy,
    SparseCategoricalCrossentropy,
    SparseTopKCategoricalAccuracy,
    TopKCategoricalAccuracy,
)
from shoal_distribute.keras.metrics.confusion import AUC, Precision, Recall
from shoal_distribute.keras.metrics.matching import MatchingMetric
from shoal_distribute.keras.names import named, snake_case

_CLASSES: tuple[type[Metric], ...] = (
    AUC,
    BinaryAccuracy,
    BinaryCrossentropy,
    CategoricalAccuracy,
    CategoricalCrossentropy,
    MeanAbsoluteError,
    MeanSquaredError,
    Precision,
    Recall,
    RootMeanSquaredError,
    SparseCategoricalAccuracy,
    SparseCategoricalCrossentropy,
    SparseTopKCategoricalAccuracy,
    TopKCategoricalAccuracy,
)
_BY_NAME: dict[str, Any] = {
    **{snake_case(it.__name__): it for it in _CLASSES},
    "mse": MeanSquaredError,
    "mae": MeanAbsoluteError,
    "rmse": RootMeanSquaredError,
    **{it.__name__: it for it in _CLASSES},
}
_MATCHING = ("accuracy", "acc", "crossentropy", "ce")  # their kind depends on the shapes of labels and outputs

# With the former, so that the nearest name is found among all.
_KNOWN: dict[str, Callable[[], Metric]] = {**dict.fromkeys(_MATCHING, Accuracy), **_BY_NAME}


def get(identifier: Any, loss: Loss | None = None) -> Metric:
    """Returns the metric of this name, of this function, or the metric itself.

    Args:
        identifier: a name such as "accuracy", a function of labels and outputs, a `Metric`, or its class.
        loss: the model's loss, for "crossentropy".

    Raises:
        BadRequest: there is no such metric. The message has the nearest name.
    """
    if isinstance(identifier, type) and issubclass(identifier, Metric):
        identifier = identifier()
    if isinstance(identifier, Metric):
        return identifier
    if identifier in _MATCHING:
        return MatchingMetric(identifier, loss)
    if isinstance(identifier, str):
        name = "" if identifier in _BY_NAME and not identifier.islower() else identifier
        made: Metric = named("metric", identifier, _KNOWN)()
        made.name = name or made.name
        return made
    if callable(identifier):
        return MeanMetricWrapper(identifier)
    raise errors.BadRequest(f"metric is {identifier!r}; give a name, a function, or an object of keras.metrics")


def listed(metrics: Any, argument: str = "metrics") -> list[Any]:
    """Returns the metrics that `compile` gets; none for None.

    Args:
        metrics: the metrics.
        argument: name of the argument of `compile`.

    Raises:
        BadRequest: they are no list.
    """
    if not isinstance(metrics, list | tuple | None):
        raise errors.BadRequest(f"{argument} is {metrics!r}; give a list, such as {argument}=['accuracy']")
    return list(metrics or ())


__all__ = [
    "AUC",
    "Accuracy",
    "BinaryAccuracy",
    "BinaryCrossentropy",
    "CategoricalAccuracy",
    "CategoricalCrossentropy",
    "MatchingMetric",
    "Mean",
    "MeanAbsoluteError",
    "MeanMetricWrapper",
    "MeanSquaredError",
    "Metric",
    "Precision",
    "Recall",
    "RootMeanSquaredError",
    "SparseCategoricalAccuracy",
    "SparseCategoricalCrossentropy",
    "SparseTopKCategoricalAccuracy",
    "Sum",
    "TopKCategoricalAccuracy",
    "get",
    "listed",
]
