"""Functions that any worker runs, under the names of `tf.distribute.coordinator`."""

from shoal_distribute.coordinator.cluster_coordinator import ClusterCoordinator
from shoal_distribute.coordinator.per_worker import PerWorkerDataset, PerWorkerIterator, PerWorkerValues
from shoal_distribute.coordinator.remote_values import RemoteValue

__all__ = ["ClusterCoordinator", "PerWorkerDataset", "PerWorkerIterator", "PerWorkerValues", "RemoteValue"]
