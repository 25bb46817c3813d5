"""What variables are made of: element types, rows, and the rule by which pushes change them.

The words that variables, partitioners and layouts share; where elements lie is in `shoal._layout`.
"""

import enum
import math

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
_DTYPE_CODES = {dtype: tensor_pb2.DType.ValueType(code) for code, dtype in _DTYPES.items()}
SUPPORTED_DTYPES = tuple(_DTYPES.values())


def dtype_from_code(code: int) -> np.dtype:
    """The NumPy dtype of a `DType` of the wire; KeyError if there is none."""
    return _DTYPES[code]


def dtype_code(dtype: np.dtype) -> tensor_pb2.DType.ValueType:
    """The wire's `DType` of a NumPy dtype; KeyError if there is none."""
    return _DTYPE_CODES[dtype]


def storage_dtype(dtype: np.dtype) -> np.dtype:
    """What a server keeps for a dtype of the wire: float32 master values for both halves, else the same."""
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


def rows_of(shape: tuple[int, ...]) -> int:
    """Length of the axis that partitioners cut; a scalar has one row."""
    return shape[0] if shape else 1


def row_elements(shape: tuple[int, ...]) -> int:
    """Elements in one row."""
    return math.prod(shape[1:])
