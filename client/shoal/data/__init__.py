"""Data sets that a program can use as its `dataset`.

- `Arrays`: NumPy arrays, or .npy and .npz files that are mapped into memory.
- `Parquet` and `Csv`: local files, or files at a URL that fsspec supports. They need `shoal[data]`: pyarrow and fsspec.
- `Idx`, `Cifar10` and `ImageFolder`: images with labels. `ImageFolder` needs `shoal[images]`: Pillow.
- `Augmented`: another data set with transformed images; `shoal.data.augment` has the transforms.
- `Subset` and `split`: some samples of another data set.
- `Seekable`: a source that can be read from any position.
- `pipeline`, `from_arrays` and `from_generator`: a lazy `DataPipeline` with map, shuffle, batch and prefetch, for loops
  of your own and for strategies.

All data sets of this package are a `shoal.Dataset`; a `DataPipeline` is not. `Parquet`, `Csv` and `Seekable` are read
in blocks (`shoal.program.BlockDataset`): a worker reads only the blocks of its leased ranges, and reads them ahead. The
order of an epoch does not depend on the number of workers. See docs/how-to/data.md.
"""

from shoal.data import augment
from shoal.data._arrays import Arrays
from shoal.data._augmented import Augmented
from shoal.data._block_reader import BlockReader
from shoal.data._cifar import Cifar10
from shoal.data._csv import Csv
from shoal.data._idx import Idx
from shoal.data._image_folder import ImageFolder
from shoal.data._parquet import Parquet
from shoal.data._pipeline import (
    AUTOTUNE,
    AutoShardPolicy,
    DataPipeline,
    DistributeOptions,
    Options,
    from_arrays,
    from_generator,
    pipeline,
)
from shoal.data._seekable import Seekable
from shoal.data._subset import Subset, split
from shoal.program import Blocks

__all__ = [
    "AUTOTUNE",
    "Arrays",
    "Augmented",
    "AutoShardPolicy",
    "BlockReader",
    "Blocks",
    "Cifar10",
    "Csv",
    "DataPipeline",
    "DistributeOptions",
    "Idx",
    "ImageFolder",
    "Options",
    "Parquet",
    "Seekable",
    "Subset",
    "augment",
    "from_arrays",
    "from_generator",
    "pipeline",
    "split",
]
