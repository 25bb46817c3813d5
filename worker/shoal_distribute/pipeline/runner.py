"""Interface of what runs the stages of a pipeline: threads of one process, or processes with a stage each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import numpy as np

from shoal.program import Array
from shoal_distribute.pipeline.links import StageLinks
from shoal_distribute.replica_context import Replicated

T = TypeVar("T")


class StageRunner(Protocol):
    """Runs the stages that this process computes. All processes make the same calls.

    Attributes:
        own: numbers of these stages, in order.
        listeners: numbers of the stages whose processes get the outputs of the model from the last stage.
        names: for each stage, what `StageTimings` calls its device.
    """

    own: Sequence[int]
    listeners: Sequence[int]
    names: Sequence[str]

    def links(self) -> StageLinks:
        """Returns the links of the stages for one step."""

    def begin(self, what: str) -> None:
        """Makes sure that all processes of this replica begin the same.

        Args:
            what: what they begin.
        """

    def run(
        self, strategy: Replicated, functions: Sequence[Callable[[], T]], links: StageLinks | None = None
    ) -> list[T]:
        """Calls a function for each stage of this process, at the same time.

        Args:
            strategy: the strategy that the stages belong to.
            functions: the functions.
            links: the links on which the functions wait for each other.

        Returns:
            The results, in the order of the stages.
        """

    def count_step(self, micro_batches: int, seconds: float, compute: Sequence[float]) -> None:
        """Counts a training step in the times that other processes see.

        Args:
            micro_batches: number of micro-batches of the step.
            seconds: duration of its passes.
            compute: seconds in which each stage of this process computed.
        """

    def chosen(self, choose: Callable[[], Sequence[int]], count: int) -> list[int]:
        """Returns whole numbers that one process chooses for all, also for those of other replicas.

        Args:
            choose: returns the numbers.
            count: how many there are.
        """

    def total(self, number: float) -> float:
        """Returns the sum of the numbers of all processes of this replica."""

    def rows(self, own: np.ndarray) -> np.ndarray:
        """Returns a row of numbers for each stage of this replica, given those of this process's stages."""

    def summed(self, arrays: list[Array]) -> list[Array]:
        """Returns the sums of the arrays that the replicas of a stage have, on the device of the stage."""

    def merged(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the arrays of all processes of this replica, by name."""

    def close(self) -> None:
        """Ends what runs the stages."""


__all__ = ["StageRunner"]
