"""What variables are made of: element types, rows, and the rule by which pushes change them.

The words that variables, partitioners and layouts share; where elements lie is in `shoal._wire.layout`.
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
_HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
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


def wire_dtype(dtype: np.dtype, aggregation: Aggregation, wanted: np.dtype) -> np.dtype:
    """What elements of a kind travel as in a job whose float32 values are to travel as `wanted`.

    Args:
        dtype: of the variable.
        aggregation: of the variable.
        wanted: float32, or a half.

    Returns:
        `wanted` for float32 that is trainable if it is a half, else `dtype`.
    """
    # A gradient is an estimate as it is, and servers add it up in float32. All else is worked out by workers from what
    # they pulled, so its rounding errors would add up: bfloat16 counts in ones to 256, and a running mean stands still
    # once its changes are below a half's last bit.
    rounded = dtype == np.float32 and aggregation is Aggregation.TRAINABLE
    return wanted if rounded and wanted in _HALVES else dtype


def rows_of(shape: tuple[int, ...]) -> int:
    """Length of the axis that partitioners cut; a scalar has one row."""
    return shape[0] if shape else 1


def row_elements(shape: tuple[int, ...]) -> int:
    """Elements in one row."""
    return math.prod(shape[1:])
