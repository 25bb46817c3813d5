"""The reader of a data set's batches, which uses blocks if the data set has them."""

from collections.abc import Generator, Iterable
from typing import Any

import numpy as np

from shoal._numerics import seeded
from shoal.program import Blocks, Dataset, RandomDataset


def read(
    dataset: Dataset | RandomDataset, plan: Iterable[np.ndarray], seed: int | None = None
) -> Generator[Any, None, None]:
    """Yields the batch of each item of a plan: with `batches` if the data set has blocks, otherwise with `batch`.

    Args:
        dataset: the data set.
        plan: numbers of the samples of each batch, int64 [n].
        seed: seed for a data set that takes one. None means no seed.
    """
    if isinstance(getattr(dataset, "blocks", None), Blocks):
        yield from seeded(dataset.batches, seed)(plan)  # type: ignore[union-attr] # it has blocks
    else:
        batch = seeded(dataset.batch, seed)
        for numbers in plan:
            yield batch(numbers)


__all__ = ["read"]
