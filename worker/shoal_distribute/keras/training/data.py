"""Batches of `fit`, `evaluate` and `predict`, and their division between replicas."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from shoal import errors
from shoal_distribute.input import DistributedDataset
from shoal_distribute.keras.tensor import array_of
from shoal_distribute.strategies import Strategy
from shoal_distribute.values import PerReplica
from shoal_worker.arrays import on_host

# A batch: inputs, labels or None, and weights of the samples or None.
BatchTuple = tuple[Any, Any, Any]


class ArrayBatches:
    """Batches of arrays.

    Args:
        x: inputs: an array, or a list or dict of them.
        y: labels; None for none.
        sample_weight: weights of the samples; None for none.
        batch_size: samples of a batch, over all replicas.
        shuffle: whether each epoch has an order of its own.
        seed: seed of the orders.

    Raises:
        InvalidData: the arrays have different lengths, or none.
    """

    def __init__(
        self, x: Any, y: Any, sample_weight: Any, batch_size: int, *, shuffle: bool = False, seed: int = 0
    ) -> None:
        self._parts = [_on_host(part) for part in (x, y, sample_weight)]
        arrays = [it for part in self._parts for it in _leaves(part)]
        lengths = {len(it) for it in arrays if it is not None}
        if len(lengths) != 1 or not min(lengths):
            counts = ", ".join(map(str, sorted(lengths)))
            raise errors.InvalidData(f"the arrays have {counts} samples; give x, y and sample_weight the same number")
        self.samples, self._size = lengths.pop(), batch_size
        self._shuffle, self._seed, self._epoch = shuffle, seed, 0

    @property
    def first_sample(self) -> Any:
        """The inputs of the first sample, as a batch."""
        return _picked(self._parts[0], slice(1))

    @property
    def smallest(self) -> int:
        """The number of samples of the last batch."""
        return self.samples % self._size or self._size

    def __len__(self) -> int:
        return (self.samples + self._size - 1) // self._size

    def __iter__(self) -> Iterator[BatchTuple]:
        self._epoch += 1
        return self.of_epoch(self._epoch - 1)

    def of_epoch(self, epoch: int, first: int = 0) -> Iterator[BatchTuple]:
        """Yields the batches of an epoch, from the batch of number `first` on. Each epoch has its own order."""
        order = np.arange(self.samples)
        if self._shuffle:
            np.random.default_rng([self._seed, epoch]).shuffle(order)
        for start in range(first * self._size, self.samples, self._size):
            chosen = order[start : start + self._size]
            x, y, weights = (_picked(part, chosen) for part in self._parts)
            yield x, y, weights


class BatchesOf:
    """Batches of a data set that a user gives: any iterable of inputs, or of tuples with labels and weights.

    Args:
        dataset: the data set.
        steps: number of batches; None means all.
        changed: what each batch becomes; None means that it stays.

    Attributes:
        divided: whether the batches are divided between the replicas already.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        steps: int | None = None,
        changed: Callable[[BatchTuple], BatchTuple] | None = None,
    ) -> None:
        self._dataset, self._steps, self._changed = dataset, steps, changed
        self.divided = isinstance(dataset, DistributedDataset)
        self._running: Iterator[Any] | None = None

    def __len__(self) -> int:
        return self._steps if self._steps is not None else len(self._dataset)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[BatchTuple]:
        if self._steps is None:
            yield from map(self._batch_of, self._dataset)
            return
        # An epoch of a given number of steps continues where the last one ended.
        self._running = self._running or iter(self._dataset)
        for _ in range(self._steps):
            batch = next(self._running, None)
            if batch is None:
                self._running = iter(self._dataset)
                batch = next(self._running, None)
            if batch is None:
                raise errors.InvalidData("the data set has no batch; give one with samples")
            yield self._batch_of(batch)

    def _batch_of(self, given: Any) -> BatchTuple:
        batch = unpacked(given)
        return batch if self._changed is None else self._changed(batch)


def unpacked(batch: Any) -> BatchTuple:
    """Returns inputs, labels and weights of a batch, which is a tuple or a list of up to three values or inputs alone.

    Raises:
        InvalidData: it has another number of values.
    """
    if not isinstance(batch, tuple | list):
        return batch, None, None
    if not 1 <= len(batch) <= 3:
        raise errors.InvalidData(
            f"a batch has {len(batch)} values; give inputs, labels and weights, and several inputs as ([a, b], y)"
        )
    x, y, weights = (*batch, None, None)[:3]
    return x, y, weights


