"""ClusterCoordinator: functions that any worker of a ParameterServerStrategy runs, as in TensorFlow."""

import atexit
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from shoal import errors
from shoal._system import check_count
from shoal._training import failure_at_exit, failure_of
from shoal_distribute.coordinator.chief_calls import ChiefCalls
from shoal_distribute.coordinator.execution import CallScheduler
from shoal_distribute.coordinator.local_calls import LocalCalls
from shoal_distribute.coordinator.per_worker import PerWorkerDataset, own_values, per_worker_dataset
from shoal_distribute.coordinator.remote_values import RemoteValue
from shoal_distribute.coordinator.worker_calls import WorkerCalls
from shoal_distribute.group_security import group_security
from shoal_distribute.strategies import ParameterServerStrategy
from shoal_distribute.task_group import listen_at

# Scheduled calls that have not ended, and bytes of results that the chief keeps for workers that ask later.
MAX_CALLS, KEPT_BYTES = 4096, 256 << 20
_NAME_BYTES = 200


class ClusterCoordinator:
    """Schedules functions, which the workers of a `ParameterServerStrategy` run.

        strategy = ParameterServerStrategy()  # in a task of TF_CONFIG
        coordinator = ClusterCoordinator(strategy)
        with strategy.scope():
            model, optimizer = make_model(), keras.optimizers.SGD(0.1)
        dataset = coordinator.create_per_worker_dataset(make_dataset)
        batches = iter(dataset)
        losses = [coordinator.schedule(step, args=(batches,)) for _ in range(1000)]
        coordinator.join()
        print(np.mean(coordinator.fetch(losses)))

    The chief and all workers run the same script, and functions are never sent. The n-th call of `schedule` is the same
    one in each task. The chief gives each call to a free worker. When the worker's own script has also made this call,
    the worker runs it on a thread, in the scope of the strategy. The script of a worker does not get ahead of the
    chief's: `schedule`, `join` and `done` return when the chief's have returned, with the same result, and `fetch`
    returns the same value in all tasks. So the scripts must not decide by anything that differs between tasks, such as
    the time: let a scheduled function return it, and fetch it.

    If a worker dies, another one gets its call. Each call has one result, but a call whose worker has died may have
    pushed its gradients before, so they can count twice. A worker that is started again runs the script from its start,
    through what the chief has recorded, and takes part again. If the chief dies, all tasks end with an error.

    A process without workers runs each function in `schedule`.

    Args:
        strategy: the strategy. Its consistency must be `Asynchronous`. From now on the chief computes nothing itself.
        max_calls: calls from the first unfinished one to the last one; `schedule` waits when there are that many.
        kept_bytes: bytes of results that the chief keeps for workers that fetch them later.

    Attributes:
        strategy: the strategy.

    Raises:
        BadRequest: the strategy is of another kind, or has another consistency; or there are several workers, but no
            `TF_CONFIG` that lists them.
        PortInUse: this worker cannot listen at its address in `TF_CONFIG`.
        WrongContext: the strategy has a `ClusterCoordinator` already.
    """

    def __init__(
        self, strategy: ParameterServerStrategy, *, max_calls: int = MAX_CALLS, kept_bytes: int = KEPT_BYTES
    ) -> None:
        if not isinstance(strategy, ParameterServerStrategy):
            raise errors.BadRequest(
                f"a ClusterCoordinator needs a ParameterServerStrategy, not a {type(strategy).__name__}; with other "
                "strategies, each process runs the loop itself"
            )
        max_calls, kept_bytes = check_count("max_calls", max_calls, 1), check_count("kept_bytes", kept_bytes, 0)
        self.strategy = strategy
        self._calls = _calls_of(strategy, max_calls, kept_bytes)
        self._within = threading.local()
        atexit.register(self._close_at_exit)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=bool(failure_of(error)))

    def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> RemoteValue:
        """Gives a function to a worker that is free, and returns at once. Waits only if too many calls are unfinished.

        Args:
            fn: the function. It returns arrays, numbers, strings, None, or lists, tuples and dicts of them, of at most
                8 MiB.
            args: its arguments. Each worker gets its own value of a per-worker iterator, also within tuples, lists and
                dicts.
            kwargs: arguments by name.

        Returns:
            The result, which may not be there yet.

        Raises:
            ProgramError: a function that was scheduled before has raised an exception. The message has the name of its
                worker and its traceback. The calls that had not begun are cancelled, and this function is not
                scheduled. After that, functions can be scheduled again.
            RanksDisagree: the tasks run different scripts.
            Unreachable: the chief has ended.
            WrongContext: a scheduled function calls it.
            BadRequest: `fn` is no function.
        """
        if getattr(self._within, "call", False):
            raise errors.WrongContext("a scheduled function calls schedule; call the other function itself")
        if not callable(fn):
            raise errors.BadRequest(f"a {type(fn).__name__} is scheduled; give a function, and its arguments as args")
        given, named = tuple(args or ()), dict(kwargs or {})
        self.strategy.begin()
        name = getattr(fn, "__qualname__", type(fn).__qualname__).encode()[:_NAME_BYTES].decode(errors="ignore")

        def call() -> Any:
            self._within.call = True
            try:
                return fn(*own_values(given), **own_values(named))
            finally:
                self._within.call = False

        return RemoteValue(self._calls.schedule(name, call), name)

    def join(self) -> None:
        """Waits until all scheduled functions have ended.

        Raises:
            ProgramError: one of them has raised an exception; see `schedule`.
            RanksDisagree, Unreachable: see `schedule`.
        """
        self._calls.join()
        self.strategy.refresh()

    def done(self) -> bool:
        """Returns whether all scheduled functions have ended.

        Raises:
            ProgramError: one of them has raised an exception; see `schedule`.
            RanksDisagree, Unreachable: see `schedule`.
        """
        done = self._calls.done()
        if done:
            self.strategy.refresh()
        return done

    def fetch(self, val: Any) -> Any:
        """Waits for results.

        Args:
            val: a `RemoteValue`, or tuples, lists and dicts of them. Everything else stays as it is.

        Returns:
            The same structure of results.

        Raises:
            ProgramError, Cancelled, LimitExceeded, RanksDisagree, Unreachable: see `RemoteValue.fetch`.
        """
        match val:
            case RemoteValue():
                return val.fetch()
            case dict():
                return {key: self.fetch(item) for key, item in val.items()}
            case list():
                return [self.fetch(item) for item in val]
            case tuple() if type(val) is tuple:
                return tuple(self.fetch(item) for item in val)
        return val

    def create_per_worker_dataset(self, dataset_or_fn: Iterable[Any] | Callable[[], Iterable[Any]]) -> PerWorkerDataset:
        """Returns a data set of each worker. `iter` of it is an argument for `schedule`.

        Args:
            dataset_or_fn: a data set, or a function that each worker calls once to make its own, when it runs the first
                call that needs it. Workers run different numbers of calls, so it should be endless (`repeat`), and
                shuffled differently by each worker.

        Raises:
            BadRequest: it is neither.
        """
        return per_worker_dataset(dataset_or_fn)

    def close(self, *, failed: bool = False) -> None:
        """Ends this task's part. At the end of a `with` block, or of the process, this happens by itself.

        If the script has not failed, the chief waits until the scripts of the workers have ended. At the end of the
        process, an uncaught exception is known, but `sys.exit(1)` is not: a `with` block sees both.

        Args:
            failed: whether the script ends with an error. The chief then does not wait.
        """
        atexit.unregister(self._close_at_exit)
        self._calls.close(failed=failed)

    def _close_at_exit(self) -> None:
        self.close(failed=bool(failure_at_exit()))


def _calls_of(strategy: ParameterServerStrategy, max_calls: int, kept_bytes: int) -> CallScheduler:
    """Returns what a coordinator does in this task."""
    task = strategy.coordinate()
    if task is None or not task.worker_addresses:
        return LocalCalls(strategy.scope)
    security = group_security([task.coordinator, *task.worker_addresses])
    if task.is_chief:
        return ChiefCalls(task.worker_addresses, security, max_calls=max_calls, kept_bytes=kept_bytes)
    worker = task.number - 1
    return WorkerCalls(worker, listen_at(task.worker_addresses[worker]), security, strategy.scope)


__all__ = ["KEPT_BYTES", "MAX_CALLS", "ClusterCoordinator"]
