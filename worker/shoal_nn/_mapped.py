"""A data set whose batches go through a function as they are read. What is drawn for images is in `shoal.data`."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from typing import Any

import numpy as np

from shoal._seeds import seeded
from shoal.program import DEFAULT_PREFETCH, Blocks, Dataset, RandomDataset


class Mapped:
    """Another data set, each of whose batches goes through a function, on the host and ahead of its step.

    Args:
        dataset: read in blocks if it is; given its epoch's seed if it takes one.
        function: of a batch; what it raises, reading the batch raises.

    Attributes:
        dataset: as given.
        prefetch: of the data set.
        blocks: of the data set, if it has any.
    """

    blocks: Blocks

    def __init__(self, dataset: Dataset | RandomDataset, function: Callable[[Any], Any]) -> None:
        self.dataset, self._function = dataset, function
        self.prefetch = getattr(dataset, "prefetch", DEFAULT_PREFETCH)
        if isinstance(blocks := getattr(dataset, "blocks", None), Blocks):
            self.blocks = blocks

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: np.ndarray, *, seed: int | None = None) -> Any:
        """The function of the batch of these examples."""
        return self._function(seeded(self.dataset.batch, seed)(indices))

    def batches(self, plan: Iterable[np.ndarray], *, seed: int | None = None) -> Iterator[Any]:
        """What `batch` gives, for each item of the plan. Of data sets in blocks alone."""
        with closing(self._read(plan, seed)) as reading:
            for batch in reading:
                yield self._function(batch)

    def _read(self, plan: Iterable[np.ndarray], seed: int | None) -> Generator[Any]:
        yield from seeded(self.dataset.batches, seed)(plan)  # type: ignore[union-attr] # it has blocks


__all__ = ["Mapped"]
