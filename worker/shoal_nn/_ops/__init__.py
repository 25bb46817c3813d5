"""Numerical operations shared by layers: convolutions on each kind of device, windows, sums and special functions.

They are functions of arrays, without variables or state.
"""

from shoal_nn._ops.arithmetic import (
    along,
    column_products,
    column_sums,
    in_runs,
    is_float,
    joined,
    matmul,
    pieces,
    widened,
)
from shoal_nn._ops.error_function import erf
from shoal_nn._ops.windows import Padding, Pair, Windows, blocks, explicit, pair, windows_over

__all__ = [
    "Padding",
    "Pair",
    "Windows",
    "along",
    "blocks",
    "column_products",
    "column_sums",
    "erf",
    "explicit",
    "in_runs",
    "is_float",
    "joined",
    "matmul",
    "pair",
    "pieces",
    "widened",
    "windows_over",
]