def divided(batch: BatchTuple, strategy: Strategy, *, between_processes: bool = True) -> Any:
    """Returns a batch with the parts of this process's replicas in a `PerReplica`.

    The samples keep their order: the first replica gets the first ones. A part may be empty.

    Args:
        batch: the batch. If it is divided already, it is returned as it is. Lists of numbers become arrays.
        strategy: the strategy.
        between_processes: whether processes that train in step have the same batch, and each takes its replicas' parts.
            Otherwise the batch is for this process alone.

    Raises:
        InvalidData: a list is neither one of arrays nor one of numbers.
    """
    if any(isinstance(part, PerReplica) for part in batch):
        return batch
    batch = tuple(map(arrays_of, batch))
    local = strategy.local_replicas
    count = local * (strategy.input_pipelines if between_processes else 1)
    if count == 1:
        return batch
    first, size, parts = strategy.input_pipeline_id * local if between_processes else 0, samples_of(batch), []
    for replica in range(first, first + local):
        chosen = slice(size * replica // count, size * (replica + 1) // count)
        parts.append([_picked(part, chosen) for part in batch])
    return tuple(parts[0]) if local == 1 else tuple(map(PerReplica, zip(*parts, strict=True)))


def arrays_of(part: Any) -> Any:
    """Returns a part of a batch: a list or dict if it has several arrays, and one array for a list of numbers.

    Raises:
        InvalidData: a list has neither, or its rows differ in length.
    """
    if isinstance(part, dict):
        return {name: arrays_of(it) for name, it in part.items()}
    if not isinstance(part, list | tuple):
        return part
    if part and all(hasattr(it, "dtype") and np.ndim(it) for it in part):
        return list(part)
    try:
        found = np.asarray(part)
    except ValueError:
        found = np.asarray(None)
    if found.dtype.kind not in "biuf":
        raise errors.InvalidData(
            "a batch has a list that is neither one of arrays nor one of numbers, with rows of one length; give arrays"
        )
    return found


def samples_of(batch: Any) -> int:
    """Returns the number of samples of a batch, or of one replica's part."""
    return len(_leaves(batch[0])[0])


def check_batch_size(batch_size: int, strategy: Strategy) -> None:
    """Raises InvalidData if a batch has fewer samples than there are replicas that divide it."""
    replicas = strategy.local_replicas * strategy.input_pipelines
    if batch_size < replicas:
        raise errors.InvalidData(
            f"batch_size is {batch_size}, but {replicas} replicas divide each batch; give at least one sample for each"
        )


def split_off(arrays: Sequence[Any], share: float) -> tuple[list[Any], list[Any]]:
    """Returns arrays without their last samples, and these samples, as `validation_split` asks.

    Args:
        arrays: inputs, labels and weights, or None.
        share: share of the samples to split off, in (0, 1).

    Raises:
        InvalidData: one of the two parts would be empty.
    """
    hosted = [_on_host(part) for part in arrays]
    count = samples_of((hosted[0],))
    kept = count - int(count * share)
    if not 0 < kept < count:
        raise errors.InvalidData(f"validation_split is {share} of {count} samples; both parts need samples")
    return [_picked(it, slice(kept)) for it in hosted], [_picked(it, slice(kept, None)) for it in hosted]


def _leaves(part: Any) -> list[Any]:
    """Returns the arrays of a part of a batch."""
    return list(part.values()) if isinstance(part, dict) else part if isinstance(part, list) else [part]


def _on_host(part: Any) -> Any:
    if part is None:
        return None
    if isinstance(part, dict):
        return {name: _on_host(it) for name, it in part.items()}
    given = arrays_of(part)
    return [on_host(array_of(it)) for it in given] if isinstance(given, list) else on_host(array_of(given))


def _picked(part: Any, chosen: Any) -> Any:
    if part is None:
        return None
    if isinstance(part, dict):
        return {name: it[chosen] for name, it in part.items()}
    return [it[chosen] for it in part] if isinstance(part, list) else part[chosen]


__all__ = [
    "ArrayBatches",
    "BatchTuple",
    "BatchesOf",
    "arrays_of",
    "check_batch_size",
    "divided",
    "samples_of",
    "split_off",
    "unpacked",
]
