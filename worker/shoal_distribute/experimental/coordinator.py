"""The names of `shoal_distribute.coordinator`, as TensorFlow has them in `tf.distribute.experimental.coordinator`."""

from shoal_distribute.coordinator import ClusterCoordinator, PerWorkerValues, RemoteValue

__all__ = ["ClusterCoordinator", "PerWorkerValues", "RemoteValue"]
