"""The order of a data set's samples, and their prefetching in batches, for workers and evaluations."""

from shoal.data._reading.order import SampleOrder, ShuffledBlocks, ShuffledSamples, cut

__all__ = [
    "SampleOrder",
    "ShuffledBlocks",
    "ShuffledSamples",
    "cut",
]
