"""The order of a data set's samples, and reading them ahead in batches.

Workers and evaluations import it; data sets themselves are in `shoal.data`.
"""

from shoal.data._reading.order import SampleOrder, ShuffledBlocks, ShuffledSamples, cut

__all__ = [
    "SampleOrder",
    "ShuffledBlocks",
    "ShuffledSamples",
    "cut",
]
