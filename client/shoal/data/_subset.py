"""Some samples of a data set as a data set of their own: to train on most of it, and to judge by the rest."""

import threading
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import ArrayLike

from shoal import errors
from shoal._numerics import seeded
from shoal.program import DEFAULT_PREFETCH, Blocks, Dataset, RandomDataset

_locks_lock = threading.Lock()  # guards _locks
# Of each data set that has subsets, by its id, which is its own as long as one of them has it.
_locks: "WeakValueDictionary[int, threading.RLock]" = WeakValueDictionary()


class Subset:
    """Some samples of another data set, numbered anew from 0.

        first = Subset(dataset, slice(1000))

    All subsets of one data set, be it also within others that have it as their `dataset`, read it one after the other:
    it is called from one thread at a time, though some are trained on while others are evaluated.

    Args:
        dataset: that is not read in blocks.
        samples: their numbers in it, in the order in which they are to be numbered; or a slice.

    Attributes:
        dataset: as given.
        prefetch: of the data set.

    Raises:
        InvalidData: the data set is read in blocks; or these are no numbers of its samples, or none at all.
    """

    def __init__(self, dataset: Dataset | RandomDataset, samples: slice | ArrayLike) -> None:
        size = _size_of(dataset, "Subset")
        numbers = np.arange(size)[samples] if isinstance(samples, slice) else np.array(samples)
        if numbers.ndim != 1 or not len(numbers) or numbers.dtype.kind not in "iu":
            raise errors.InvalidData(
                f"Subset: samples are {numbers.dtype} of shape {numbers.shape}; give a slice or a list of whole "
                "numbers, with one of them at least"
            )
        if numbers.min() < 0 or numbers.max() >= size:
            raise errors.InvalidData(
                f"Subset: samples are {numbers.min()} to {numbers.max()}, and {type(dataset).__name__} has those from "
                f"0 to {size - 1}"
            )
        self.dataset = dataset
        self.prefetch = getattr(dataset, "prefetch", DEFAULT_PREFETCH)
        self._numbers = numbers.astype(np.int64, copy=False)
        # Guards the reading of the data set, which nothing else can: it may be a file with one position. Taken again by
        # subsets of subsets.
        self._lock = _lock_of(dataset)

    def __len__(self) -> int:
        return len(self._numbers)

    def batch(self, indices: np.ndarray, *, seed: int | None = None) -> Any:
        """What the data set gives for these samples; with the seed, if it takes one."""
        with self._lock:
            return seeded(self.dataset.batch, seed)(self._numbers[indices])


def split(dataset: Dataset | RandomDataset, share: float, seed: int = 0) -> tuple[Subset, Subset]:
    """Two data sets of one, with no sample in common: to train on, and to hold out.

    Args:
        dataset: that is not read in blocks.
        share: of the samples that are held out, more than 0 and less than 1; rounded to whole samples.
        seed: decides which; with the same one they are the same on every worker.

    Raises:
        InvalidData: the data set is read in blocks, or one of the two would have no sample.
    """
    size = _size_of(dataset, "split")
    held_out = round(size * share) if 0 < share < 1 else 0
    if not 0 < held_out < size:
        raise errors.InvalidData(
            f"split: a share of {share!r} of {size} samples leaves one side with none; give one between 0 and 1 that "
            "is a sample at least, and not all of them"
        )
    shuffled = np.random.default_rng(seed).permutation(size)
    # Rising, since neighbours are read faster where they lie in a file.
    return Subset(dataset, np.sort(shuffled[held_out:])), Subset(dataset, np.sort(shuffled[:held_out]))


def _lock_of(dataset: Any) -> threading.RLock:
    while isinstance(inner := getattr(dataset, "dataset", None), Dataset):
        dataset = inner
    with _locks_lock:
        return _locks.setdefault(id(dataset), threading.RLock())


def _size_of(dataset: Dataset | RandomDataset, who: str) -> int:
    if isinstance(getattr(dataset, "blocks", None), Blocks):
        raise errors.InvalidData(
            f"{who}: {type(dataset).__name__} is read in blocks, which some of its samples are not; "
            "put what is held out into files of its own, and make a data set of each"
        )
    return len(dataset)


__all__ = ["Subset", "split"]
