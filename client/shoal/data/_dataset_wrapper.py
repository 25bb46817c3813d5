"""Another data set, each of whose batches is changed as it is read. What is done to them is not known here."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any

import numpy as np

from shoal._numerics import seeded
from shoal.data._reading.batches import read
from shoal.program import DEFAULT_PREFETCH, Blocks, Dataset, RandomDataset


class DatasetWrapper(ABC):
    """What is read as the other data set is: ahead as far, in blocks if it is, with its epoch's seed if it takes one.

    Args:
        dataset: the other one.

    Attributes:
        dataset: as given.
        prefetch: of the data set.
        blocks: of the data set, if it has any.
    """

    blocks: Blocks

    def __init__(self, dataset: Dataset | RandomDataset) -> None:
        self.dataset = dataset
        self.prefetch = getattr(dataset, "prefetch", DEFAULT_PREFETCH)
        if isinstance(blocks := getattr(dataset, "blocks", None), Blocks):
            self.blocks = blocks

    @abstractmethod
    def _changed(self, batch: Any, numbers: np.ndarray, seed: int | None) -> Any:
        """What is made of a batch: of the samples with these numbers, read with this seed, or without."""

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: np.ndarray, *, seed: int | None = None) -> Any:
        """The samples with these numbers, changed."""
        return self._changed(seeded(self.dataset.batch, seed)(indices), indices, seed)

    def batches(self, plan: Iterable[np.ndarray], *, seed: int | None = None) -> Iterator[Any]:
        """What `batch` gives, for each item of the plan."""
        asked: deque[np.ndarray] = deque()  # for, and not yet given; by the thread that iterates the plan

        def noted() -> Iterator[np.ndarray]:
            for numbers in plan:
                asked.append(numbers)
                yield numbers

        with closing(read(self.dataset, noted(), seed)) as reading:
            for batch in reading:
                yield self._changed(batch, asked.popleft(), seed)


__all__ = ["DatasetWrapper"]
