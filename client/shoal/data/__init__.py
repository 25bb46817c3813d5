"""Data sets that a program can use as its `dataset`.

- `Arrays`: NumPy arrays, or .npy and .npz files that are mapped into memory.
- `Parquet` and `Csv`: local files, or files at a URL that fsspec supports. They need `shoal[data]`: pyarrow and fsspec.
- `Idx`, `Cifar10` and `ImageFolder`: images with labels. `ImageFolder` needs `shoal[images]`: Pillow.
- `Augmented`: another data set with transformed images; `shoal.data.augment` has the transforms.
- `Subset` and `split`: some samples of another data set.
- `Seekable`: a source that can be read from any position.

Each is a `shoal.Dataset`. `Parquet`, `Csv` and `Seekable` are read in blocks (`shoal.program.BlockDataset`): a worker
reads only the blocks of its leased ranges, and reads them ahead. The order of an epoch does not depend on the number of
workers. See docs/how-to/data.md.
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
from shoal.data._seekable import Seekable
from shoal.data._subset import Subset, split
from shoal.program import Blocks

__all__ = [
    "Arrays",
    "Augmented",
    "BlockReader",
    "Blocks",
    "Cifar10",
    "Csv",
    "Idx",
    "ImageFolder",
    "Parquet",
    "Seekable",
    "Subset",
    "augment",
    "split",
]
