"""Threads of the stages of a pipeline, one for each device."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from shoal import _tracing
from shoal.program import Array
from shoal_distribute.device_threads import DeviceThreads
from shoal_distribute.devices import LogicalDevice
from shoal_distribute.pipeline.links import Links, StageLinks, Stopped
from shoal_distribute.replica_context import ReplicaContext, Replicated, entered_strategies, running

T = TypeVar("T")


class StageThreads:
    """The `StageRunner` of one process: a thread for each stage, which computes on the stage's device.

    Args:
        devices: the devices of the stages.
    """

    listeners: Sequence[int] = ()

    def __init__(self, devices: Sequence[LogicalDevice]) -> None:
        self._devices = devices
        self.own: Sequence[int] = range(len(devices))
        self.names: Sequence[str] = [it.name for it in devices]
        self._threads = DeviceThreads(devices, "stage")

    def links(self) -> Links:
        return Links()

    def begin(self, what: str) -> None:
        """Does nothing: the stages begin the same because one thread tells them to."""

    def run(
        self, strategy: Replicated, functions: Sequence[Callable[[], T]], links: StageLinks | None = None
    ) -> list[T]:
        """Calls a function on the thread of each stage, at the same time.

        Args:
            strategy: the strategy that the stages belong to.
            functions: the function of each stage.
            links: the links on which the functions wait for each other. They are stopped when one of them fails.

        Returns:
            The results, in the order of the stages.
        """
        call = _tracing.in_current_context(_run_stage)
        calls = [
            partial(call, ReplicaContext(strategy, 0, device, None), number, function, links)
            for number, (device, function) in enumerate(zip(self._devices, functions, strict=True))
        ]
        return self._threads.run(calls, links.stop if links else lambda: None, follow_up=(Stopped,))

    def count_step(self, micro_batches: int, seconds: float, compute: Sequence[float]) -> None:
        """Does nothing: no other process sees the times of these stages.

        Args:
            micro_batches, seconds, compute: see `StageRunner.count_step`.
        """

    def chosen(self, choose: Callable[[], Sequence[int]], count: int) -> list[int]:
        """Returns the numbers that a function chooses: there are no other processes.

        Args:
            choose, count: see `StageRunner.chosen`.
        """
        del count
        return list(choose())

    def total(self, number: float) -> float:
        return number

    def rows(self, own: np.ndarray) -> np.ndarray:
        return own

    def summed(self, arrays: list[Array]) -> list[Array]:
        return arrays

    def merged(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(arrays)

    def close(self) -> None:
        """Ends the threads."""
        self._threads.close()


def _run_stage(replica: ReplicaContext, number: int, function: Callable[[], T], links: StageLinks | None) -> T:
    scopes = entered_strategies()
    scopes.append(replica.strategy)
    try:
        with running(replica):
            return function()
    except BaseException as error:
        if not isinstance(error, Stopped):
            error.add_note(f"raised in stage {number}, on {replica.device}")
        if links:
            links.stop()
        raise
    finally:
        scopes.pop()


__all__ = ["StageThreads"]
