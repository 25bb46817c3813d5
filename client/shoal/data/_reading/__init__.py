"""The order of a data set's samples, and their prefetching in batches, for workers and evaluations."""

from shoal.data._reading.order import PermutedSamples, SampleOrder, ShuffledBlocks, ShuffledSamples, cut

__all__ = [
    "PermutedSamples",
    "SampleOrder",
    "ShuffledBlocks",
    "ShuffledSamples",
    "cut",
]
