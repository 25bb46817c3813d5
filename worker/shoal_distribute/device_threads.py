"""Threads of devices that compute at the same time: replicas, stages of a pipeline, parts of a split layer."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from shoal import errors
from shoal_distribute.core_shares import CoreShares
from shoal_distribute.devices import LogicalDevice

T = TypeVar("T")


class DeviceThreads:
    """A thread for each device.

    Args:
        devices: the devices.
        name: what the names of the threads begin with.
        activates: whether each thread always computes on its device; otherwise the functions choose the device.
    """

    def __init__(self, devices: Sequence[LogicalDevice], name: str, *, activates: bool = True) -> None:
        self._pools = [
            ThreadPoolExecutor(
                1, thread_name_prefix=f"{name}-{number}", initializer=device.activate if activates else None
            )
            for number, device in enumerate(devices)
        ]
        self._shares = CoreShares(max(1, sum(not it.is_gpu for it in devices)))
        # Calls of several threads reach all pools in the same order. Otherwise each could wait for the other.
        self._submitting = threading.Lock()
        self._is_closed = False

    def run(
        self,
        functions: Sequence[Callable[[], T]],
        interrupted: Callable[[], None] = lambda: None,
        follow_up: tuple[type[BaseException], ...] = (),
    ) -> list[T]:
        """Calls a function on the thread of each device, at the same time.

        Args:
            functions: the function of each device.
            interrupted: called at Ctrl-C. Afterwards the functions must not wait for each other any more.
            follow_up: errors of functions that have waited for one that failed.

        Returns:
            The results, in the order of the devices. If functions raise, the first error that is no follow-up is
            raised, otherwise the first one.

        Raises:
            WrongContext: the strategy is closed.
        """
        with self._shares.limited():
            with self._submitting:
                self._check_open()
                futures = [pool.submit(function) for pool, function in zip(self._pools, functions, strict=True)]
            try:
                wait(futures)
            except BaseException:
                interrupted()
                wait(futures)
                raise
        raised = [error for future in futures if (error := future.exception()) is not None]
        if raised:
            raise next((it for it in raised if not isinstance(it, follow_up)), raised[0])
        return [future.result() for future in futures]

    def close(self) -> None:
        """Ends the threads."""
        self._is_closed = True
        for pool in self._pools:
            pool.shutdown()

    def _check_open(self) -> None:
        if self._is_closed:
            raise errors.WrongContext(
                "the strategy is closed, so its devices compute no more steps; close it after the last step, or make "
                "another strategy"
            )


__all__ = ["DeviceThreads"]
