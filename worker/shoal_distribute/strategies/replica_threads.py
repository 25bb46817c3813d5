"""Replica threads: they run one function for all replicas of a process, each with its device."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from shoal import _tracing, errors
from shoal_distribute.core_shares import CoreShares
from shoal_distribute.devices import LogicalDevice
from shoal_distribute.rendezvous import Rendezvous
from shoal_distribute.replica_context import ReplicaContext, Replicated, entered_strategies, running

# The arguments of one replica: by position, and by name.
ReplicaCall = tuple[tuple[Any, ...], dict[str, Any]]


class ReplicaThreads:
    """A thread for each device if there are several. With one device, the caller's thread does the work.

    Args:
        devices: the devices.
    """

    def __init__(self, devices: Sequence[LogicalDevice]) -> None:
        self._devices = devices
        several = len(devices) > 1
        self._pools = [
            ThreadPoolExecutor(1, thread_name_prefix=f"replica-{number}", initializer=device.activate)
            for number, device in enumerate(devices)
            if several
        ]
        if not several:
            devices[0].activate()
        self._shares = CoreShares(max(1, sum(not it.is_gpu for it in devices)))
        # Calls of several threads reach all pools in the same order. Otherwise each could wait for the other.
        self._submitting = threading.Lock()

    def run(self, strategy: Replicated, fn: Callable[..., Any], calls: Sequence[ReplicaCall]) -> list[Any]:
        """Calls a function with each replica's arguments, at the same time.

        Args:
            strategy: the strategy of the replicas.
            fn: the function.
            calls: the arguments of each replica.

        Returns:
            The results, in the order of the replicas.
        """
        if not self._pools:
            args, kwargs = calls[0]
            with running(ReplicaContext(strategy, 0, self._devices[0], None)):
                return [fn(*args, **kwargs)]
        with self._shares.limited():
            return self._run_all(strategy, fn, calls)

    def _run_all(self, strategy: Replicated, fn: Callable[..., Any], calls: Sequence[ReplicaCall]) -> list[Any]:
        rendezvous = Rendezvous(len(calls))
        run = _tracing.in_current_context(_run_replica)
        with self._submitting:
            futures = [
                pool.submit(run, ReplicaContext(strategy, number, device, rendezvous), rendezvous, fn, call)
                for number, (pool, device, call) in enumerate(zip(self._pools, self._devices, calls, strict=True))
            ]
        try:
            wait(futures)
        except BaseException:  # Ctrl-C: the replicas must not wait for each other any more
            rendezvous.leave(0, "was interrupted")
            wait(futures)
            raise
        _raise_first(futures)
        return [future.result() for future in futures]

    def merged(self, call: Callable[[], Any]) -> tuple[Any, Exception | None]:
        """Calls a function in cross-replica context, on a replica's thread.

        Returns:
            Its result, and the error that it raised.
        """
        with running(None):
            try:
                return call(), None
            except Exception as error:  # every replica raises it
                return None, error

    def close(self) -> None:
        """Ends the threads."""
        for pool in self._pools:
            pool.shutdown()


def _run_replica(replica: ReplicaContext, rendezvous: Rendezvous, fn: Callable[..., Any], call: ReplicaCall) -> Any:
    args, kwargs = call
    scopes, number = entered_strategies(), replica.local_replica
    scopes.append(replica.strategy)
    try:
        with running(replica):
            result = fn(*args, **kwargs)
    except BaseException as error:
        error.add_note(f"raised in replica {number}, on {replica.device}")
        rendezvous.leave(number, f"raised {type(error).__name__}")
        raise
    finally:
        scopes.pop()
    rendezvous.leave(number, "has returned")
    return result


def _raise_first(futures: Sequence["Future[Any]"]) -> None:
    """Raises the first error of a replica that did not just wait for another one; otherwise the first error."""
    raised = [error for future in futures if (error := future.exception()) is not None]
    if raised:
        raise next((it for it in raised if not isinstance(it, errors.RanksDisagree)), raised[0])


__all__ = ["ReplicaThreads"]
