"""Per-worker values: each worker makes its own, such as an iterator over its data set."""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from shoal import errors
from shoal_distribute.coordinator.remote_values import RemoteValue
from shoal_distribute.input import DistributedIterator


class PerWorkerValues:
    """A value that each worker makes for itself. A scheduled function gets that of the worker that runs it.

    Args:
        make: makes the value in this process, when it is first needed.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._lock = threading.Lock()  # guards _made
        self._made: list[Any] = []

    def value(self) -> Any:
        """Returns the value of this process."""
        with self._lock:
            if not self._made:
                self._made.append(self._make())
            return self._made[0]


class PerWorkerDataset(PerWorkerValues):
    """A data set of each worker. `iter` of it gives an iterator of each worker.

    Args:
        make: makes the data set in this process.
    """

    def __iter__(self) -> "PerWorkerIterator":
        return PerWorkerIterator(lambda: DistributedIterator(iter(self.value())))


class PerWorkerIterator(PerWorkerValues, Iterator[Any]):
    """An iterator of each worker over its data set. Give it to `ClusterCoordinator.schedule`."""

    def __iter__(self) -> "PerWorkerIterator":
        return self

    def __next__(self) -> Any:
        raise errors.WrongContext(
            "next() is called on the iterators of all workers; give the iterator to schedule as an argument, and call "
            "next() within the function"
        )

    def get_next(self) -> Any:
        """Raises WrongContext, as `next` does: call it within the function."""
        return next(self)


def per_worker_dataset(dataset_or_fn: Iterable[Any] | Callable[[], Iterable[Any]]) -> PerWorkerDataset:
    """Returns the data set of each worker.

    Args:
        dataset_or_fn: a data set, or a function without arguments that makes one.

    Raises:
        BadRequest: it is neither, or an iterator, which only one loop can use.
    """
    given = dataset_or_fn
    if isinstance(given, Iterable) and not isinstance(given, Iterator):
        return PerWorkerDataset(lambda: given)
    if callable(given):
        return PerWorkerDataset(given)
    raise errors.BadRequest(
        f"a {type(given).__name__} is not the data set of each worker; give a data set, such as "
        "shoal.data.from_arrays(x, y).repeat().batch(32), or a function that makes one"
    )


def own_values(tree: Any) -> Any:
    """Returns the arguments of a scheduled function as this process has them.

    Args:
        tree: arguments, in tuples, lists and dicts.

    Raises:
        BadRequest: one is a `RemoteValue`, which is at the chief.
    """
    match tree:
        case PerWorkerValues():
            return tree.value()
        case RemoteValue():
            raise errors.BadRequest(f"{tree!r} is an argument of a scheduled function; give its fetch() instead")
        case dict():
            return {key: own_values(value) for key, value in tree.items()}
        case list():
            return [own_values(value) for value in tree]
        case tuple() if type(tree) is tuple:
            return tuple(own_values(value) for value in tree)
    return tree


__all__ = ["PerWorkerDataset", "PerWorkerIterator", "PerWorkerValues", "own_values", "per_worker_dataset"]
