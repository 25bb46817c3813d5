"""Base class of losses: how the losses of samples become one number."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from shoal import errors
from shoal_distribute.keras.layers.base import as_tensor, cast
from shoal_distribute.keras.names import Advising, advice, checked_dtype, snake_case
from shoal_distribute.keras.tensor import Tensor, array_of
from shoal_distribute.strategies import get_strategy
from shoal_worker.arrays import namespace_of

# What reduces the losses of samples to one number. All but "sum" and None divide by the number of losses, or by the sum
# of the weights.
REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight", "sum", "none", None)


class Loss(Advising):
    """Loss: a function of labels and outputs, and how the losses of samples become one number.

    A mean is divided by the number of replicas, so that the sum over replicas is the mean over the global batch.

    Args:
        name: its name. None means the class' in snake case.
        reduction: "sum_over_batch_size" or "mean": the mean over all losses; "mean_with_sample_weight": the mean by the
            weights; "sum"; "none" or None: the loss of each sample.
        dtype: dtype that the outputs of a model are cast to; None means their own.

    Raises:
        BadRequest: the reduction or the dtype is unknown.
    """

    def __init__(
        self, name: str | None = None, reduction: str | None = "sum_over_batch_size", dtype: str | None = None
    ) -> None:
        if reduction not in REDUCTIONS:
            known = [it for it in REDUCTIONS if it]
            raise errors.BadRequest(f"reduction {reduction!r} is unknown; {advice(str(reduction), known)}")
        self.name, self.reduction = name or snake_case(type(self).__name__), reduction
        self.dtype = checked_dtype(self.name, dtype)

    @abstractmethod
    def call(self, y_true: Any, y_pred: Any) -> Tensor:
        """Returns the loss of each sample.

        Args:
            y_true: labels.
            y_pred: outputs of a model.
        """
        raise NotImplementedError

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Tensor:
        if self.reduction in {"none", None}:
            return self._weighted(y_true, y_pred, sample_weight)
        total, divisor = self.parts(y_true, y_pred, sample_weight)
        if self.reduction == "sum":
            return total
        return total / max(divisor, 1e-30) / get_strategy().num_replicas_in_sync

    def parts(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> tuple[Tensor, float]:
        """Returns the sum of the losses, and what it is divided by for the mean.

        Args:
            y_true: labels.
            y_pred: outputs of a model.
            sample_weight: weights of the samples; None means 1.
        """
        losses = self._weighted(y_true, y_pred, sample_weight)
        by_weight = self.reduction == "mean_with_sample_weight" and sample_weight is not None
        return losses.sum(), float(array_of(sample_weight).sum()) if by_weight else losses.array.size

    def _weighted(self, y_true: Any, y_pred: Any, sample_weight: Any) -> Tensor:
        losses = self.call(y_true, y_pred if self.dtype is None else cast(as_tensor(y_pred), self.dtype))
        if sample_weight is None:
            return losses
        weights = namespace_of(losses.array).asarray(array_of(sample_weight)).astype(losses.dtype)
        if weights.ndim == losses.ndim + 1 and weights.shape[-1] == 1:
            weights = weights[..., 0]
        spread = Tensor(weights.reshape(*weights.shape, *(1 for _ in range(losses.ndim - weights.ndim))))
        return losses * spread


class FunctionLoss(Loss):
    """Loss of a function.

    Args:
        function: takes labels and outputs, and returns the loss of each sample, a `Tensor`.
        name: see `Loss`.
        reduction: see `Loss`.
        dtype: see `Loss`.
    """

    def __init__(
        self,
        function: Callable[[Any, Any], Tensor],
        name: str | None = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: str | None = None,
    ) -> None:
        super().__init__(name or getattr(function, "__name__", None), reduction, dtype)
        self._function = function

    def call(self, y_true: Any, y_pred: Any) -> Tensor:
        return self._function(y_true, y_pred)


__all__ = ["REDUCTIONS", "FunctionLoss", "Loss"]
