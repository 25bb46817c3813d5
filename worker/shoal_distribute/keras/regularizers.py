"""Regularizers by Keras' names and arguments: penalties of weights and activities that are added to the loss."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from shoal import errors
from shoal_distribute.keras.names import Advising, made_of, named
from shoal_distribute.keras.tensor import Tensor, recorded
from shoal_worker.arrays import namespace_of


class Regularizer(Advising):
    """Penalty of a tensor: one number, which is added to the loss. A subclass defines the call."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Returns the penalty.

        Args:
            x: the value of a variable, or the output of a layer.
        """
        raise NotImplementedError


class L1L2(Regularizer):
    """l1 * sum(abs(x)) + l2 * sum(x * x).

    Args:
        l1: factor of the absolute values.
        l2: factor of the squares.

    Raises:
        BadRequest: a factor is not a finite number of 0 or more.
    """

    def __init__(self, l1: float = 0.0, l2: float = 0.0) -> None:
        self.l1, self.l2 = _factor("l1", l1), _factor("l2", l2)

    def __call__(self, x: Tensor) -> Tensor:
        array, l1, l2 = x.array, self.l1, self.l2
        xp = namespace_of(array)
        total = xp.zeros((), array.dtype)
        if l1:
            total = total + l1 * abs(array).sum()
        if l2:
            total = total + l2 * (array * array).sum()

        def pull(dy: Any) -> list[Any]:
            slope = 2 * l2 * array
            return [(slope + l1 * xp.sign(array) if l1 else slope) * dy]

        return recorded(xp.asarray(total, array.dtype), (x,), pull)


class L1(L1L2):
    """l1 * sum(abs(x)).

    Args:
        l1: the factor.

    Raises:
        BadRequest: see `L1L2`.
    """

    def __init__(self, l1: float = 0.01) -> None:
        super().__init__(l1=l1)


class L2(L1L2):
    """l2 * sum(x * x).

    Args:
        l2: the factor.

    Raises:
        BadRequest: see `L1L2`.
    """

    def __init__(self, l2: float = 0.01) -> None:
        super().__init__(l2=l2)


l1 = L1
l2 = L2
l1_l2 = L1L2
_BY_NAME: dict[str, type[Regularizer]] = {
    **{"l1": L1, "l2": L2, "l1_l2": L1L2, "l1l2": L1L2},
    **{kind.__name__: kind for kind in (L1, L2, L1L2)},
}


def get(identifier: Any) -> Callable[[Tensor], Tensor] | None:
    """Returns the regularizer of this name, the regularizer itself, or None for None.

    Args:
        identifier: None, a name such as "l2", an object or a class of this module, a function that takes a `Tensor` and
            returns the penalty, a dict such as {"class_name": "L2", "config": {"l2": 0.01}}, or one that `serialized`
            returned.

    Raises:
        BadRequest: there is no such regularizer. The message has the nearest name.
    """
    if identifier is None:
        return None
    if isinstance(identifier, dict):
        if "name" not in identifier:
            return made_of("regularizer", identifier, _BY_NAME)
        parameters = {name: value for name, value in identifier.items() if name != "name"}
        return named("regularizer", identifier["name"], _BY_NAME)(**parameters)
    if isinstance(identifier, str):
        return named("regularizer", identifier, _BY_NAME)()
    if isinstance(identifier, type) and issubclass(identifier, Regularizer):
        return identifier()
    if callable(identifier):
        found: Callable[[Tensor], Tensor] = identifier
        return found
    raise errors.BadRequest(f"a regularizer is {identifier!r}; give its name or an object of keras.regularizers")


def serialized(regularizer: L1L2) -> dict[str, Any]:
    """Returns the name and the factors of a regularizer, for a file."""
    return {"name": "L1L2", "l1": regularizer.l1, "l2": regularizer.l2}


def _factor(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise errors.BadRequest(f"{name} of a regularizer is {value!r}; give a finite number of 0 or more")
    return float(value)


__all__ = ["L1", "L1L2", "L2", "Regularizer", "get", "l1", "l1_l2", "l2", "serialized"]
