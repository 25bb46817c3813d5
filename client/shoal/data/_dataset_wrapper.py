"""The base class of data sets that transform the batches of another data set."""

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
    """A data set that transforms another one, and has the same prefetch, blocks and need of a seed.

    Args:
        dataset: the other data set.

    Attributes:
        dataset: the other data set.
        prefetch: number of batches to read ahead, the same as for the data set.
        blocks: blocks of the data set, if it has blocks.
    """

    blocks: Blocks

    def __init__(self, dataset: Dataset | RandomDataset) -> None:
        self.dataset = dataset
        self.prefetch = getattr(dataset, "prefetch", DEFAULT_PREFETCH)
        if isinstance(blocks := getattr(dataset, "blocks", None), Blocks):
            self.blocks = blocks

    @abstractmethod
    def _transform(self, batch: Any, numbers: np.ndarray, seed: int | None) -> Any:
        """Returns the transformed batch.

        Args:
            batch: what the other data set returned.
            numbers: numbers of its samples, int64 [n].
            seed: seed with which it was read, if any.
        """

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: np.ndarray, *, seed: int | None = None) -> Any:
        """Returns the transformed batch of the samples with these numbers."""
        return self._transform(seeded(self.dataset.batch, seed)(indices), indices, seed)

    def batches(self, plan: Iterable[np.ndarray], *, seed: int | None = None) -> Iterator[Any]:
        """Yields what `batch` returns for each item of the plan."""
        asked: deque[np.ndarray] = deque()  # numbers of batches that are requested and not read yet

        def noted() -> Iterator[np.ndarray]:
            for numbers in plan:
                asked.append(numbers)
                yield numbers

        with closing(read(self.dataset, noted(), seed)) as reading:
            for batch in reading:
                yield self._transform(batch, asked.popleft(), seed)


__all__ = ["DatasetWrapper"]
