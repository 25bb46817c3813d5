"""Strategies and communication options by the names that they have or had in `tf.distribute.experimental`."""

from shoal_distribute.collectives import CommunicationImplementation, CommunicationOptions
from shoal_distribute.strategies import CentralStorageStrategy, MultiWorkerMirroredStrategy, ParameterServerStrategy

__all__ = [
    "CentralStorageStrategy",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
]
