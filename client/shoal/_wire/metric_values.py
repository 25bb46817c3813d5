"""Checks of the metrics that a program reports: their names and their values."""

import math
from typing import Any

from shoal import errors
from shoal._wire.limits import METRIC_NAME_BYTES

# The condition of `is_name`, for error messages.
NAMES = f"text of 1 to {METRIC_NAME_BYTES} bytes of UTF-8"


def is_name(name: object) -> bool:
    """Returns whether a metric may have this name."""
    try:
        return isinstance(name, str) and 0 < len(name.encode()) <= METRIC_NAME_BYTES
    except UnicodeEncodeError:  # a lone surrogate
        return False


def number(value: Any, what: str, wanted: str = "a number, or an array of one element") -> float:
    """Converts a metric to a float. Accepts an array of one element, on any device.

    Args:
        value: the value that the program gave.
        what: subject and verb of the error message, such as "evaluate() gives 'loss'".
        wanted: the accepted types, for the error message.

    Returns:
        The value as a float.

    Raises:
        ProgramError: the value is not a number.
    """
    shape = getattr(value, "shape", ())
    if isinstance(shape, tuple) and math.prod(shape) == 1:
        element = value.item() if hasattr(value, "item") else value
        if hasattr(element, "__float__"):  # str has none
            try:
                return float(element)
            except (TypeError, ValueError, OverflowError):
                pass
    kind = type(value).__name__ + (f" of shape {shape}" if hasattr(value, "shape") else "")
    raise errors.ProgramError(f"{what} as {kind}; give {wanted}")


__all__ = ["NAMES", "is_name", "number"]
