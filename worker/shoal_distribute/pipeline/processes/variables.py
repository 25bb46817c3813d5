"""Variables of a pipeline in several processes: each has its value in the processes of the stages that use it."""

from collections.abc import Sequence

import numpy as np

from shoal import errors
from shoal.program import Array
from shoal_distribute.devices import LogicalDevice
from shoal_distribute.pipeline.processes.runner import RankStage
from shoal_distribute.pipeline.variables import StageVariable
from shoal_distribute.replica_context import Replicated, current_replica
from shoal_distribute.tensor_parallel import SplitPlace
from shoal_worker.arrays import on_host


class RankVariable(StageVariable):
    """A variable that all processes have until its model is cut into stages, and then only those that use it.

    To read it outside of `run` is a call that the processes of all stages make, because others get it from the first
    stage that has it.

    Args:
        strategy, name, initial, trainable, split: see `StageVariable`.
        ranks: the stage of this process.
    """

    def __init__(
        self,
        strategy: Replicated,
        name: str,
        initial: np.ndarray,
        *,
        trainable: bool,
        ranks: RankStage,
        split: SplitPlace | None = None,
    ) -> None:
        super().__init__(strategy, name, initial, trainable=trainable, split=split)
        self._ranks = ranks
        self._stages: Sequence[int] = ()

    def place(self, stages: Sequence[int], devices: Sequence[LogicalDevice]) -> None:
        if self.is_placed:
            if missing := sorted({*stages} - {*self._stages}):
                raise errors.InvalidLayer(
                    f"stage {missing[0]} needs variable {self.name}, but another model has placed it in the processes "
                    f"of other stages ({', '.join(map(str, self._stages))}); give both models cuts that agree"
                )
            return
        super().place(stages, devices)
        self._stages = tuple(stages)
        if not self.is_here:
            self._value = np.empty(0, self.dtype)

    @property
    def updaters(self) -> Sequence[int]:
        return self._stages

    def storage(self) -> Array:
        self._require_here()
        return super().storage()

    @property
    def values(self) -> tuple[Array, ...]:
        self._require_here()
        return super().values

    def read(self) -> Array:
        replica = current_replica()
        if not self.is_placed or (replica and replica.strategy is self.strategy):
            self._require_here()
            return super().read()
        owns = self._ranks.stage == self.stage
        memory = np.array(on_host(self._value), order="C") if owns else np.empty(self.shape, self.dtype)
        return self._ranks.value_of(self.stage, memory)

    def _set(self, value: np.ndarray) -> None:
        if self.is_here:
            super()._set(value)

    @property
    def is_here(self) -> bool:
        """Whether this process has the value."""
        return not self.is_placed or self._ranks.stage in self._stages

    def _require_here(self) -> None:
        if not self.is_here:
            raise errors.WrongContext(
                f"variable {self.name} is in another process, that of stage {self.stage}; within run, only the steps "
                "of a model (fit, evaluate, predict) compute in stages"
            )


__all__ = ["RankVariable"]
