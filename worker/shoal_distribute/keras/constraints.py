"""Constraints by Keras' names and arguments: what makes the values of a variable valid again after each update."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from shoal import errors
from shoal.program import Array
from shoal_distribute.keras.names import Advising, made_of, named
from shoal_worker.arrays import namespace_of

_EPSILON = 1e-7  # `keras.backend.epsilon()`: a norm of 0 divides nothing

# The axis of sums, or several of them.
Axes = int | Sequence[int]


class Constraint(Advising):
    """Rule for the values of a variable, applied after each update by an optimizer. A subclass defines the call."""

    @abstractmethod
    def __call__(self, w: Array) -> Array:
        """Returns the valid values that replace those of a variable.

        Args:
            w: the values, on the device of the variable. Do not change the array.
        """
        raise NotImplementedError


class MaxNorm(Constraint):
    """w * min(norm, max_value) / (1e-7 + norm), with norm = sqrt(sum(w * w)) along an axis.

    Args:
        max_value: the largest norm.
        axis: the axis of the sums, or several of them: 0 for a `Dense` layer, (0, 1, 2) for a `Conv2D` layer.

    Raises:
        BadRequest: `max_value` is not a number of 0 or more, or the axis is not a whole number or a list of them.
    """

    def __init__(self, max_value: float = 2, axis: Axes = 0) -> None:
        self.max_value, self.axis = _limit("max_value", max_value), _axes(axis)

    def __call__(self, w: Array) -> Array:
        norms = _norms(w, self.axis)
        return w * (namespace_of(w).clip(norms, 0, self.max_value) / (_EPSILON + norms))


class NonNeg(Constraint):
    """max(w, 0)."""

    def __call__(self, w: Array) -> Array:
        return namespace_of(w).maximum(w, 0)


class UnitNorm(Constraint):
    """w / (1e-7 + norm), with norm = sqrt(sum(w * w)) along an axis.

    Args:
        axis: see `MaxNorm`.

    Raises:
        BadRequest: see `MaxNorm`.
    """

    def __init__(self, axis: Axes = 0) -> None:
        self.axis = _axes(axis)

    def __call__(self, w: Array) -> Array:
        return w / (_EPSILON + _norms(w, self.axis))


class MinMaxNorm(Constraint):
    """w * (rate * clip(norm, min_value, max_value) + (1 - rate) * norm) / (1e-7 + norm).

    The norm is sqrt(sum(w * w)) along an axis.

    Args:
        min_value: the smallest norm.
        max_value: the largest norm.
        rate: 1 makes the norm valid at once. A smaller number brings it nearer with each update.
        axis: see `MaxNorm`.

    Raises:
        BadRequest: see `MaxNorm`. It holds for all three numbers.
    """

    def __init__(self, min_value: float = 0.0, max_value: float = 1.0, rate: float = 1.0, axis: Axes = 0) -> None:
        self.min_value, self.max_value = _limit("min_value", min_value), _limit("max_value", max_value)
        self.rate, self.axis = _limit("rate", rate), _axes(axis)

    def __call__(self, w: Array) -> Array:
        norms = _norms(w, self.axis)
        allowed = namespace_of(w).clip(norms, self.min_value, self.max_value)
        return w * ((self.rate * allowed + (1 - self.rate) * norms) / (_EPSILON + norms))


max_norm = MaxNorm
min_max_norm = MinMaxNorm
non_neg = NonNeg
unit_norm = UnitNorm
_KINDS: dict[str, type[Constraint]] = {kind.__name__: kind for kind in (MaxNorm, NonNeg, UnitNorm, MinMaxNorm)}
_BY_NAME = _KINDS | {"max_norm": MaxNorm, "non_neg": NonNeg, "unit_norm": UnitNorm, "min_max_norm": MinMaxNorm}


def get(identifier: Any) -> Callable[[Array], Array] | None:
    """Returns the constraint of this name, the constraint itself, or None for None.

    Args:
        identifier: None, a name such as "max_norm", an object or a class of this module, a function that takes an array
            of NumPy or CuPy and returns another one, or a dict such as {"class_name": "MaxNorm", "config":
            {"max_value": 3}}.

    Raises:
        BadRequest: there is no such constraint. The message has the nearest name.
    """
    if identifier is None:
        return None
    if isinstance(identifier, dict):
        return made_of("constraint", identifier, _BY_NAME)
    if isinstance(identifier, str):
        return named("constraint", identifier, _BY_NAME)()
    if isinstance(identifier, type) and issubclass(identifier, Constraint):
        return identifier()
    if callable(identifier):
        found: Callable[[Array], Array] = identifier
        return found
    raise errors.BadRequest(f"a constraint is {identifier!r}; give its name or an object of keras.constraints")


def serialized(constraint: Constraint) -> dict[str, Any] | None:
    """Returns the dict from which `get` makes a constraint again; None if its class is not one of this module."""
    kind = type(constraint)
    return {"class_name": kind.__name__, "config": constraint.arguments()} if kind in _KINDS.values() else None


def _norms(w: Array, axis: int | tuple[int, ...]) -> Array:
    return namespace_of(w).sqrt((w * w).sum(axis=axis, keepdims=True))


def _limit(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise errors.BadRequest(f"{name} of a constraint is {value!r}; give a number of 0 or more")
    return float(value)


def _axes(given: Any) -> int | tuple[int, ...]:
    axes = [given] if isinstance(given, int) else given
    if not isinstance(axes, list | tuple) or not all(isinstance(it, int) for it in axes):
        raise errors.BadRequest(f"axis of a constraint is {given!r}; give a whole number, or a list of them")
    return given if isinstance(given, int) else tuple(axes)


__all__ = [
    "Constraint",
    "MaxNorm",
    "MinMaxNorm",
    "NonNeg",
    "UnitNorm",
    "get",
    "max_norm",
    "min_max_norm",
    "non_neg",
    "serialized",
    "unit_norm",
]
