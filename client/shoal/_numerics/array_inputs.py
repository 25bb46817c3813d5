"""Conversion of what users give as an array. Each refusal says what to give instead."""

from typing import Any

import numpy as np

from shoal import errors


def array_of(
    value: Any,
    what: str,
    error: type[errors.ShoalError],
    wanted: np.dtype | None = None,
    **details: str,
) -> np.ndarray:
    """Returns a value as an array of real numbers.

    Args:
        value: anything that NumPy reads.
        what: name of the value in messages, such as "variable 'w'".
        error: class of the errors.
        wanted: the variable's dtype. Numbers, and lists of them, take it if it is of their kind.
        details: details of the errors.

    Returns:
        The array. An array is returned as it is.

    Raises:
        ShoalError: of class `error`: NumPy cannot read the value, or it is not an array of real numbers.
    """
    if type(value) is np.ndarray:
        array = value
    else:
        try:
            array = np.asarray(value)
        except Exception as cause:  # whatever the value's own conversion raises
            reason = " ".join(str(cause).split())
            raise error(f"{what}: NumPy cannot read this {_kind(value)}: {reason}; {_cure(value)}", **details) from None
        if wanted is not None and isinstance(value, int | float | list | tuple | np.generic):
            # A number has no dtype of its own to keep. NumPy would make a float64 of it.
            array = array.astype(wanted) if array.dtype.kind == wanted.kind == "f" else array
    if is_real(array.dtype):
        return array
    if array.dtype.kind == "c":
        raise error(
            f"{what} has complex numbers ({array.dtype}); give real and imaginary parts as two variables", **details
        )
    raise error(
        f"{what}: a {_kind(value)} of dtype {array.dtype} is not an array of numbers; {_cure(value)}", **details
    )


def is_real(dtype: np.dtype) -> bool:
    """Returns whether a dtype is one of real numbers, including bool."""
    if dtype.kind == "V":
        return str(dtype) == "bfloat16"  # of ml_dtypes
    return dtype.kind not in "OUSMmc"


def _kind(value: Any) -> str:
    module = type(value).__module__.partition(".")[0]
    return f"{module}.{type(value).__name__}" if module not in {"builtins", "__main__"} else type(value).__name__


def _cure(value: Any) -> str:
    """Returns what to pass instead of a value that NumPy cannot read."""
    if type(value).__name__.endswith("Tracer"):  # of JAX, which need not be installed
        return "call the session outside of jax.jit and jax.grad, with the arrays that the compiled function returns"
    if str(getattr(value, "dtype", "")) == "torch.bfloat16":
        return "NumPy has no bfloat16 of PyTorch: pass tensor.detach().float().cpu().numpy()"
    if hasattr(value, "detach"):
        return "pass tensor.detach().cpu().numpy()"
    if hasattr(value, "get") and hasattr(value, "device"):
        return "pass array.get()"
    return "give an array of real numbers with one shape, such as np.zeros(3)"


__all__ = ["array_of", "is_real"]
