"""Sources of samples: what a program's `dataset` may be, beside a class of its own.

- `Arrays`: NumPy arrays, or .npy and .npz files, mapped into memory.
- `Parquet` and `Csv`: files, here or on any URL that fsspec knows. They need `shoal[data]`: pyarrow and fsspec.
- `Idx`, `Cifar10` and `ImageFolder`: images with labels; the last needs `shoal[images]`: Pillow. What is done to images
  before a model sees them is in `shoal.data.augment`.
- `Augmented`: another one with its images changed. `Subset` and `split`: some samples of another one.
- `Seekable`: whatever can be read from any position on.

Each is a `shoal.Dataset`. `Parquet`, `Csv` and `Seekable` are read in blocks (`shoal.program.BlockDataset`): a worker
reads what it leases, a block ahead. The order of an epoch does not depend on the number of workers. See
docs/how-to/data.md.
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
