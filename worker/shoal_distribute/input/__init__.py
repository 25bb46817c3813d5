"""Input of the strategies: the shares of processes and replicas in a data set.

`shoal.data` has the pipelines, and divides batches between processes. This package gives the replicas of one process
their parts: `surface` has the methods of strategies for it.
"""

from shoal_distribute.input.context import InputContext, ValueContext
from shoal_distribute.input.distributed import (
    DistributedDataset,
    DistributedIterator,
    Replicas,
    distribute,
    distribute_from_function,
)
from shoal_distribute.input.surface import InputSurface

__all__ = [
    "DistributedDataset",
    "DistributedIterator",
    "InputContext",
    "InputSurface",
    "Replicas",
    "ValueContext",
    "distribute",
    "distribute_from_function",
]
