"""Optimizers of a pipeline: each stage keeps the slots of the variables that it owns, and updates them."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from shoal import optim
from shoal.program import Array
from shoal_distribute.devices import LogicalDevice
from shoal_distribute.local_optimizers import LocalOptimizer
from shoal_distribute.pipeline.runner import StageRunner
from shoal_distribute.pipeline.variables import StageVariable
from shoal_distribute.replica_context import Replicated
from shoal_distribute.strategies import OptimizerStates
from shoal_distribute.tensor_parallel import SplitArray
from shoal_worker.arrays import on_host

# Variables with their gradients.
StageGradients = Sequence[tuple[StageVariable, Array]]


class StageUpdates(Protocol):
    """What updates the variables of the stages of this process with the gradients of a step."""

    def update(
        self,
        strategy: Replicated,
        optimizer: optim.Optimizer,
        gradients: Sequence[StageGradients],
        divisor: float = 1.0,
    ) -> None:
        """Applies an optimizer once, each stage to the variables that it updates.

        Args:
            strategy: the strategy of the stages.
            optimizer: the optimizer.
            gradients: for each stage of this process, the variables that it updates, with their gradients.
            divisor: what divides these.
        """


class StageOptimizers:
    """The state of optimizers, and their updates.

    Args:
        devices: the devices of all stages.
        runner: runs the stages of this process.
    """

    def __init__(self, devices: Sequence[LogicalDevice], runner: StageRunner) -> None:
        self._devices, self._runner = [devices[it] for it in runner.own], runner
        self.states = OptimizerStates(len(runner.own))

    def update(
        self,
        strategy: Replicated,
        optimizer: optim.Optimizer,
        gradients: Sequence[StageGradients],
        divisor: float = 1.0,
    ) -> None:
        """Applies an optimizer once. See `StageUpdates`.

        Args:
            strategy, optimizer, gradients, divisor: see `StageUpdates.update`.
        """
        own = [self.states.of(optimizer, number) for number in range(len(gradients))]
        self._gather(own, gradients)
        run = partial(self._runner.run, strategy)
        means = run([partial(self._means, number, part, divisor) for number, part in enumerate(gradients)])
        square = 0.0
        if optimizer.clip_norm:  # the norm that it limits is that of all stages
            counted = [
                [mean for (variable, _), mean in zip(part, parts, strict=True) if variable.stage == stage]
                for stage, part, parts in zip(self._runner.own, gradients, means, strict=True)
            ]
            squares = run([partial(it.square_of, part) for it, part in zip(own, counted, strict=True)])
            square = self._runner.total(math.fsum(squares))

        def changed(number: int) -> None:
            own[number].update(means[number], square)
            for variable, _ in gradients[number]:
                variable.constrain(variable.values[0])

        run([partial(changed, number) for number in range(len(gradients))])

    def arrays(self, optimizer: optim.Optimizer) -> dict[str, np.ndarray]:
        """Returns copies of the slots by "variable/slot", on the host."""
        own = [self.states.of(optimizer, number) for number in range(len(self._devices))]
        updated = self._runner.merged(_hosted([it.updated_state() for it in own]))
        # After a restore, each process has all slots. Those that no process has updated since are the same in all.
        return (
            _hosted([{path: array for path, array in it.state().items() if path not in updated} for it in own])
            | updated
        )

    def restore(self, optimizer: optim.Optimizer, iterations: int, state: dict[str, np.ndarray]) -> None:
        """Sets the slots. They stay on the host until `update` moves them to the stages of their variables.

        Args:
            optimizer: the optimizer.
            iterations: how often it has been applied.
            state: as `arrays` returned it.
        """
        arrays = {path: np.array(array) for path, array in state.items()}
        for stage, device in enumerate(self._devices):
            self.states.of(optimizer, stage).restore(iterations, arrays if stage == 0 else {}, device.put)

    def _gather(self, own: Sequence[LocalOptimizer], gradients: Sequence[StageGradients]) -> None:
        """Moves slots to the stages of their variables: they may have been restored, or the model was cut again."""
        for mine, part in zip(own, gradients, strict=True):
            for variable, _ in part:
                if not mine.keeps(variable.name):
                    for slots in filter(None, [other.take(variable.name) for other in own]):
                        placed = {slot: variable.placed(np.array(on_host(array))) for slot, array in slots.items()}
                        mine.give(variable.name, placed)

    def _means(self, number: int, gradients: StageGradients, divisor: float) -> list[tuple[str, Array, Array]]:
        """Returns what a stage of this process updates its variables with."""
        device = self._devices[number]
        placed = [it if isinstance(it, SplitArray) else device.put(it) for _, it in gradients]
        totals = self._runner.summed(placed)
        return [
            (variable.name, variable.values[0], total / total.dtype.type(divisor))
            for (variable, _), total in zip(gradients, totals, strict=True)
        ]


def _hosted(states: Sequence[Mapping[str, Array]]) -> dict[str, np.ndarray]:
    """Returns copies of the arrays of all states, on the host."""
    return {path: np.array(on_host(array)) for state in states for path, array in state.items()}


__all__ = ["StageGradients", "StageOptimizers", "StageUpdates"]
