"""Means of losses and accuracies by Keras' class names."""

import functools
from typing import Any

import numpy as np

from shoal_distribute.keras.losses import functions as losses
from shoal_distribute.keras.metrics import functions
from shoal_distribute.keras.metrics.base import MeanMetricWrapper


class Accuracy(MeanMetricWrapper):
    """Share of outputs that equal their labels.

    Args:
        name: see `Metric`.
    """

    def __init__(self, name: str | None = "accuracy") -> None:
        super().__init__(functions.accuracy, name)


class BinaryAccuracy(MeanMetricWrapper):
    """Share of outputs on the right side of a threshold.

    Args:
        name: see `Metric`.
        threshold: outputs above it count as 1.
    """

    def __init__(self, name: str | None = "binary_accuracy", threshold: float = 0.5) -> None:
        super().__init__(functools.partial(functions.binary_accuracy, threshold=threshold), name)


class CategoricalAccuracy(MeanMetricWrapper):
    """Share of samples whose largest output is at the label's place; labels are one-hot.

    Args:
        name: see `Metric`.
    """

    def __init__(self, name: str | None = "categorical_accuracy") -> None:
        super().__init__(functions.categorical_accuracy, name)


class SparseCategoricalAccuracy(MeanMetricWrapper):
    """Share of samples whose largest output is at the label's place; labels are class numbers.

    Args:
        name: see `Metric`.
    """

    def __init__(self, name: str | None = "sparse_categorical_accuracy") -> None:
        super().__init__(functions.sparse_categorical_accuracy, name)


class TopKCategoricalAccuracy(MeanMetricWrapper):
    """Share of samples whose label is among the largest outputs; labels are one-hot.

    Args:
        k: number of the largest outputs.
        name: see `Metric`.
    """

    def __init__(self, k: int = 5, name: str | None = "top_k_categorical_accuracy") -> None:
        super().__init__(functools.partial(functions.top_k_categorical_accuracy, k=k), name)


class SparseTopKCategoricalAccuracy(MeanMetricWrapper):
    """Share of samples whose label is among the largest outputs; labels are class numbers.

    Args:
        k: number of the largest outputs.
        name: see `Metric`.
    """

    def __init__(self, k: int = 5, name: str | None = "sparse_top_k_categorical_accuracy") -> None:
        super().__init__(functools.partial(functions.sparse_top_k_categorical_accuracy, k=k), name)


class MeanSquaredError(MeanMetricWrapper):
    """Mean of the squared errors.

    Args:
        name: see `Metric`.
    """

    def __init__(self, name: str | None = "mean_squared_error") -> None:
        super().__init__(losses.mean_squared_error, name)


class RootMeanSquaredError(MeanSquaredError):
    """Square root of the mean of the squared errors.

    Args:
        name: see `Metric`.
    """

    def __init__(self, name: str | None = "root_mean_squared_error") -> None:
        super().__init__(name)

    def value(self, *sums: np.ndarray) -> Any:
        return np.sqrt(super().value(*sums))


class MeanAbsoluteError(MeanMetricWrapper):
    """Mean of the absolute errors.

    Args:
        name: see `Metric`.
    """

    def __init__(self, name: str | None = "mean_absolute_error") -> None:
        super().__init__(losses.mean_absolute_error, name)


class BinaryCrossentropy(MeanMetricWrapper):
    """Mean of the cross entropy of two classes.

    Args:
        name: see `Metric`.
        from_logits: whether outputs are logits instead of probabilities.
        label_smoothing: weight of 1/2 in the labels.
    """

    def __init__(
        self, name: str | None = "binary_crossentropy", from_logits: bool = False, label_smoothing: float = 0.0
    ) -> None:
        options: Any = {"from_logits": from_logits, "label_smoothing": label_smoothing}
        super().__init__(functools.partial(losses.binary_crossentropy, **options), name)


class CategoricalCrossentropy(MeanMetricWrapper):
    """Mean of the cross entropy of several classes; labels are one-hot.

    Args:
        name: see `Metric`.
        from_logits: whether outputs are logits instead of probabilities.
        label_smoothing: weight of the uniform distribution in the labels.
    """

    def __init__(
        self, name: str | None = "categorical_crossentropy", from_logits: bool = False, label_smoothing: float = 0.0
    ) -> None:
        options: Any = {"from_logits": from_logits, "label_smoothing": label_smoothing}
        super().__init__(functools.partial(losses.categorical_crossentropy, **options), name)


class SparseCategoricalCrossentropy(MeanMetricWrapper):
    """Mean of the cross entropy of several classes; labels are class numbers.

    Args:
        name: see `Metric`.
        from_logits: whether outputs are logits instead of probabilities.
    """

    def __init__(self, name: str | None = "sparse_categorical_crossentropy", from_logits: bool = False) -> None:
        super().__init__(functools.partial(losses.sparse_categorical_crossentropy, from_logits=from_logits), name)


__all__ = [
    "Accuracy",
    "BinaryAccuracy",
    "BinaryCrossentropy",
    "CategoricalAccuracy",
    "CategoricalCrossentropy",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "RootMeanSquaredError",
    "SparseCategoricalAccuracy",
    "SparseCategoricalCrossentropy",
    "SparseTopKCategoricalAccuracy",
    "TopKCategoricalAccuracy",
]
