"""Losses by Keras' class names. `functions` computes them."""

from typing import Any, ClassVar

from shoal_distribute.keras.losses import functions
from shoal_distribute.keras.losses.base import Loss
from shoal_distribute.keras.tensor import Tensor


class _SampleLoss(Loss):
    """Base class of losses without settings.

    Args:
        reduction: see `Loss`.
        name: see `Loss`; None means the function's name.
        dtype: see `Loss`.
    """

    function: ClassVar[Any]

    def __init__(
        self, reduction: str | None = "sum_over_batch_size", name: str | None = None, dtype: str | None = None
    ) -> None:
        super().__init__(name or type(self).function.__name__, reduction, dtype)

    def call(self, y_true: Any, y_pred: Any) -> Tensor:
        found: Tensor = self.function(y_true, y_pred)
        return found


class MeanSquaredError(_SampleLoss):
    """Mean of the squared errors. The arguments are those of `Loss`."""

    function = staticmethod(functions.mean_squared_error)


class MeanAbsoluteError(_SampleLoss):
    """Mean of the absolute errors. The arguments are those of `Loss`."""

    function = staticmethod(functions.mean_absolute_error)


class MeanAbsolutePercentageError(_SampleLoss):
    """Mean of the errors in percent of the labels. The arguments are those of `Loss`."""

    function = staticmethod(functions.mean_absolute_percentage_error)


class MeanSquaredLogarithmicError(_SampleLoss):
    """Mean of the squared errors of log(1 + y). The arguments are those of `Loss`."""

    function = staticmethod(functions.mean_squared_logarithmic_error)


class LogCosh(_SampleLoss):
    """Mean of log(cosh(error)). The arguments are those of `Loss`."""

    function = staticmethod(functions.log_cosh)


class Hinge(_SampleLoss):
    """Hinge loss; labels are -1 and 1, or 0 and 1. The arguments are those of `Loss`."""

    function = staticmethod(functions.hinge)


class Poisson(_SampleLoss):
    """Poisson loss: y_pred - y_true * log(y_pred). The arguments are those of `Loss`."""

    function = staticmethod(functions.poisson)


class KLDivergence(_SampleLoss):
    """Kullback-Leibler divergence of distributions. The arguments are those of `Loss`."""

    function = staticmethod(functions.kl_divergence)


class Huber(Loss):
    """Huber's loss.

    Args:
        delta: the error where the loss changes from a square to a line.
        reduction: see `Loss`.
        name: see `Loss`.
        dtype: see `Loss`.
    """

    def __init__(
        self,
        delta: float = 1.0,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "huber_loss",
        dtype: str | None = None,
    ) -> None:
        super().__init__(name, reduction, dtype)
        self._delta = delta

    def call(self, y_true: Any, y_pred: Any) -> Tensor:
        return functions.huber(y_true, y_pred, self._delta)


class BinaryCrossentropy(Loss):
    """Cross entropy of two classes; labels are 0 and 1.

    Args:
        from_logits: whether outputs are logits instead of probabilities.
        label_smoothing: weight of 1/2 in the labels, in [0, 1].
        axis: axis that the mean is taken over.
        reduction: see `Loss`.
        name: see `Loss`.
        dtype: see `Loss`.
    """

    def __init__(
        self,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        axis: int = -1,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "binary_crossentropy",
        dtype: str | None = None,
    ) -> None:
        super().__init__(name, reduction, dtype)
        self._options = from_logits, label_smoothing, axis

    def call(self, y_true: Any, y_pred: Any) -> Tensor:
        return functions.binary_crossentropy(y_true, y_pred, *self._options)


class CategoricalCrossentropy(Loss):
    """Cross entropy of several classes; labels are one-hot.

    Args:
        from_logits: whether outputs are logits instead of probabilities.
        label_smoothing: weight of the uniform distribution in the labels, in [0, 1].
        axis: axis of the classes.
        reduction: see `Loss`.
        name: see `Loss`.
        dtype: see `Loss`.
    """

    def __init__(
        self,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        axis: int = -1,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "categorical_crossentropy",
        dtype: str | None = None,
    ) -> None:
        super().__init__(name, reduction, dtype)
        self._options = from_logits, label_smoothing, axis

    def call(self, y_true: Any, y_pred: Any) -> Tensor:
        return functions.categorical_crossentropy(y_true, y_pred, *self._options)


class SparseCategoricalCrossentropy(Loss):
    """Cross entropy of several classes; labels are class numbers.

    Args:
        from_logits: whether outputs are logits instead of probabilities.
        ignore_class: a class number whose samples have the loss 0; None means none.
        reduction: see `Loss`.
        axis: axis of the classes.
        name: see `Loss`.
        dtype: see `Loss`.
    """

    def __init__(
        self,
        from_logits: bool = False,
        ignore_class: int | None = None,
        reduction: str | None = "sum_over_batch_size",
        axis: int = -1,
        name: str | None = "sparse_categorical_crossentropy",
        dtype: str | None = None,
    ) -> None:
        super().__init__(name, reduction, dtype)
        self._options = from_logits, ignore_class, axis

    def call(self, y_true: Any, y_pred: Any) -> Tensor:
        return functions.sparse_categorical_crossentropy(y_true, y_pred, *self._options)


__all__ = [
    "BinaryCrossentropy",
    "CategoricalCrossentropy",
    "Hinge",
    "Huber",
    "KLDivergence",
    "LogCosh",
    "MeanAbsoluteError",
    "MeanAbsolutePercentageError",
    "MeanSquaredError",
    "MeanSquaredLogarithmicError",
    "Poisson",
    "SparseCategoricalCrossentropy",
]
