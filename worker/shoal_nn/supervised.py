"""Supervised training of any layer, as a program with labels and held-out samples."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal import errors
from shoal.program import AggregateMetric, Array, Dataset, RandomDataset, StepOutput
from shoal.variables import Variable
from shoal_nn._mapped import Mapped
from shoal_nn.layer import Layer, LayerInput, Shape, TrainingContext, one_by_one
from shoal_nn.losses import sigmoid_cross_entropy, softmax_cross_entropy
from shoal_nn.metrics import AreaUnderCurve, accuracy, top_k_accuracy
from shoal_nn.precision import LossScale, Policy
from shoal_worker.arrays import namespace_of


class Objective(ABC):
    """Objective of a model: its loss and its metrics."""

    @abstractmethod
    def check(self, labels: np.ndarray, shape: Shape) -> None:
        """Checks a batch's labels on the host, because wrong ones may go unnoticed on a GPU.

        Args:
            labels: [batch].
            shape: shape of an output sample.

        Raises:
            InvalidData: a label is invalid for the outputs.
        """

    @abstractmethod
    def loss(self, outputs: Array, labels: Array) -> tuple[Array, Array]:
        """Returns the mean loss of a batch, and its gradient with respect to the outputs."""

    @abstractmethod
    def accuracy(self, outputs: Array, labels: Array) -> Array:
        """Returns the share of correct samples of a batch."""

    def metrics(self, outputs: Array, labels: Array) -> Mapping[str, float | AggregateMetric]:
        """Returns a batch's metrics of an evaluation, by name."""
        loss, _ = self.loss(outputs, labels)
        return {"loss": float(loss), "accuracy": float(self.accuracy(outputs, labels))}


@dataclass(frozen=True)
class MulticlassClassification(Objective):
    """One class for each sample: outputs [batch, classes], labels [batch] as integers.

    Args:
        top: k of an additional top-k accuracy in evaluations; 1 means none.
    """

    top: int = 1

    def check(self, labels: np.ndarray, shape: Shape) -> None:
        classes = shape[-1]
        if labels.dtype.kind not in "iu" or labels.ndim != 1:
            raise errors.InvalidData(
                f"labels are {labels.dtype} of shape {labels.shape}; give the class number of each sample as an integer"
            )
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            raise errors.InvalidData(
                f"the label {low if low < 0 else high} is not one of the model's {classes} classes, 0 to "
                f"{classes - 1}; give the model more classes, or correct the labels"
            )

    def loss(self, outputs: Array, labels: Array) -> tuple[Array, Array]:
        return softmax_cross_entropy(outputs, labels)

    def accuracy(self, outputs: Array, labels: Array) -> Array:
        return accuracy(outputs, labels)

    def metrics(self, outputs: Array, labels: Array) -> Mapping[str, float | AggregateMetric]:
        more = {f"top{self.top}": float(top_k_accuracy(outputs, labels, self.top))} if self.top > 1 else {}
        return {**super().metrics(outputs, labels), **more}


@dataclass(frozen=True)
class BinaryClassification(Objective):
    """Two classes: outputs [batch, 1], labels [batch], 0 or 1. Evaluations include the AUC."""

    def check(self, labels: np.ndarray, shape: Shape) -> None:  # noqa: ARG002 - any shape
        wrong = (labels != 0) & (labels != 1)
        if wrong.any():
            raise errors.InvalidData(f"the label {labels[wrong][0]} is neither 0 nor 1; correct the labels")

    def loss(self, outputs: Array, labels: Array) -> tuple[Array, Array]:
        return sigmoid_cross_entropy(outputs, labels.reshape(outputs.shape))

    def accuracy(self, outputs: Array, labels: Array) -> Array:
        return ((outputs > 0) == (labels.reshape(outputs.shape) > 0)).mean()

    def metrics(self, outputs: Array, labels: Array) -> Mapping[str, float | AggregateMetric]:
        return {**super().metrics(outputs, labels), "auc": AreaUnderCurve.of(outputs, labels)}


