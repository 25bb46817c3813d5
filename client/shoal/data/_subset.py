"""Subsets of a data set, and the split of a data set into training samples and held-out samples."""

import threading
from collections.abc import Sized
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import ArrayLike

from shoal import errors
from shoal._numerics import seeded
from shoal._system import check_type
from shoal.program import DEFAULT_PREFETCH, Blocks, Dataset, RandomDataset

_locks_lock = threading.Lock()  # guards _locks
# The lock of each data set that has subsets, by the data set's id. The subsets keep both alive.
_locks: "WeakValueDictionary[int, threading.RLock]" = WeakValueDictionary()


class Subset:
    """Some samples of another data set, numbered from 0.

        first = Subset(dataset, slice(1000))

    All subsets of one data set share a lock. A wrapper that has the data set as its attribute `dataset` counts as the
    same data set. Only one thread at a time therefore reads the data set, even if one subset is used for training and
    another for evaluation.

    Args:
        dataset: a data set without blocks.
        samples: numbers of the samples in the data set, in their new order, or a slice.

    Attributes:
        dataset: the data set.
        prefetch: number of batches to read ahead, the same as for the data set.

    Raises:
        InvalidData: the data set has blocks, or `samples` is empty, invalid or out of range.
    """

    def __init__(self, dataset: Dataset | RandomDataset, samples: slice | ArrayLike) -> None:
        size = _size_of(dataset, "Subset")
        numbers = np.arange(size)[samples] if isinstance(samples, slice) else np.array(samples)
        if numbers.ndim != 1 or not len(numbers) or numbers.dtype.kind not in "iu":
            raise errors.InvalidData(
                f"Subset: samples are {numbers.dtype} of shape {numbers.shape}; give a slice or a list of whole "
                "numbers, at least one"
            )
        if numbers.min() < 0 or numbers.max() >= size:
            raise errors.InvalidData(
                f"Subset: samples are {numbers.min()} to {numbers.max()}, but {type(dataset).__name__} has those from "
                f"0 to {size - 1}"
            )
        self.dataset = dataset
        self.prefetch = getattr(dataset, "prefetch", DEFAULT_PREFETCH)
        self._numbers = numbers.astype(np.int64, copy=False)
        # Guards the reading of the data set, which may be a file with one position. Reentrant, for nested subsets.
        self._lock = _lock_of(dataset)

    def __len__(self) -> int:
        return len(self._numbers)

    def batch(self, indices: np.ndarray, *, seed: int | None = None) -> Any:
        """Returns the data set's batch of these samples.

        Args:
            indices: numbers of the samples in this subset, int64 [n].
            seed: seed of the epoch, for a data set that takes one.
        """
        with self._lock:
            return seeded(self.dataset.batch, seed)(self._numbers[indices])


def split(dataset: Dataset | RandomDataset, share: float, seed: int = 0) -> tuple[Subset, Subset]:
    """Splits a data set into training samples and held-out samples, at random.

    Args:
        dataset: a data set without blocks.
        share: share of the samples that are held out, above 0 and below 1, rounded to whole samples.
        seed: seed of the random choice. The same seed gives the same split on every worker.

    Returns:
        The training samples and the held-out samples, without a common sample.

    Raises:
        InvalidData: the data set has blocks, or one of the two parts would have no samples.
    """
    size = _size_of(dataset, "split")
    held_out = round(size * share) if 0 < share < 1 else 0
    if not 0 < held_out < size:
        raise errors.InvalidData(
            f"split: a share of {share!r} of {size} samples leaves one part empty; give a share between 0 and 1 that "
            "leaves at least one sample on each side"
        )
    shuffled = np.random.default_rng(seed).permutation(size)
    # Sorted, because neighbors in a file are read faster.
    return Subset(dataset, np.sort(shuffled[held_out:])), Subset(dataset, np.sort(shuffled[:held_out]))


def _lock_of(dataset: Any) -> threading.RLock:
    while isinstance(inner := getattr(dataset, "dataset", None), Dataset):
        dataset = inner
    with _locks_lock:
        return _locks.setdefault(id(dataset), threading.RLock())


def _size_of(dataset: Dataset | RandomDataset, owner: str) -> int:
    if isinstance(getattr(dataset, "blocks", None), Blocks):
        raise errors.InvalidData(
            f"{owner}: {type(dataset).__name__} is read in blocks, which cannot be split into samples; "
            "put the held-out samples into separate files, and create a data set of each"
        )
    check_type(f"the data set of {owner}", dataset, Sized, "a data set, such as shoal.data.Idx(IMAGES, LABELS)")
    return len(dataset)


__all__ = ["Subset", "split"]
