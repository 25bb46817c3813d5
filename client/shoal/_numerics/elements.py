"""Element types, rows and aggregations of variables. Variables, partitioners and layouts share this module.

`shoal._wire.layout` has the layout of elements.
"""

import enum
import functools
import math

import ml_dtypes
import numpy as np

from shoal.v1 import tensor_pb2


class Aggregation(enum.Enum):
    """The rule by which pushes change a variable."""

    TRAINABLE = tensor_pb2.TRAINABLE  # gradients, through the job's optimizer
    MEAN = tensor_pb2.MEAN  # new values, averaged over the pushes of a step
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
    """Returns the NumPy dtype of a wire `DType`, or raises KeyError if there is none."""
    return _DTYPES[code]


def dtype_code(dtype: np.dtype) -> tensor_pb2.DType.ValueType:
    """Returns the wire `DType` of a NumPy dtype, or raises KeyError if there is none."""
    return _DTYPE_CODES[dtype]


def storage_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype that a server stores for a wire dtype: float32 for float16 and bfloat16, else the same."""
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


@functools.lru_cache(maxsize=1024)
def is_finite_as(dtype: np.dtype, value: float) -> bool:
    """Returns whether a value, rounded to a float dtype, is finite. The result is kept for the next variable."""
    with np.errstate(over="ignore"):
        return bool(np.isfinite(np.float64(value).astype(dtype)))


def wire_dtype(dtype: np.dtype, aggregation: Aggregation, wanted: np.dtype) -> np.dtype:
    """Returns the dtype in which the elements of a variable travel.

    Args:
        dtype: dtype of the variable.
        aggregation: aggregation of the variable.
        wanted: the job's wire dtype: float32, float16 or bfloat16.

    Returns:
        `wanted` for a trainable float32 variable if `wanted` has 16 bits, else `dtype`.
    """
    # A gradient is only an estimate, and servers add gradients up in float32. Workers compute all other values from
    # pulled ones, so rounding errors would accumulate: bfloat16 can count in ones only to 256, and a running mean stops
    # when its changes are below the last bit.
    rounded = dtype == np.float32 and aggregation is Aggregation.TRAINABLE
    return wanted if rounded and wanted in _HALVES else dtype


def rows_of(shape: tuple[int, ...]) -> int:
    """Returns the length of the axis that partitioners cut. A scalar has one row."""
    return shape[0] if shape else 1


@functools.lru_cache(maxsize=1024)  # a job asks for the same few shapes thousands of times
def row_elements(shape: tuple[int, ...]) -> int:
    """Returns the number of elements in one row."""
    return math.prod(shape[1:])
