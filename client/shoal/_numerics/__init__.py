"""Numerics: element types, conversion to arrays, random numbers by seed and name, and the cache of compiled kernels.

`shoal._wire` has the layout of elements, and `shoal_server.optimizers` the computations of servers. Every package
except `shoal._memory` and `shoal._system` may import this one.
"""

from shoal._numerics.array_inputs import array_of, is_real
from shoal._numerics.elements import (
    SUPPORTED_DTYPES,
    Aggregation,
    dtype_code,
    dtype_from_code,
    is_finite_as,
    row_elements,
    rows_of,
    storage_dtype,
    wire_dtype,
)
from shoal._numerics.seeds import seeded, takes_seed

__all__ = [
    "SUPPORTED_DTYPES",
    "Aggregation",
    "array_of",
    "dtype_code",
    "dtype_from_code",
    "is_finite_as",
    "is_real",
    "row_elements",
    "rows_of",
    "seeded",
    "storage_dtype",
    "takes_seed",
    "wire_dtype",
]
