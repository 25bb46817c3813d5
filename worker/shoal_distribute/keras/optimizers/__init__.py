"""Optimizers by Keras' names. Optimizers of `shoal.optim` compute them; `schedules` has learning-rate schedules."""

from collections.abc import Callable
from typing import Any

from shoal import errors, optim
from shoal_distribute.keras.names import named
from shoal_distribute.keras.optimizers import schedules
from shoal_distribute.keras.optimizers.base import Optimizer
from shoal_distribute.keras.optimizers.classes import SGD, Adagrad, Adam, AdamW, Ftrl, RMSprop

_CLASSES: tuple[type[Any], ...] = (SGD, Adagrad, Adam, AdamW, Ftrl, RMSprop)
_BY_NAME: dict[str, Callable[[], Optimizer]] = {it.__name__.lower(): it for it in _CLASSES}


def get(identifier: Any) -> Optimizer:
    """Returns the optimizer of this name, or the optimizer itself.

    Args:
        identifier: a name such as "adam", an object of this module, or one of `shoal.optim`.

    Raises:
        BadRequest: there is no such optimizer. The message has the nearest name.
    """
    if isinstance(identifier, Optimizer):
        return identifier
    if isinstance(identifier, optim.Optimizer):
        return Optimizer(identifier)
    if isinstance(identifier, str):
        return named("optimizer", identifier.lower(), _BY_NAME)()
    if isinstance(identifier, type):
        name = identifier.__name__
        raise errors.BadRequest(f"optimizer is the class {name}; give an object, such as {name}()")
    raise errors.BadRequest(f"optimizer is {identifier!r}; give a name, or an object of keras.optimizers")


__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Ftrl", "Optimizer", "RMSprop", "get", "schedules"]
