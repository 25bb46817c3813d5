"""Values of this process's replicas as arrays on the host, which `Strategy.reduce` and `Strategy.gather` join."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal import errors
from shoal_distribute.values import PerReplica
from shoal_worker.arrays import on_host


def arrays_of(value: Any) -> list[np.ndarray]:
    """Returns the values of the replicas; one array for a value that is not `PerReplica`."""
    return [_on_host(it) for it in (value.values if isinstance(value, PerReplica) else (value,))]


def numbers_of(value: Any) -> list[np.ndarray]:
    """Returns the values of the replicas. A boolean is the integer 0 or 1.

    Raises:
        BadRequest: a value is not a number, or an array of numbers.
    """
    arrays = arrays_of(value)
    for it in arrays:
        if it.dtype.kind not in "biufc" and it.dtype.name != "bfloat16":
            raise errors.BadRequest(
                f"reduce got values of {it.dtype}, which have no sum; give numbers, or arrays of numbers"
            )
    return [it.astype(np.int64) if it.dtype.kind == "b" else it for it in arrays]


def total_of(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the sum of arrays.

    Raises:
        InvalidShape: they have different shapes.
    """
    if len({it.shape for it in arrays}) > 1:
        raise errors.InvalidShape(
            f"arrays of the shapes {_shapes(arrays)} cannot be added; return arrays of one shape, or give an axis"
        )
    total = arrays[0]
    for array in arrays[1:]:
        total = np.asarray(total + array)
    return total


def summed_along(arrays: Sequence[np.ndarray], axis: int) -> tuple[np.ndarray, int]:
    """Returns the sum of all elements of arrays along an axis, and how many they are.

    Args:
        arrays: arrays of the same shape, apart from this axis.
        axis: the axis.

    Raises:
        InvalidShape: they do not fit together, or have no such axis.
    """
    if any(not -it.ndim <= axis < it.ndim for it in arrays):
        raise errors.InvalidShape(
            f"arrays of the shapes {_shapes(arrays)} have no axis {axis}; give axis=None, or less"
        )
    return total_of([np.asarray(it.sum(axis=axis)) for it in arrays]), sum(it.shape[axis] for it in arrays)


def joined_along(arrays: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """Returns arrays one after the other along an axis.

    Args:
        arrays: arrays of the same shape, apart from this axis.
        axis: the axis.

    Raises:
        InvalidShape: they do not fit together, or have no such axis.
    """
    try:
        return np.concatenate(arrays, axis)
    except (ValueError, np.exceptions.AxisError) as error:
        raise errors.InvalidShape(
            f"arrays of the shapes {_shapes(arrays)} cannot be gathered along axis {axis}: {error}"
        ) from None


def _on_host(value: Any) -> np.ndarray:
    return np.asarray(value) if isinstance(value, int | float) else on_host(value)


def _shapes(arrays: Sequence[np.ndarray]) -> str:
    return ", ".join(str(it.shape) for it in arrays)


__all__ = ["arrays_of", "joined_along", "numbers_of", "summed_along", "total_of"]
