"""Data sets whose elements are the parts of this process's replicas."""

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol

from shoal import errors
from shoal.data import DataPipeline, from_generator
from shoal.data._pipeline import mapped, shard, split_batch
from shoal.program import Array, Dataset
from shoal_distribute.input.context import InputContext
from shoal_distribute.values import regrouped

# Takes whether this process has a batch, and returns whether any process has one.
Agree = Callable[[bool], bool]
# Makes the data set of a process: batches for one replica each.
DatasetFn = Callable[[InputContext], Iterable[Any]]


class Place(Protocol):
    """What the input uses of a replica's device."""

    def put(self, array: Array) -> Array:
        """Returns the array on the device."""
        ...


class DistributedIterator(Iterator[Any]):
    """An iterator with TensorFlow's `get_next`. `iter` of a distributed data set, or of one per worker, returns it.

    Args:
        elements: what it yields.
    """

    def __init__(self, elements: Iterator[Any]) -> None:
        self._elements = elements

    def __next__(self) -> Any:
        return next(self._elements)

    def get_next(self) -> Any:
        """Returns the next element.

        Raises:
            StopIteration: there is none. TensorFlow raises `OutOfRangeError`.
        """
        return next(self)

    def close(self) -> None:
        """Ends the iteration, and the threads that read ahead for it."""
        if isinstance(self._elements, Generator):
            self._elements.close()


class DistributedDataset:
    """Batches divided between the replicas of this process. `Strategy.experimental_distribute_dataset` makes it.

        for images, labels in strategy.experimental_distribute_dataset(dataset.batch(256)):
            losses = strategy.run(step, args=(images, labels))

    Each array is a `PerReplica` of parts on the replicas' devices; with one replica, it is the plain array. The sizes
    of the parts differ by at most 1. If a batch, such as the last one, has fewer samples than there are replicas, the
    last parts have no rows, as in TensorFlow: divide a loss by the global batch size, not by the number of rows.

    It can be iterated any number of times. `len()` is the number of steps if it is known.

    Args:
        batches: returns an iterator over the parts of the replicas, one list for each step.
        devices: the devices of the replicas.
        steps: number of steps, if the source has a length.
        agree: whether any process has a batch, given whether this one has. A process without a batch then gets one
            without rows, until no process has any, because all processes must take the same number of steps. None means
            that there are no other processes.
    """

    def __init__(
        self,
        batches: Callable[[], Iterator[list[Any]]],
        devices: Sequence[Place],
        steps: Sized | None = None,
        agree: Agree | None = None,
    ) -> None:
        self._batches, self._devices, self._steps, self._agree = batches, devices, steps, agree

    def __len__(self) -> int:
        if self._steps is None:
            raise TypeError("the number of steps of this data set is unknown")
        return len(self._steps)

    def __bool__(self) -> bool:
        """Returns True: the data set is there, whatever its length."""
        return True

    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self._elements())

    def _elements(self) -> Iterator[Any]:
        empty: list[Any] | None = None
        for parts in self._agreed():
            if parts is None and empty is None:
                raise errors.InvalidData(
                    "this process has no batch in the first step, but other processes have one; give each process at "
                    "least one batch: fewer processes, more files, or AutoShardPolicy.DATA"
                )
            if empty is None:
                empty = [mapped(lambda array: array[:0], part) for part in parts or ()]
            placed = zip(self._devices, empty if parts is None else parts, strict=True)
            yield regrouped([mapped(device.put, part) for device, part in placed])

    def _agreed(self) -> Iterator[list[Any] | None]:
        """Yields the parts of each step, or None if only other processes have any."""
        batches = self._batches()
        if self._agree is None:
            yield from batches
            return
        while True:
            parts = next(batches, None)
            if not self._agree(parts is not None):
                return
            yield parts


@dataclass(frozen=True)
class Replicas:
    """The replicas that a data set is divided between.

    Attributes:
        context: the processes, and the number of all replicas.
        devices: the devices of this process's replicas.
        first: number of its first replica.
        agree: see `DistributedDataset`; it is called only if there are several processes.
    """

    context: InputContext
    devices: Sequence[Place]
    first: int = 0
    agree: Agree | None = None

    def dataset(self, batches: Callable[[], Iterator[list[Any]]], steps: Sized) -> DistributedDataset:
        """Returns the data set of the parts of this process's replicas.

        Args:
            batches: returns an iterator over the parts, one list for each step.
            steps: has the number of steps, if this process alone decides it.
        """
        agree = self.agree if self.context.num_input_pipelines > 1 else None
        return DistributedDataset(batches, self.devices, steps if agree is None else None, agree)


def distribute(dataset: DataPipeline | Iterable[Any], replicas: Replicas) -> DistributedDataset:
    """Divides a data set of global batches between processes and replicas.

    Args:
        dataset: a pipeline with batches for all replicas of all processes together, or an iterable of such batches. Its
            options have the shard policy (`shoal.data.AutoShardPolicy`).
        replicas: the replicas.

    Raises:
        BadRequest: `dataset` is a data set without batches.
        InvalidData: the batches are smaller than the number of replicas, or the shard policy does not fit the source.
    """
    context, count = replicas.context, len(replicas.devices)
    own = shard(
        _pipeline(dataset),
        context.num_input_pipelines,
        context.input_pipeline_id,
        count,
        first=replicas.first,
        in_sync=context.num_replicas_in_sync,
    )
    return replicas.dataset(lambda: (split_batch(batch, count) for batch in own), own)


def distribute_from_function(make: DatasetFn, replicas: Replicas) -> DistributedDataset:
    """Distributes the data set that a function makes for this process. Each of its batches is for one replica.

    Args:
        make: takes the context, and returns the data set of this process, with batches for one replica each. Nothing
            divides it further.
        replicas: the replicas.

    Raises:
        BadRequest: `make` returned a data set without batches.
    """
    own, count = _pipeline(make(replicas.context)), len(replicas.devices)

    def steps() -> Iterator[list[Any]]:
        rest = iter(own)
        while parts := list(itertools.islice(rest, count)):
            yield parts + [mapped(lambda array: array[:0], parts[0]) for _ in range(count - len(parts))]

    return replicas.dataset(steps, own.batch(count))  # as many elements as there are steps


def _pipeline(dataset: Any) -> DataPipeline:
    if isinstance(dataset, DataPipeline):
        return dataset
    if isinstance(dataset, DistributedDataset):
        raise errors.BadRequest("the data set is distributed already; give the pipeline that it was made of")
    if isinstance(dataset, Dataset):
        raise errors.BadRequest(
            f"a {type(dataset).__name__} has no batches; give shoal.data.pipeline(dataset).batch(GLOBAL_BATCH_SIZE)"
        )
    if isinstance(dataset, Iterator) or not isinstance(dataset, Iterable):
        raise errors.BadRequest(
            f"a {type(dataset).__name__} cannot be iterated once for each epoch; give a shoal.data.DataPipeline, such "
            "as shoal.data.from_arrays(x, y).batch(GLOBAL_BATCH_SIZE)"
        )
    return from_generator(lambda: dataset)


__all__ = [
    "Agree",
    "DatasetFn",
    "DistributedDataset",
    "DistributedIterator",
    "Place",
    "Replicas",
    "distribute",
    "distribute_from_function",
]
