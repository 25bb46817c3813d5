"""Threads of the stages of a pipeline, one for each device."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from shoal import _tracing
from shoal_distribute.core_shares import CoreShares
from shoal_distribute.devices import LogicalDevice
from shoal_distribute.pipeline.links import Links, Stopped
from shoal_distribute.replica_context import ReplicaContext, Replicated, entered_strategies, running

T = TypeVar("T")


class StageThreads:
    """A thread for each stage. It computes on the stage's device.

    Args:
        devices: the devices of the stages.
    """

    def __init__(self, devices: Sequence[LogicalDevice]) -> None:
        self._devices = devices
        self._pools = [
            ThreadPoolExecutor(1, thread_name_prefix=f"stage-{number}", initializer=device.activate)
            for number, device in enumerate(devices)
        ]
        self._shares = CoreShares(max(1, sum(not it.is_gpu for it in devices)))
        # Steps of several threads reach all pools in the same order. Otherwise each could wait for the other.
        self._submitting = threading.Lock()

    def run(self, strategy: Replicated, functions: Sequence[Callable[[], T]], links: Links | None = None) -> list[T]:
        """Calls a function on the thread of each stage, at the same time.

        Args:
            strategy: the strategy that the stages belong to.
            functions: the function of each stage.
            links: the links on which the functions wait for each other. They are stopped when one of them fails.

        Returns:
            The results, in the order of the stages.
        """
        call = _tracing.in_current_context(_run_stage)
        with self._shares.limited():
            with self._submitting:
                futures = [
                    pool.submit(call, ReplicaContext(strategy, 0, device, None), number, function, links)
                    for number, (pool, device, function) in enumerate(
                        zip(self._pools, self._devices, functions, strict=True)
                    )
                ]
            try:
                wait(futures)
            except BaseException:  # Ctrl-C: the stages must not wait for each other any more
                if links:
                    links.stop()
                wait(futures)
                raise
        _raise_first(futures)
        return [future.result() for future in futures]

    def close(self) -> None:
        """Ends the threads."""
        for pool in self._pools:
            pool.shutdown()


def _run_stage(replica: ReplicaContext, number: int, function: Callable[[], T], links: Links | None) -> T:
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


def _raise_first(futures: Sequence["Future[Any]"]) -> None:
    """Raises the first error of a stage that did not just stop because of another one."""
    raised = [error for future in futures if (error := future.exception()) is not None]
    if raised:
        raise next((it for it in raised if not isinstance(it, Stopped)), raised[0])


__all__ = ["StageThreads"]
