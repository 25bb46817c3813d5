"""Sources of examples: what a program's `dataset` may be, beside a class of its own.

- `Arrays`: NumPy arrays, or .npy and .npz files, mapped into memory.
- `Parquet` and `Csv`: files, here or on any URL that fsspec knows. They need `shoal[data]`: pyarrow and fsspec.
- `Seekable`: whatever can be read from any position on.

Each is a `shoal.Dataset`. Those that read files are read in blocks (`shoal.program.BlockDataset`): a worker reads what
it leases, a block ahead, and the order of an epoch does not depend on the number of workers. See docs/data.md.
"""

from shoal.data._arrays import Arrays
from shoal.data._csv import Csv
from shoal.data._in_blocks import InBlocks
from shoal.data._parquet import Parquet
from shoal.data._seekable import Seekable
from shoal.program import Blocks

__all__ = ["Arrays", "Blocks", "Csv", "InBlocks", "Parquet", "Seekable"]
