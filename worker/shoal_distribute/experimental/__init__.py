"""Strategies and communication options by the names that they have or had in `tf.distribute.experimental`.

`CollectiveCommunication` and `CollectiveHints` are the earlier names of `CommunicationImplementation` and
`CommunicationOptions`.
"""

from shoal_distribute.collectives import CommunicationImplementation, CommunicationOptions
from shoal_distribute.collectives import CommunicationImplementation as CollectiveCommunication
from shoal_distribute.collectives import CommunicationOptions as CollectiveHints
from shoal_distribute.experimental import coordinator, partitioners
from shoal_distribute.input import ValueContext
from shoal_distribute.strategies import CentralStorageStrategy, MultiWorkerMirroredStrategy, ParameterServerStrategy

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "ValueContext",
    "coordinator",
    "partitioners",
]
