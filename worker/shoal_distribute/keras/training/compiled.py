"""Settings of models for training: the loss, its weight and the metrics, which `compile` sets."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal import errors
from shoal_distribute.keras import losses as all_losses
from shoal_distribute.keras import metrics as all_metrics
from shoal_distribute.keras import optimizers as all_optimizers
from shoal_distribute.keras.tensor import Tensor
from shoal_distribute.strategies import Strategy

if TYPE_CHECKING:
    from shoal_distribute.keras.losses import Loss
    from shoal_distribute.keras.metrics import Metric
    from shoal_distribute.keras.optimizers import Optimizer


class CompiledTrainer:
    """Base class of `Trainer`: `compile`, and the metrics.

    Attributes:
        optimizer: the optimizer; None before `compile`.
        loss: the loss; None without one.
        saved_state: state of the optimizer in the file that the model was read from.
    """

    name: str
    strategy: Strategy
    optimizer: "Optimizer | None" = None
    loss: "Loss | None" = None
    saved_state: dict[str, np.ndarray] | None = None
    _loss_weight = 1.0
    _compiled: "list[Metric] | None" = None
    _weighted: "Sequence[Metric]" = ()

    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        loss_weights: Any = None,
        metrics: Sequence[Any] | None = None,
        weighted_metrics: Sequence[Any] | None = None,
        run_eagerly: bool = False,
        steps_per_execution: int = 1,
        jit_compile: Any = "auto",
        auto_scale_loss: bool = True,
    ) -> None:
        """Sets what `fit` and `evaluate` use.

        Args:
            optimizer: a name, or an object of `keras.optimizers` or `shoal.optim`.
            loss: a name, a function, or an object of `keras.losses`.
            loss_weights: a number that multiplies the loss, or a list of one; None means 1.
            metrics: names, functions, or objects of `keras.metrics`. They count each sample once.
            weighted_metrics: as `metrics`, but they count samples by their weights.
            run_eagerly: accepted for Keras' sake, and ignored: each step computes at once.
            steps_per_execution: accepted for Keras' sake, and ignored: each step is run by itself.
            jit_compile: accepted for Keras' sake, and ignored.
            auto_scale_loss: accepted for Keras' sake, and ignored: losses are not scaled.

        Raises:
            BadRequest: a name is unknown, and the message has the nearest one; or `metrics` is no list, or
                `loss_weights` no number.
            IncompatibleCheckpoint: the model was read from a file with the state of another kind of optimizer.
            WrongContext: the optimizer or a metric was made in the scope of another strategy than the model.
        """
        del run_eagerly, steps_per_execution, jit_compile, auto_scale_loss
        weight = _weight_of(loss_weights)
        made = all_optimizers.get(optimizer)
        if made is not optimizer:
            made.use(self.strategy)
        self._check_scope("optimizer", made.name, made.strategy)
        if self.saved_state:
            made.restore(self.saved_state)
            self.saved_state = None
        self.optimizer, self.loss = made, None if loss is None else all_losses.get(loss)
        self._loss_weight = weight
        self._tracker = self._owned("loss", all_metrics.Mean("loss"))
        self._compiled = self._made("metrics", metrics)
        self._weighted = self._made("weighted_metrics", weighted_metrics)
        _make_names_differ(self._compiled, self._weighted)

    @property
    def metrics(self) -> "list[Metric]":
        """The mean of the loss, and the metrics that `compile` got.

        Raises:
            BadRequest: the model is not compiled.
        """
        if self._compiled is None:
            raise errors.BadRequest(
                f"model {self.name} is not compiled; call compile(optimizer, loss) before fit or evaluate"
            )
        return [*([self._tracker] if self.loss else []), *self._compiled, *self._weighted]

    @property
    def metrics_names(self) -> list[str]:
        """The names of the metrics."""
        return [metric.name for metric in self.metrics]

    def reset_metrics(self) -> None:
        """Makes all metrics forget their samples."""
        for metric in self.metrics:
            metric.reset_state()

    def get_metrics_result(self) -> dict[str, float]:
        """Returns the metrics of all replicas and processes, by name."""
        return {metric.name: float(metric.result()) for metric in self.metrics}

    def _summed_loss(self, y: Any, outputs: Any, weights: Any) -> tuple[Tensor, float]:
        """Returns the sum of the losses, times the weight of the loss, and what divides it for the mean.

        Args:
            y: labels.
            outputs: outputs of the model.
            weights: weights of the samples; None means 1.
        """
        assert self.loss is not None
        total, divisor = self.loss.parts(y, outputs, weights)
        return total if self._loss_weight == 1 else total * self._loss_weight, divisor

    def _update_metrics(self, y: Any, outputs: Any, weights: Any) -> None:
        for metric in self._compiled or []:
            metric.update_state(y, outputs)
        for metric in self._weighted:
            metric.update_state(y, outputs, weights)

    def _made(self, argument: str, given: Any) -> "list[Metric]":
        listed = all_metrics.listed(given, argument)
        return [self._owned(it, all_metrics.get(it, self.loss)) for it in listed]

    def _owned(self, given: Any, metric: "Metric") -> "Metric":
        """Returns a metric whose sums are those of the model's replicas."""
        if metric is not given:
            metric.strategy = self.strategy
        self._check_scope("metric", metric.name, metric.strategy)
        return metric

    def _check_scope(self, kind: str, name: str, strategy: Strategy) -> None:
        if strategy is not self.strategy:
            theirs, own = type(strategy).__name__, type(self.strategy).__name__
            raise errors.WrongContext(
                f"{kind} {name} belongs to a {theirs}, but model {self.name} to a {own}; make both within one "
                "`with strategy.scope():`"
            )


def _weight_of(loss_weights: Any) -> float:
    """Returns the weight of the one loss.

    Raises:
        BadRequest: it is no number.
    """
    given = loss_weights[0] if isinstance(loss_weights, list | tuple) and len(loss_weights) == 1 else loss_weights
    if given is None:
        return 1.0
    if isinstance(given, bool) or not isinstance(given, int | float | np.number):
        raise errors.BadRequest(
            f"loss_weights is {loss_weights!r:.80}; give a number, because a model has one loss here"
        )
    return float(given)


def _make_names_differ(metrics: "Sequence[Metric]", weighted: "Sequence[Metric]") -> None:
    """Renames metrics whose name another one has, as Keras does: "accuracy_1", "weighted_accuracy"."""
    uses: Counter[str] = Counter()
    for prefix, group in (("", metrics), ("weighted_", weighted)):
        for metric in group:
            stem = f"{prefix}{metric.name}" if uses[metric.name] else metric.name
            count = uses[stem]
            uses[stem] += 1
            metric.name = f"{stem}_{count}" if count else stem


__all__ = ["CompiledTrainer"]
