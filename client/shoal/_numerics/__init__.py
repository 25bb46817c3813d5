"""Numbers: element types, random numbers drawn by seed and name, and the cache of compiled kernels.

Where elements lie is in `shoal._wire`; what servers compute with them, in `shoal_server.optimizers`. Every package but
`shoal._memory` and `shoal._system` may import it.
"""

from shoal._numerics.elements import (
    SUPPORTED_DTYPES,
    Aggregation,
    dtype_code,
    dtype_from_code,
    row_elements,
    rows_of,
    storage_dtype,
    wire_dtype,
)
from shoal._numerics.seeds import seeded, takes_seed

__all__ = [
    "SUPPORTED_DTYPES",
    "Aggregation",
    "dtype_code",
    "dtype_from_code",
    "row_elements",
    "rows_of",
    "seeded",
    "storage_dtype",
    "takes_seed",
    "wire_dtype",
]
