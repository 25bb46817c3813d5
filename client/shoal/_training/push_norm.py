"""Push norm: the square of the norm of a whole push, which servers need if each has only a part of the push."""

import math
from collections.abc import Mapping

import numpy as np

from shoal import errors
from shoal.optim import Optimizer

# Elements that are converted to float64 at once.
_BLOCK = 1 << 16


class PushNorm:
    """The norms of a job's pushes, for servers that limit them; see `clip_norm` of `Optimizer`.

    Args:
        optimizer: the job's optimizer. Frozen variables do not count.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._counts: dict[str, bool] = {}  # by variable, whether it counts

    def squares(self, gradients: Mapping[str, np.ndarray]) -> float:
        """Returns the sum of the squares of all gradients, in float64. It does not depend on the placement.

        Args:
            gradients: arrays by variable.

        Returns:
            The sum. Infinite if it is too large for float64, NaN if a gradient has a NaN.
        """
        parts = [_squares(array) for name, array in gradients.items() if self._is_counted(name)]
        try:
            return math.fsum(parts)
        except OverflowError:
            return math.inf

    def _is_counted(self, name: str) -> bool:
        if name not in self._counts:
            self._counts[name] = self._optimizer.settings_of(name).rate > 0
        return self._counts[name]


def check_pushed(squares: float) -> None:
    """Checks the sum of the squares of a push before it is sent.

    Raises:
        NonFiniteGradient: it is NaN.
    """
    if math.isnan(squares):
        raise errors.NonFiniteGradient(
            "the gradients of a push contain NaN; nothing was sent and no variable changed. Check for a learning rate "
            "that is too large or a division by zero, or skip this step"
        )


def _squares(array: np.ndarray) -> float:
    flat = np.ascontiguousarray(array).reshape(-1)
    scratch = np.empty(min(flat.size, _BLOCK))
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, flat.size, _BLOCK):
            values = flat[start : start + _BLOCK]
            block = scratch[: values.size]
            block[...] = values
            total += float(np.square(block, out=block).sum())
    return total


__all__ = ["PushNorm", "check_pushed"]
