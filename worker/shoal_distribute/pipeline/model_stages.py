"""A model in stages: its training steps and evaluations, micro-batch by micro-batch."""

import functools
import math
import operator
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from shoal import errors, optim
from shoal.program import Array
from shoal_distribute.devices import LogicalDevice
from shoal_distribute.keras.layers.base import as_tensor
from shoal_distribute.keras.models.model import Model
from shoal_distribute.keras.tensor import Tensor, array_of
from shoal_distribute.pipeline.graph import Graph
from shoal_distribute.pipeline.links import Passed, StageLinks, receive, send, settle
from shoal_distribute.pipeline.parts import parts_of, tied_layers, users_of
from shoal_distribute.pipeline.runner import StageRunner
from shoal_distribute.pipeline.schedules import StageSchedule, split_of
from shoal_distribute.pipeline.stage import MicroBatchLoss, ModelStage, StepPlan
from shoal_distribute.pipeline.stage_optimizers import StageUpdates
from shoal_distribute.pipeline.timings import PipelineTimings, StageTimings
from shoal_distribute.pipeline.variables import StageVariable
from shoal_distribute.replica_context import Replicated, current_replica
from shoal_worker.arrays import namespace_of

_TIED = "gradients of tied layers"


@dataclass(frozen=True)
class PipelineSettings:
    """How a strategy runs its pipelines.

    Attributes:
        devices: the device of each stage.
        micro_batches: number of micro-batches of a training step.
        schedule: the order of the passes.
        recompute: whether stages keep their inputs only, and compute their activations again.
        limits: the bytes that each stage may hold; infinity means any.
    """

    devices: Sequence[LogicalDevice]
    micro_batches: int
    schedule: StageSchedule
    recompute: bool
    limits: Sequence[float]


