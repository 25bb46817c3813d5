"""A program of any layer: it learns labels, and is judged by held-out samples. Not which samples these are."""

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
    """What a model's outputs are to be."""

    @abstractmethod
    def check(self, labels: np.ndarray, shape: Shape) -> None:
        """Looks at a batch's labels while they are on the host: on a GPU a wrong one would be met by chance, or not.

        Args:
            labels: [batch].
            shape: of a sample of the outputs.

        Raises:
            InvalidData: the outputs cannot be what a label says.
        """

    @abstractmethod
    def loss(self, outputs: Array, labels: Array) -> tuple[Array, Array]:
        """The mean loss of a batch, and its gradient by the outputs."""

    @abstractmethod
    def accuracy(self, outputs: Array, labels: Array) -> Array:
        """The share of a batch that is right."""

    def figures(self, outputs: Array, labels: Array) -> Mapping[str, float | AggregateMetric]:
        """What an evaluation tells of a batch."""
        loss, _ = self.loss(outputs, labels)
        return {"loss": float(loss), "accuracy": float(self.accuracy(outputs, labels))}


@dataclass(frozen=True)
class MulticlassClassification(Objective):
    """A class for each sample: outputs [batch, classes], labels [batch], whole numbers.

    Args:
        top: evaluations tell the share of samples whose label is among so many, too; 1: they do not.
    """

    top: int = 1

    def check(self, labels: np.ndarray, shape: Shape) -> None:
        classes = shape[-1]
        if labels.dtype.kind not in "iu" or labels.ndim != 1:
            raise errors.InvalidData(
                f"labels are {labels.dtype} of shape {labels.shape}; give each sample the number of its class, a "
                "whole number"
            )
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            raise errors.InvalidData(
                f"the label {low if low < 0 else high} is of none of the model's {classes} classes, 0 to "
                f"{classes - 1}; give the model more classes, or mend the labels"
            )

    def loss(self, outputs: Array, labels: Array) -> tuple[Array, Array]:
        return softmax_cross_entropy(outputs, labels)

    def accuracy(self, outputs: Array, labels: Array) -> Array:
        return accuracy(outputs, labels)

    def figures(self, outputs: Array, labels: Array) -> Mapping[str, float | AggregateMetric]:
        more = {f"top{self.top}": float(top_k_accuracy(outputs, labels, self.top))} if self.top > 1 else {}
        return {**super().figures(outputs, labels), **more}


@dataclass(frozen=True)
class BinaryClassification(Objective):
    """Yes or no for each sample: outputs [batch, 1], labels [batch], 0 or 1. Evaluations tell the AUC."""

    def check(self, labels: np.ndarray, shape: Shape) -> None:  # noqa: ARG002 - whatever it is
        wrong = (labels != 0) & (labels != 1)
        if wrong.any():
            raise errors.InvalidData(f"the label {labels[wrong][0]} is neither 0 nor 1; mend the labels")

    def loss(self, outputs: Array, labels: Array) -> tuple[Array, Array]:
        return sigmoid_cross_entropy(outputs, labels.reshape(outputs.shape))

    def accuracy(self, outputs: Array, labels: Array) -> Array:
        return ((outputs > 0) == (labels.reshape(outputs.shape) > 0)).mean()

    def figures(self, outputs: Array, labels: Array) -> Mapping[str, float | AggregateMetric]:
        return {**super().figures(outputs, labels), "auc": AreaUnderCurve.of(outputs, labels)}


class Supervised:
    """Trains a layer on samples with labels: a `shoal.program.RandomProgram`, and an `EvaluatedProgram`.

        def factory():
            training, held_out = split(Arrays((images, labels)), 0.1)
            return Supervised(small_cnn(10), (28, 28, 1), training, held_out, MulticlassClassification())

    Args:
        net: gives outputs for a batch of samples.
        shape: of a sample, or by feature.
        dataset: whose batches are tuples of samples and labels; or features by name, the label among them.
        held_out: likewise.
        objective: what the outputs are to be.
        label: the label's name among the features; empty: batches are tuples.
        precision: what the model computes in. In float16 the loss is scaled, and a step whose gradient overflows is
            refused by the servers, as any that is not finite, and passed by.

    Raises:
        InvalidShape: the net does not take such samples; also from a step, of whole numbers where floats are due. From
            a batch, InvalidData: a label makes no sense.
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
        precision: Policy = Policy(),  # noqa: B008 - frozen
    ) -> None:
        self.net, self.shape, self.objective = net, shape, objective
        self._outputs = net.output_shape(shape)
        self.dataset, self.held_out = Mapped(dataset, self._checked), Mapped(held_out, self._checked)
        self._label, self._policy = label, precision
        self._scale = LossScale() if precision.compute == "float16" else None

    def variables(self) -> dict[str, Variable]:
        return self.net.variables(self.shape)

    def loss_and_gradients(self, params: Mapping[str, Array], batch: Any, *, seed: int) -> StepOutput:
        x, labels = self._taken_apart(batch)
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
            else:  # the first come down from the device while the others are computed
                gradients = one_by_one(pullback, dy)
        return StepOutput(
            loss, gradients, updates=state, metrics={"accuracy": self.objective.accuracy(outputs, labels)}
        )

    def evaluate(self, params: Mapping[str, Array], batch: Any) -> Mapping[str, float | AggregateMetric]:
        x, labels = self._taken_apart(batch)
        y, _, _ = self.net.apply(params, params, self._policy.inputs(x), False)
        return self.objective.figures(self._policy.outputs(y), labels)

    def _checked(self, batch: Any) -> Any:
        _, labels = self._taken_apart(batch)
        if isinstance(labels, np.ndarray):
            self.objective.check(labels, self._outputs)
        return batch

    def _taken_apart(self, batch: Any) -> tuple[Any, Array]:
        if self._label:
            return batch, batch[self._label]
        x, labels = batch
        return x, labels


def _overflowing() -> AbstractContextManager[Any]:
    """NumPy is not to warn of what a scale is there to find: halves that overflow."""
    return np.errstate(over="ignore", invalid="ignore")


__all__ = ["BinaryClassification", "MulticlassClassification", "Objective", "Supervised"]
