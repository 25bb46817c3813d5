"""Replica threads: they run one function for all replicas of a process, each with its device."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from shoal import _tracing, errors
from shoal_distribute.device_threads import DeviceThreads
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
        self._threads = DeviceThreads(devices, "replica") if len(devices) > 1 else None  # None after `close`, too
        if self._threads is None:
            devices[0].activate()

    def run(self, strategy: Replicated, fn: Callable[..., Any], calls: Sequence[ReplicaCall]) -> list[Any]:
        """Calls a function with each replica's arguments, at the same time.

        Args:
            strategy: the strategy of the replicas.
            fn: the function.
            calls: the arguments of each replica.

        Returns:
            The results, in the order of the replicas.
        """
        if len(self._devices) == 1:
            args, kwargs = calls[0]
            with running(ReplicaContext(strategy, 0, self._devices[0], None)):
                return [fn(*args, **kwargs)]
        if self._threads is None:  # models can be evaluated after their strategy has ended
            self._threads = DeviceThreads(self._devices, "replica")
        rendezvous = Rendezvous(len(calls))
        run = _tracing.in_current_context(_run_replica)
        functions = [
            partial(run, ReplicaContext(strategy, number, device, rendezvous), rendezvous, fn, call)
            for number, (device, call) in enumerate(zip(self._devices, calls, strict=True))
        ]
        # Replicas that only waited for another one raise RanksDisagree.
        return self._threads.run(functions, partial(rendezvous.leave, 0, "was interrupted"), (errors.RanksDisagree,))

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
        """Ends the threads. A later `run` starts others."""
        if self._threads is not None:
            self._threads.close()
            self._threads = None


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


__all__ = ["ReplicaThreads"]