class PipelinedModel:
    """A model that is cut into stages.

    Args:
        strategy: the strategy of the model.
        model: the model.
        graph: its calls.
        cuts: the places in front of the first call of each stage but the first.
        settings: how it runs.
        runner: runs the stages of this process.
        updates: updates the variables of the stages.

    Raises:
        InvalidLayer: several stages have a layer that only one of them may have.

    Attributes:
        graph: its calls.
        stages: its stages.
        slots: number of optimizer slots of each variable, which need memory.
        steps: number of training steps so far.
    """

    def __init__(
        self,
        strategy: Replicated,
        model: Model,
        graph: Graph,
        cuts: Sequence[int],
        settings: PipelineSettings,
        runner: StageRunner,
        updates: StageUpdates,
    ) -> None:
        self._strategy, self._settings = strategy, settings
        self._model = weakref.ref(model)  # the strategy keeps this object as long as the model exists
        self.graph, self._runner, self._updates = graph, runner, updates
        self.stages = [ModelStage(part, graph) for part in parts_of(graph, cuts, settings.devices)]
        self._own = [self.stages[it] for it in runner.own]
        self._tied = tied_layers(model.name, [it.part for it in self.stages])
        self._users = users_of([it.part for it in self.stages])
        self.steps, self._seconds = 0, 0.0
        self._compute = [0.0 for _ in self._own]
        self.slots = 0

    def place_variables(self) -> None:
        """Moves each variable to the stages that use it. See `StageVariable.place`."""
        for variable, stages in self._users:
            variable.place(stages, self._settings.devices)

    def outputs(self, x: Any) -> Any:
        """Returns the outputs of the model in evaluation, on the device of the strategy's first stage.

        Args:
            x: the inputs of a batch.
        """
        inputs, count = self._inputs(x), self._settings.micro_batches
        parts = split_of(len(inputs[0]), max(1, min(count, len(inputs[0]))))
        self._runner.begin("evaluation")
        links = self._runner.links()
        runs = [partial(self._evaluate, stage, links, inputs, parts) for stage in self._own]
        found = self._runner.run(self._strategy, runs, links)[-1]
        replica = current_replica()
        assert replica is not None  # `Strategy.run` runs it
        moved = [[replica.device.put(it.array) for it in outputs] for outputs in zip(*found, strict=True)]
        whole = [Tensor(namespace_of(it[0]).concatenate(it)) for it in moved]
        return whole if self.graph.returns_list else whole[0]

    def backward(self, batch: tuple[Any, Any, Any], loss: Callable[..., Any]) -> float:
        """Computes the gradients of a batch, and keeps their sums in the stages. See `ModelStages.backward`.

        Args:
            batch: inputs, labels and weights.
            loss: the loss of a micro-batch.

        Returns:
            What divides the sums.

        Raises:
            InvalidData: the batch has fewer samples than there are micro-batches.
        """
        x, y, weights = batch
        inputs, count = self._inputs(x), self._settings.micro_batches
        check_samples(len(inputs[0]), count)
        parts = split_of(len(inputs[0]), count)
        divisors: list[float] = []

        def objective_of(number: int) -> MicroBatchLoss:
            def objective(outputs: Any, again: bool) -> Tensor:
                total, divisor = loss(outputs, _picked(y, parts[number]), _picked(weights, parts[number]), again)
                if not again:
                    divisors.append(divisor)
                found: Tensor = total
                return found

            return objective

        self._begin(count)
        self._runner.begin("training step")
        links = self._runner.links()
        runs = [partial(self._train, stage, links, inputs, parts, objective_of) for stage in self._own]
        started = time.perf_counter()
        seconds = self._runner.run(self._strategy, runs, links)
        passed = time.perf_counter() - started
        self._runner.count_step(count, passed, seconds)
        self._seconds += passed
        self.steps += 1
        self._compute = [a + b for a, b in zip(self._compute, seconds, strict=True)]
        self._count_tied_calls(count)
        return self._runner.total(math.fsum(divisors))  # those of the last stage

    def apply(self, optimizer: optim.Optimizer, divisor: float) -> None:
        """Applies an optimizer once to the sums of the gradients, each stage to its variables.

        Args:
            optimizer: the optimizer.
            divisor: what divides the sums.

        Raises:
            InvalidGradient: no variable has a gradient.
        """
        passed = [(variable, users) for variable, users in self._users if users != [*variable.updaters] or users[1:]]
        if passed:
            links = self._runner.links()
            runs = [partial(self._pass_gradients, stage, links, passed) for stage in self._own]
            self._runner.run(self._strategy, runs, links)
        gradients = [list(stage.gradients.values()) for stage in self._own]
        for stage in self._own:
            stage.gradients = {}
        if not self._runner.total(sum(map(len, gradients))):
            raise errors.InvalidGradient(
                "no variable has a gradient; compute them from a loss that depends on the variables"
            )
        self._updates.update(self._strategy, optimizer, gradients, divisor)

    def timings(self) -> PipelineTimings:
        """Returns the timings of the training steps so far."""
        own = [
            [seconds, max(0.0, self._seconds - seconds), stage.fixed_bytes, stage.peak_bytes, stage.peak_held]
            for stage, seconds in zip(self._own, self._compute, strict=True)
        ]
        rows = self._runner.rows(np.array(own, np.float64)).tolist()
        found = [
            StageTimings(stage.part.number, name, stage.part.layers, compute, wait, int(fixed), int(peak), int(held))
            for stage, name, (compute, wait, fixed, peak, held) in zip(
                self.stages, self._runner.names, rows, strict=True
            )
        ]
        return PipelineTimings(self.steps, self._seconds, tuple(found), self._settings.micro_batches)

    def _inputs(self, x: Any) -> list[Array]:
        """Returns the inputs of the model, after a check of their shapes."""
        model = self._living()
        return [it.array for it in model.checked_inputs([as_tensor(it) for it in model.listed_inputs(x)])]

    def _living(self) -> Model:
        model = self._model()
        assert model is not None  # it has called this object
        return model

    def _begin(self, count: int) -> None:
        settings, trained = self._settings, frozenset(map(id, self._living().trainable_variables))
        bases = {key: layer.training_calls for key, (layer, _) in self._tied.items()}
        for stage in self._own:
            number = stage.part.number
            held = settings.schedule.held(number, len(self.stages), count)
            numbers = [self._numbers(number, it, bases) for it in range(count)]
            stage.begin(StepPlan(trained, self.slots, held, settings.recompute, settings.limits[number], numbers))

    def _numbers(self, stage: int, micro_batch: int, bases: Mapping[int, int]) -> dict[int, range]:
        """Returns the numbers of the training calls of tied layers, as one process would count them."""
        found = {}
        for key, (_, by_stage) in self._tied.items():
            first = bases[key] + micro_batch * sum(by_stage) + sum(by_stage[:stage])
            found[key] = range(first, first + by_stage[stage])
        return found

    def _count_tied_calls(self, count: int) -> None:
        for layer, by_stage in self._tied.values():
            if layer.trainable or not layer.weights:  # those that draw numbers in training
                layer.training_calls += count * sum(by_stage)

    def _train(
        self,
        stage: ModelStage,
        links: StageLinks,
        inputs: Sequence[Array],
        parts: Sequence[slice],
        objective_of: Callable[[int], MicroBatchLoss],
    ) -> float:
        """Does a stage's work of a training step. Returns the seconds in which it computed."""
        number, last = stage.part.number, len(self.stages) - 1
        seconds = 0.0
        for work in self._settings.schedule.passes(number, len(self.stages), len(parts)):
            of, source, target, what = work.micro_batch, number - 1, number + 1, "activations"
            if not work.is_forward:
                source, target, what = target, source, "gradients"
            message = receive(links, source, number, what, of) if 0 <= source <= last else []
            started = time.perf_counter()
            got = self._put(stage, message)
            if work.is_forward:
                objective = objective_of(of) if number == last else None
                sent: Any = stage.forward(of, got, self._fed(stage, inputs, parts[of]), objective)
            else:
                sent = stage.backward(of, got)
            settle(stage.part.device)
            seconds += time.perf_counter() - started
            if 0 <= target <= last:
                send(links, number, target, sent, what, of)
        return seconds

    def _pass_gradients(
        self, stage: ModelStage, links: StageLinks, passed: Sequence[tuple[StageVariable, Sequence[int]]]
    ) -> None:
        """Does a stage's work to add up the gradients of variables in the stages that update them.

        Args:
            stage: the stage.
            links: carry the gradients.
            passed: variables, each with the stages that use it, and have its gradients.
        """
        number, gradients = stage.part.number, stage.gradients
        for variable, users in passed:
            _, own = gradients.pop(id(variable), (variable, None))
            for other in variable.updaters if number in users else ():
                if other != number:
                    send(links, number, other, [own], _TIED)
            if number in variable.updaters:
                parts = [
                    own if it == number else self._put(stage, receive(links, it, number, _TIED))[0] for it in users
                ]
                given = [it for it in parts if it is not None]
                if given:
                    gradients[id(variable)] = variable, functools.reduce(operator.add, given)

    def _evaluate(
        self, stage: ModelStage, links: StageLinks, inputs: Sequence[Array], parts: Sequence[slice]
    ) -> list[list[Passed]]:
        """Does a stage's work of an evaluation. Returns the outputs of each micro-batch, if the stage gets them."""
        number, last = stage.part.number, len(self.stages) - 1
        found = []
        for of, part in enumerate(parts):
            got: Any = self._put(stage, receive(links, number - 1, number, "activations", of)) if number > 0 else []
            sent = stage.outputs(got, self._fed(stage, inputs, part))
            settle(stage.part.device)
            if number < last:
                send(links, number, number + 1, list(sent), "activations", of)
            else:
                found.append(sent)
                for other in self._runner.listeners:
                    send(links, number, other, list(sent), "outputs", of)
        if number in self._runner.listeners:
            outputs: list[Any] = [receive(links, last, number, "outputs", of) for of, _ in enumerate(parts)]
            return outputs
        return found

    def _put(self, stage: ModelStage, message: Any) -> list[Any]:
        """Returns what a stage has received, on its device."""
        put = stage.part.device.put
        moved = [
            Passed(put(it.array), it.needs_gradient) if isinstance(it, Passed) else None if it is None else put(it)
            for it in message
        ]
        settle(stage.part.device)  # the sender may free its arrays then
        return moved

    def _fed(self, stage: ModelStage, inputs: Sequence[Array], part: slice) -> dict[int, Array]:
        return {it: stage.part.device.put(inputs[it][part]) for it in stage.part.feeds}


def check_samples(samples: int, micro_batches: int) -> None:
    """Raises InvalidData if a batch has fewer samples than there are micro-batches."""
    if samples < micro_batches:
        raise errors.InvalidData(
            f"a batch has {samples} samples, fewer than micro_batches={micro_batches}; give larger batches, leave out "
            "a smaller last one, or use fewer micro-batches"
        )


def _picked(part: Any, chosen: slice) -> Any:
    if part is None:
        return None
    return [array_of(it)[chosen] for it in part] if isinstance(part, list | tuple) else array_of(part)[chosen]


__all__ = ["PipelineSettings", "PipelinedModel", "check_samples"]