class Supervised:
    """Program that trains a layer on samples with labels: a `shoal.program.RandomProgram` and an `EvaluatedProgram`.

        def factory():
            training, held_out = split(Arrays((images, labels)), 0.1)
            return Supervised(small_cnn(10), (28, 28, 1), training, held_out, MulticlassClassification())

    Args:
        net: the layer to train.
        shape: shape of an input sample, or shapes by feature.
        dataset: data set whose batches are tuples of samples and labels, or features by name that include the label.
        held_out: data set of the same form for evaluation.
        objective: the loss and the metrics.
        label: name of the label among the features; empty if batches are tuples.
        variables: the variables of `net` with other initial values, as `shoal_nn.models.pretrained` returns them; None
            means those of `net`.
        precision: dtype in which the model computes. For float16 the loss is scaled. Servers reject a step whose
            gradient overflows, and the worker skips this step.

    Raises:
        InvalidShape: the layer does not accept such samples; a step also raises it for integers instead of floats.
        InvalidData: a label is invalid. Reading a batch raises it.
    """

    def __init__(
        self,
        net: Layer,
        shape: LayerInput,
        dataset: Dataset | RandomDataset,
        held_out: Dataset,
        objective: Objective,
        *,
        label: str = "",
        variables: Mapping[str, Variable] | None = None,
        precision: Policy = Policy(),  # noqa: B008 - frozen
    ) -> None:
        self.net, self.shape, self.objective = net, shape, objective
        self._outputs = net.output_shape(shape)
        self.dataset, self.held_out = Mapped(dataset, self._checked), Mapped(held_out, self._checked)
        self._label, self._policy, self._variables = label, precision, variables
        self._scale = LossScale() if precision.compute == "float16" else None

    def variables(self) -> dict[str, Variable]:
        return self.net.variables(self.shape) if self._variables is None else dict(self._variables)

    def loss_and_gradients(self, params: Mapping[str, Array], batch: Any, *, seed: int) -> StepOutput:
        x, labels = self._split(batch)
        policy, scale = self._policy, self._scale
        with _overflowing() if scale else nullcontext():
            y, state, pullback = self.net.apply(params, params, policy.inputs(x), TrainingContext(seed))
            outputs = policy.outputs(y)
            loss, dy = self.objective.loss(outputs, labels)
            dy = policy.gradient(scale.scaled(dy) if scale else dy)
            gradients: Mapping[str, Array] | Iterator[tuple[str, Array]]
            if scale:
                gradients, finite = scale.unscaled(pullback(dy)[0])
                self._scale = scale.after(finite)
            elif namespace_of(dy) is np:
                gradients, _ = pullback(dy)
            else:  # the first ones are downloaded while others are computed
                gradients = one_by_one(pullback, dy)
        return StepOutput(
            loss, gradients, updates=state, metrics={"accuracy": self.objective.accuracy(outputs, labels)}
        )

    def evaluate(self, params: Mapping[str, Array], batch: Any) -> Mapping[str, float | AggregateMetric]:
        x, labels = self._split(batch)
        y, _, _ = self.net.apply(params, params, self._policy.inputs(x), False)
        return self.objective.metrics(self._policy.outputs(y), labels)

    def _checked(self, batch: Any) -> Any:
        _, labels = self._split(batch)
        if isinstance(labels, np.ndarray):
            self.objective.check(labels, self._outputs)
        return batch

    def _split(self, batch: Any) -> tuple[Any, Array]:
        if self._label:
            return batch, batch[self._label]
        x, labels = batch
        return x, labels


def _overflowing() -> AbstractContextManager[Any]:
    """Suppresses NumPy's warnings of overflow, which the loss scale handles."""
    return np.errstate(over="ignore", invalid="ignore")


__all__ = ["BinaryClassification", "MulticlassClassification", "Objective", "Supervised"]
