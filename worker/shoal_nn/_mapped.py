"""A data set whose batches go through a function as they are read. What is drawn for images is in `shoal.data`."""

from collections.abc import Callable
from typing import Any

import numpy as np

from shoal.data._dataset_wrapper import DatasetWrapper
from shoal.program import Dataset, RandomDataset


class Mapped(DatasetWrapper):
    """Another data set, each of whose batches goes through a function, on the host and ahead of its step.

    Args:
        dataset: read in blocks if it is; given its epoch's seed if it takes one.
        function: of a batch; what it raises, reading the batch raises.
    """

    def __init__(self, dataset: Dataset | RandomDataset, function: Callable[[Any], Any]) -> None:
        super().__init__(dataset)
        self._function = function

    def _transform(self, batch: Any, numbers: np.ndarray, seed: int | None) -> Any:  # noqa: ARG002 - all alike
        return self._function(batch)


__all__ = ["Mapped"]
