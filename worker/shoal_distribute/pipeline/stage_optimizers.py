"""Optimizers of a pipeline: each stage keeps the slots of the variables that it owns, and updates them."""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from shoal import optim
from shoal.program import Array
from shoal_distribute.devices import LogicalDevice
from shoal_distribute.local_optimizers import LocalOptimizer
from shoal_distribute.pipeline.stage_threads import StageThreads
from shoal_distribute.pipeline.variables import StageVariable
from shoal_distribute.replica_context import Replicated
from shoal_distribute.strategies import OptimizerStates
from shoal_worker.arrays import on_host


class StageOptimizers:
    """The state of optimizers, and their updates.

    Args:
        devices: the devices of the stages.
        threads: the threads of the stages.
    """

    def __init__(self, devices: Sequence[LogicalDevice], threads: StageThreads) -> None:
        self._devices, self._threads = devices, threads
        self.states = OptimizerStates(len(devices))

    def update(
        self,
        strategy: Replicated,
        optimizer: optim.Optimizer,
        gradients: Sequence[tuple[StageVariable, Sequence[Array]]],
        divisor: float = 1.0,
    ) -> None:
        """Applies an optimizer once, each stage to the variables that it owns.

        Args:
            strategy: the strategy of the stages.
            optimizer: the optimizer.
            gradients: variables, each with gradients that are added up.
            divisor: what divides the sums.
        """
        stages = range(len(self._devices))
        own = [self.states.of(optimizer, stage) for stage in stages]
        self._gather(own, gradients)
        means = self._threads.run(strategy, [partial(self._means, stage, gradients, divisor) for stage in stages])
        # The norm that `clip_norm` limits is that of all stages.
        square = math.fsum(
            self._threads.run(strategy, [partial(it.square_of, part) for it, part in zip(own, means, strict=True)])
        )

        def changed(stage: int) -> None:
            own[stage].update(means[stage], square)
            for variable, _ in gradients:
                if variable.stage == stage:
                    variable.constrain(variable.values[0])

        self._threads.run(strategy, [partial(changed, stage) for stage in stages])

    def arrays(self, optimizer: optim.Optimizer) -> dict[str, np.ndarray]:
        """Returns copies of the slots by "variable/slot", on the host."""
        copies = [self.states.of(optimizer, stage).state() for stage in range(len(self._devices))]
        return {path: np.array(on_host(array)) for copy in copies for path, array in copy.items()}

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

    def _gather(
        self, own: Sequence[LocalOptimizer], gradients: Sequence[tuple[StageVariable, Sequence[Array]]]
    ) -> None:
        """Moves slots to the stages of their variables: they may have been restored, or the model was cut again."""
        for variable, _ in gradients:
            mine, put = own[variable.stage], self._devices[variable.stage].put
            if not mine.keeps(variable.name):
                for slots in filter(None, [other.take(variable.name) for other in own]):
                    mine.give(variable.name, {slot: put(np.array(on_host(array))) for slot, array in slots.items()})

    def _means(
        self, stage: int, gradients: Sequence[tuple[StageVariable, Sequence[Array]]], divisor: float
    ) -> list[tuple[str, Array, Array]]:
        """Returns what a stage updates its variables with."""
        put, found = self._devices[stage].put, []
        for variable, parts in gradients:
            if variable.stage == stage:
                total = put(parts[0])
                for part in parts[1:]:
                    total = total + put(part)
                found.append((variable.name, variable.values[0], total / total.dtype.type(divisor)))
        return found


__all__ = ["StageOptimizers"]
