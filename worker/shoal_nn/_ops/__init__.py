"""Numerical operations shared by layers: convolutions on each kind of device, windows, sums and special functions.

They are functions of arrays, without variables or state.
"""

from shoal_nn._ops.arithmetic import is_float, is_half, matmul, widened
from shoal_nn._ops.channels import (
    Moving,
    batch_statistics,
    centered_squares,
    column_sums,
    gradient_sums,
    input_gradient,
    scaled,
    slope_and_shift,
)
from shoal_nn._ops.error_function import erf
from shoal_nn._ops.windows import Padding, Pair, Windows, blocks, explicit, pair, windows_over

__all__ = [
    "Moving",
    "Padding",
    "Pair",
    "Windows",
    "batch_statistics",
    "blocks",
    "centered_squares",
    "column_sums",
    "erf",
    "explicit",
    "gradient_sums",
    "input_gradient",
    "is_float",
    "is_half",
    "matmul",
    "pair",
    "scaled",
    "slope_and_shift",
    "widened",
    "windows_over",
]
