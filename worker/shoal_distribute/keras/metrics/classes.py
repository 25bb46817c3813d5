"""Means of losses and accuracies by Keras' class names."""

import functools
from typing import Any, ClassVar

import numpy as np

from shoal_distribute.keras.losses import functions as losses
from shoal_distribute.keras.metrics import functions
from shoal_distribute.keras.metrics.base import MeanMetricWrapper


class Accuracy(MeanMetricWrapper):
    """Share of outputs that equal their labels.

    Args:
        name: see `Metric`.
        dtype: see `Metric`.
    """

    def __init__(self, name: str | None = "accuracy", dtype: str | None = None) -> None:
        super().__init__(functions.accuracy, name, dtype)


class BinaryAccuracy(MeanMetricWrapper):
    """Share of outputs on the right side of a threshold.

    Args:
        name: see `Metric`.
        dtype: see `Metric`.
        threshold: outputs above it count as 1.
    """

    def __init__(self, name: str | None = "binary_accuracy", dtype: str | None = None, threshold: float = 0.5) -> None:
        super().__init__(functools.partial(functions.binary_accuracy, threshold=threshold), name, dtype)


class CategoricalAccuracy(MeanMetricWrapper):
    """Share of samples whose largest output is at the label's place; labels are one-hot.

    Args:
        name: see `Metric`.
        dtype: see `Metric`.
    """

    def __init__(self, name: str | None = "categorical_accuracy", dtype: str | None = None) -> None:
        super().__init__(functions.categorical_accuracy, name, dtype)


class SparseCategoricalAccuracy(MeanMetricWrapper):
    """Share of samples whose largest output is at the label's place; labels are class numbers.

    Args:
        name: see `Metric`.
        dtype: see `Metric`.
    """

    def __init__(self, name: str | None = "sparse_categorical_accuracy", dtype: str | None = None) -> None:
        super().__init__(functions.sparse_categorical_accuracy, name, dtype)


class TopKCategoricalAccuracy(MeanMetricWrapper):
    """Share of samples whose label is among the largest outputs; labels are one-hot.

    Args:
        k: number of the largest outputs.
        name: see `Metric`.
        dtype: see `Metric`.
    """

    def __init__(self, k: int = 5, name: str | None = "top_k_categorical_accuracy", dtype: str | None = None) -> None:
        super().__init__(functools.partial(functions.top_k_categorical_accuracy, k=k), name, dtype)


class SparseTopKCategoricalAccuracy(MeanMetricWrapper):
    """Share of samples whose label is among the largest outputs; labels are class numbers.

    Args:
        k: number of the largest outputs.
        name: see `Metric`.
        dtype: see `Metric`.
    """

    refused: ClassVar = {"from_sorted_ids": (False, "outputs are a score of each class")}

    def __init__(
        self, k: int = 5, name: str | None = "sparse_top_k_categorical_accuracy", dtype: str | None = None
    ) -> None:
        super().__init__(functools.partial(functions.sparse_top_k_categorical_accuracy, k=k), name, dtype)


class MeanSquaredError(MeanMetricWrapper):
    """Mean of the squared errors.

    Args:
        name: see `Metric`.
        dtype: see `Metric`.
    """

    def __init__(self, name: str | None = "mean_squared_error", dtype: str | None = None) -> None:
        super().__init__(losses.mean_squared_error, name, dtype)


class RootMeanSquaredError(MeanSquaredError):
    """Square root of the mean of the squared errors.

    Args:
        name: see `Metric`.
        dtype: see `Metric`.
    """

    def __init__(self, name: str | None = "root_mean_squared_error", dtype: str | None = None) -> None:
        super().__init__(name, dtype)

    def value(self, *sums: np.ndarray) -> Any:
        return np.sqrt(super().value(*sums))


class MeanAbsoluteError(MeanMetricWrapper):
    """Mean of the absolute errors.

    Args:
        name: see `Metric`.
        dtype: see `Metric`.
    """

    def __init__(self, name: str | None = "mean_absolute_error", dtype: str | None = None) -> None:
        super().__init__(losses.mean_absolute_error, name, dtype)


class BinaryCrossentropy(MeanMetricWrapper):
    """Mean of the cross entropy of two classes.

    Args:
        name: see `Metric`.
        dtype: see `Metric`.
        from_logits: whether outputs are logits instead of probabilities.
        label_smoothing: weight of 1/2 in the labels.
    """

    def __init__(
        self,
        name: str | None = "binary_crossentropy",
        dtype: str | None = None,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
    ) -> None:
        options: Any = {"from_logits": from_logits, "label_smoothing": label_smoothing}
        super().__init__(functools.partial(losses.binary_crossentropy, **options), name, dtype)


class CategoricalCrossentropy(MeanMetricWrapper):
    """Mean of the cross entropy of several classes; labels are one-hot.

    Args:
        name: see `Metric`.
        dtype: see `Metric`.
        from_logits: whether outputs are logits instead of probabilities.
        label_smoothing: weight of the uniform distribution in the labels.
        axis: axis of the classes.
    """

    def __init__(
        self,
        name: str | None = "categorical_crossentropy",
        dtype: str | None = None,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        axis: int = -1,
    ) -> None:
        options: Any = {"from_logits": from_logits, "label_smoothing": label_smoothing, "axis": axis}
        super().__init__(functools.partial(losses.categorical_crossentropy, **options), name, dtype)


class SparseCategoricalCrossentropy(MeanMetricWrapper):
    """Mean of the cross entropy of several classes; labels are class numbers.

    Args:
        name: see `Metric`.
        dtype: see `Metric`.
        from_logits: whether outputs are logits instead of probabilities.
        ignore_class: a class number whose samples have the loss 0; None means none.
        axis: axis of the classes.
    """

    def __init__(
        self,
        name: str | None = "sparse_categorical_crossentropy",
        dtype: str | None = None,
        from_logits: bool = False,
        ignore_class: int | None = None,
        axis: int = -1,
    ) -> None:
        options: Any = {"from_logits": from_logits, "ignore_class": ignore_class, "axis": axis}
        super().__init__(functools.partial(losses.sparse_categorical_crossentropy, **options), name, dtype)


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
