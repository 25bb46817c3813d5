"""Strategies under the names that they have or had in `tf.distribute.experimental`."""

from shoal_distribute.strategies import CentralStorageStrategy, MultiWorkerMirroredStrategy, ParameterServerStrategy

__all__ = ["CentralStorageStrategy", "MultiWorkerMirroredStrategy", "ParameterServerStrategy"]
