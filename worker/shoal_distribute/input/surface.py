"""The methods of strategies that distribute data sets."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from shoal.data import DataPipeline
from shoal_distribute.input.context import InputContext, ValueContext
from shoal_distribute.input.distributed import (
    DatasetFn,
    DistributedDataset,
    Place,
    Replicas,
    distribute,
    distribute_from_function,
)
from shoal_distribute.values import regrouped


class InputSurface(ABC):
    """Base class of strategies: how they divide data sets between replicas and processes.

    Attributes:
        devices: the devices of this process's replicas.
        first_replica: number of this process's first replica among those of all processes.
    """

    devices: Sequence[Place]
    first_replica = 0

    @property
    @abstractmethod
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that take each step together."""

    @property
    def input_pipelines(self) -> int:
        """The number of processes that read data."""
        return 1

    @property
    def input_pipeline_id(self) -> int:
        """The number of this process among those that read data."""
        return 0

    @property
    def reads_in_order(self) -> bool:
        """Whether other processes read the same samples, so that all need them in the same order."""
        return self.input_pipelines > 1

    @property
    def writes_files(self) -> bool:
        """Whether this process writes the files of all processes, such as checkpoints: one of them does."""
        return self.input_pipeline_id == 0

    def experimental_distribute_dataset(
        self,
        dataset: DataPipeline | Iterable[Any],
        options: Any = None,  # noqa: ARG002 - as in TensorFlow
    ) -> DistributedDataset:
        """Divides each batch of a data set between the replicas of all processes; see `DistributedDataset`.

        Args:
            dataset: a pipeline, or an iterable, of batches for all replicas together.
            options: ignored.

        Returns:
            The data set of this process.

        Raises:
            BadRequest: the data set has no batches.
            InvalidData: the batches are smaller than the number of replicas, or the shard policy does not fit.
        """
        return distribute(dataset, self._replicas_of_input())

    def distribute_datasets_from_function(
        self,
        dataset_fn: DatasetFn,
        options: Any = None,  # noqa: ARG002 - as in TensorFlow
    ) -> DistributedDataset:
        """Gives each replica whole batches of the data set that a function makes for this process.

        Args:
            dataset_fn: takes an `InputContext`, and returns a pipeline of batches for one replica each.
            options: ignored.

        Returns:
            The data set of this process.

        Raises:
            BadRequest: the function returned a data set without batches.
        """
        return distribute_from_function(dataset_fn, self._replicas_of_input())

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Makes a value for each replica of this process, as an argument of `run`.

        Args:
            value_fn: takes a `ValueContext`, and returns the value of this replica.

        Returns:
            A `PerReplica` of the values; with one replica, the value.
        """
        count = self.num_replicas_in_sync
        numbers = range(self.first_replica, self.first_replica + len(self.devices))
        return regrouped([value_fn(ValueContext(number, count)) for number in numbers])

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    @abstractmethod
    def _across(self, array: np.ndarray) -> np.ndarray:
        """Returns the sum of an array over all processes."""

    def _replicas_of_input(self) -> Replicas:
        context = InputContext(self.input_pipelines, self.input_pipeline_id, self.num_replicas_in_sync)
        return Replicas(context, self.devices, self.first_replica, self._any_process)

    def _any_process(self, has: bool) -> bool:
        """Returns whether any process has a batch left."""
        return bool(self._across(np.array(int(has))))


__all__ = ["InputSurface"]
