"""Where every element of a job's variables lies: slices in arenas, arenas in shards, shards on servers.

Pure data, shared by the coordinator that plans it, the servers that allocate it and the clients that pack by it.
"""

import enum
import math
from dataclasses import dataclass
from functools import cached_property

import ml_dtypes
import numpy as np

from shoal.v1 import tensor_pb2


class Aggregation(enum.Enum):
    """How what workers push changes a variable."""

    TRAINABLE = tensor_pb2.TRAINABLE  # gradients, through the job's optimizer
    MEAN = tensor_pb2.MEAN  # new values, averaged over a step's pushes
    SUM = tensor_pb2.SUM  # increments, added
    LAST = tensor_pb2.LAST  # new values, the last one assigned


_DTYPES: dict[int, np.dtype] = {
    tensor_pb2.FLOAT32: np.dtype(np.float32),
    tensor_pb2.FLOAT64: np.dtype(np.float64),
    tensor_pb2.FLOAT16: np.dtype(np.float16),
    tensor_pb2.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    tensor_pb2.INT64: np.dtype(np.int64),
}
_DTYPE_CODES = {dtype: code for code, dtype in _DTYPES.items()}
SUPPORTED_DTYPES = tuple(_DTYPES.values())


def dtype_from_code(code: int) -> np.dtype:
    """The NumPy dtype of a `DType` of the wire; KeyError if there is none."""
    return _DTYPES[code]


def dtype_code(dtype: np.dtype) -> int:
    """The wire's `DType` of a NumPy dtype; KeyError if there is none."""
    return _DTYPE_CODES[dtype]


def storage_dtype(dtype: np.dtype) -> np.dtype:
    """What a server keeps for a dtype of the wire: float32 master values for both halves, else the same."""
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows [row_start, row_stop) of a variable, `offset` elements from the start of their arena."""

    variable: str
    row_start: int
    row_stop: int
    offset: int


@dataclass(frozen=True)
class ArenaLayout:
    """A flat run of elements of one dtype, changed by one rule; its slices lie in order and without gaps."""

    dtype: np.dtype
    aggregation: Aggregation
    slices: tuple[Slice, ...]
    elements: int

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class ShardLayout:
    """The arenas of one shard."""

    shard: int
    arenas: tuple[ArenaLayout, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of values on the wire."""
        return sum(arena.nbytes for arena in self.arenas)


@dataclass(frozen=True)
class ShardPlacement:
    """A shard and the server that is its primary."""

    layout: ShardLayout
    server: str
    address: str


def rows_of(shape: tuple[int, ...]) -> int:
    """Length of the axis that partitioners cut; a scalar has one row."""
    return shape[0] if shape else 1


def row_elements(shape: tuple[int, ...]) -> int:
    """Elements in one row."""
    return math.prod(shape[1:])
