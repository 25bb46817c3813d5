"""Reading batches of a data set, in the way that suits it. Which ones, and in which thread, its users know."""

from collections.abc import Generator, Iterable
from typing import Any

import numpy as np

from shoal._numerics import seeded
from shoal.program import Blocks, Dataset, RandomDataset


def read(
    dataset: Dataset | RandomDataset, plan: Iterable[np.ndarray], seed: int | None = None
) -> Generator[Any, None, None]:
    """The batch of each item of a plan: by `batches` if the data set has blocks, else by `batch`.

    Args:
        dataset: to be read.
        plan: numbers of samples, a batch an item.
        seed: for a data set that takes one; None: it is read as it is.
    """
    if isinstance(getattr(dataset, "blocks", None), Blocks):
        yield from seeded(dataset.batches, seed)(plan)  # type: ignore[union-attr] # it has blocks
    else:
        batch = seeded(dataset.batch, seed)
        for numbers in plan:
            yield batch(numbers)


__all__ = ["read"]
