"""Data set whose batches pass through a function when they are read. `shoal.data` has random augmentation."""

from collections.abc import Callable
from typing import Any

import numpy as np

from shoal.data._dataset_wrapper import DatasetWrapper
from shoal.program import Dataset, RandomDataset


class Mapped(DatasetWrapper):
    """Data set that applies a function to each batch of another one, on the host and ahead of the step.

    Args:
        dataset: the other data set. Its blocks and its seeds are kept.
        function: takes and returns a batch. Its errors are raised where the batch is read.
    """

    def __init__(self, dataset: Dataset | RandomDataset, function: Callable[[Any], Any]) -> None:
        super().__init__(dataset)
        self._function = function

    def _transform(self, batch: Any, numbers: np.ndarray, seed: int | None) -> Any:  # noqa: ARG002 - all alike
        return self._function(batch)


__all__ = ["Mapped"]
