"""Input of the strategies: the shares of processes and replicas in a data set.

`shoal.data` has the pipelines, and divides batches between processes. This package gives the replicas of one process
their parts.
"""

from shoal_distribute.input.context import InputContext
from shoal_distribute.input.distributed import DatasetFn, DistributedDataset, distribute, distribute_from_function

__all__ = ["DatasetFn", "DistributedDataset", "InputContext", "distribute", "distribute_from_function"]
