"""The figures that a program gives: what they may be called, and the numbers that they are."""

import math
from typing import Any

from shoal import errors
from shoal._wire.limits import METRIC_NAME_BYTES

# What `is_name` asks for, for messages.
NAMES = f"text of 1 to {METRIC_NAME_BYTES} bytes of UTF-8"


def is_name(name: object) -> bool:
    """Whether a figure may be called so."""
    try:
        return isinstance(name, str) and 0 < len(name.encode()) <= METRIC_NAME_BYTES
    except UnicodeEncodeError:  # half a character
        return False


def number(value: Any, who: str, wanted: str = "a number, or an array of one element") -> float:
    """A figure as a number; of an array of one element, be it on a device, that element.

    Args:
        value: what a program gives.
        who: gives it, and for what: "evaluate() gives 'loss'".
        wanted: what it might give.

    Raises:
        ProgramError: it is no number.
    """
    shape = getattr(value, "shape", ())
    if isinstance(shape, tuple) and math.prod(shape) == 1:
        element = value.item() if hasattr(value, "item") else value
        if hasattr(element, "__float__"):  # which texts do not have
            try:
                return float(element)
            except (TypeError, ValueError, OverflowError):
                pass
    kind = type(value).__name__ + (f" of shape {shape}" if hasattr(value, "shape") else "")
    raise errors.ProgramError(f"{who} as {kind}; give {wanted}")


__all__ = ["NAMES", "is_name", "number"]
