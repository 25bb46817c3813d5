"""Arithmetic operators of values that do not compute by themselves, such as variables and symbolic tensors."""

import operator
from abc import abstractmethod
from collections.abc import Callable
from typing import Any


class Operators:
    """Base class whose operators all call `_operated`."""

    __array_priority__ = 100  # an operator of NumPy's arrays leaves the work to this class

    @abstractmethod
    def _operated(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Returns the result of an operator.

        Args:
            function: the function of the module `operator`.
            *operands: its arguments, one of which is this value.
        """

    def __add__(self, other: Any) -> Any:
        return self._operated(operator.add, self, other)

    def __radd__(self, other: Any) -> Any:
        return self._operated(operator.add, other, self)

    def __sub__(self, other: Any) -> Any:
        return self._operated(operator.sub, self, other)

    def __rsub__(self, other: Any) -> Any:
        return self._operated(operator.sub, other, self)

    def __mul__(self, other: Any) -> Any:
        return self._operated(operator.mul, self, other)

    def __rmul__(self, other: Any) -> Any:
        return self._operated(operator.mul, other, self)

    def __truediv__(self, other: Any) -> Any:
        return self._operated(operator.truediv, self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._operated(operator.truediv, other, self)

    def __matmul__(self, other: Any) -> Any:
        return self._operated(operator.matmul, self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return self._operated(operator.matmul, other, self)

    def __pow__(self, exponent: Any) -> Any:
        return self._operated(operator.pow, self, exponent)

    def __neg__(self) -> Any:
        return self._operated(operator.neg, self)

    def __abs__(self) -> Any:
        return self._operated(operator.abs, self)

    def __getitem__(self, key: Any) -> Any:
        return self._operated(operator.getitem, self, key)


__all__ = ["Operators"]
