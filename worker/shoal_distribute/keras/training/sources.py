"""Sources of batches: what `fit`, `evaluate` and `predict` make of arrays and data sets."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from shoal import errors
from shoal_distribute.input import DistributedDataset
from shoal_distribute.keras import config
from shoal_distribute.keras.training.class_weights import weighted_by_class
from shoal_distribute.keras.training.data import (
    ArrayBatches,
    BatchesOf,
    BatchTuple,
    check_batch_size,
    divided,
    unpacked,
)
from shoal_distribute.strategies import Strategy

_DEFAULT_BATCH = 32


class BatchSource:
    """Batches for the replicas of this process.

    Args:
        batches: batches for all replicas.
        strategy: the strategy whose replicas divide them.
        divides: whether processes divide a batch between them. Otherwise each has all samples of its batches.
        renewed: returns the batches for the processes that there are by now; None if they do not depend on that.
    """

    def __init__(
        self,
        batches: Iterable[BatchTuple],
        strategy: Strategy,
        *,
        divides: bool = True,
        renewed: Callable[[], Iterable[BatchTuple]] | None = None,
    ) -> None:
        self._batches, self._strategy, self._divides, self._renewed = batches, strategy, divides, renewed

    def __iter__(self) -> Any:
        if isinstance(self._batches, BatchesOf) and self._batches.divided:
            return iter(self._batches)
        return (divided(batch, self._strategy, between_processes=self._divides) for batch in self._batches)

    @property
    def can_resume(self) -> bool:
        """Whether an epoch can go on from a step, with other processes than before."""
        return isinstance(self._batches, ArrayBatches) or self._renewed is not None

    def renew(self) -> None:
        """Divides the batches again, for the processes that there are by now."""
        if self._renewed:
            self._batches = self._renewed()

    def of_epoch(self, epoch: int, step: int) -> Any:
        """Returns an iterator over the batches of an epoch, from a step on.

        Args:
            epoch: its number, from 0.
            step: number of the first step, from 0.
        """
        if isinstance(self._batches, ArrayBatches):
            found = self._batches.of_epoch(epoch, step)
            return (divided(batch, self._strategy, between_processes=self._divides) for batch in found)
        return itertools.islice(self, step, None) if step else iter(self)

    @property
    def first_sample(self) -> Any:
        """The inputs of one sample, as a batch; None if the batches are a data set."""
        return self._batches.first_sample if isinstance(self._batches, ArrayBatches) else None

    @property
    def smallest(self) -> int | None:
        """The number of samples of the smallest batch; None if the batches are a data set."""
        return self._batches.smallest if isinstance(self._batches, ArrayBatches) else None

    @property
    def steps(self) -> int | None:
        """The number of batches; None if it is not known."""
        try:
            return len(self._batches)  # type: ignore[arg-type]
        except TypeError:
            return None


def source_of(
    strategy: Strategy,
    x: Any,
    y: Any,
    sample_weight: Any,
    batch_size: int | None,
    *,
    shuffle: bool = False,
    steps: int | None = None,
    divides: bool = True,
    class_weight: Mapping[int, float] | None = None,
) -> BatchSource:
    """Returns the batches of arrays or of a data set.

    Args:
        strategy: the strategy whose replicas divide them.
        x: inputs: an array, a list or dict of arrays, or a data set, which the strategy distributes.
        y: labels; None for none.
        sample_weight: weights of the samples; None for none.
        batch_size: samples of a batch over all replicas; None means 32.
        shuffle: whether arrays have another order in each epoch.
        steps: number of batches; None means all.
        divides: see `BatchSource`.
        class_weight: see `weighted_by_class`.

    Raises:
        BadRequest: there are no inputs, a number is less than 1, or a data set comes with arguments that only arrays
            have.
        InvalidData: see `ArrayBatches` and `check_batch_size`.
    """
    if x is None:
        raise errors.BadRequest("there are no inputs; give x: an array, or a data set of batches")
    for what, count in {"batch_size": batch_size, "the number of steps": steps}.items():
        if count is not None and count < 1:
            raise errors.BadRequest(f"{what} is {count}; give 1 or more, or None")
    weighted = partial(weighted_by_class, class_weight=class_weight)
    if is_arrays(x):
        size = batch_size or _DEFAULT_BATCH
        if divides:
            check_batch_size(size, strategy)
        seed = config.shuffle_seed(together=strategy.may_grow or strategy.reads_in_order) if shuffle else 0
        arrays = ArrayBatches(*weighted((x, y, sample_weight)), size, shuffle=shuffle, seed=seed)
        return BatchSource(arrays if steps is None else BatchesOf(arrays, steps), strategy, divides=divides)
    given = {"y": y, "sample_weight": sample_weight, "batch_size": batch_size}
    if extra := [name for name, value in given.items() if value is not None]:
        raise errors.BadRequest(
            f"{', '.join(extra)} cannot be given with a data set; it has batches of inputs, labels and weights itself. "
            f"x is a {type(x).__name__}: make an array of it if it is not a data set, such as np.asarray(x)"
        )
    if not isinstance(x, Iterable):
        kind = type(x).__name__
        raise errors.BadRequest(f"x is a {kind}; give an array, a list of arrays, or an iterable of batches")
    if isinstance(x, DistributedDataset) or not divides:
        return BatchSource(BatchesOf(x, steps, weighted), strategy, divides=divides)

    def distributed() -> BatchesOf:
        return BatchesOf(strategy.experimental_distribute_dataset(x), steps, weighted)

    # With a number of steps, an epoch begins in the middle of the data: only the process itself knows where.
    return BatchSource(distributed(), strategy, renewed=distributed if steps is None else None)


def validation_of(strategy: Strategy, data: Any, batch_size: int | None, steps: int | None) -> BatchSource:
    """Returns the batches of validation data.

    Args:
        strategy: the strategy whose replicas divide them.
        data: (x, y), (x, y, sample_weight), as a tuple or a list; or a data set.
        batch_size: samples of a batch of arrays.
        steps: number of batches; None means all.
    """
    if isinstance(data, tuple) or (isinstance(data, list) and is_arrays(data)):
        x, y, weights = unpacked(data)
        return source_of(strategy, x, y, weights, batch_size, steps=steps)
    return source_of(strategy, data, None, None, None, steps=steps)


def is_arrays(x: Any) -> bool:
    """Returns whether inputs are an array, or a list or dict of arrays."""
    if isinstance(x, dict):
        x = list(x.values())
    parts = x if isinstance(x, list | tuple) else [x]
    return bool(parts) and all(hasattr(part, "dtype") for part in parts)


__all__ = ["BatchSource", "is_arrays", "source_of", "validation_of"]
