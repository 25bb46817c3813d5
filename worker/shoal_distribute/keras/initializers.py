"""Initializers by Keras' names and arguments. Each returns an initializer of `shoal.initializers`."""

from collections.abc import Callable
from typing import Any

from shoal import errors, initializers
from shoal.initializers import Initializer
from shoal_distribute.keras.names import made_of, named


def Zeros() -> Initializer:
    """Returns the initializer that sets all elements to 0."""
    return initializers.Zeros()


def Ones() -> Initializer:
    """Returns the initializer that sets all elements to 1."""
    return initializers.Ones()


def Constant(value: float = 0.0) -> Initializer:
    """Returns the initializer that sets all elements to one value."""
    return initializers.Constant(value)


def RandomUniform(minval: float = -0.05, maxval: float = 0.05, seed: int | None = None) -> Initializer:
    """Returns the initializer that draws uniformly from [minval, maxval).

    Args:
        minval: lower bound.
        maxval: upper bound.
        seed: 1 to 2**64 - 1. None means a different one for each variable.
    """
    return initializers.Uniform(minval, maxval, seed=seed)


def RandomNormal(mean: float = 0.0, stddev: float = 0.05, seed: int | None = None) -> Initializer:
    """Returns the initializer that draws from a normal distribution.

    Args:
        mean: mean of the distribution.
        stddev: its standard deviation.
        seed: 1 to 2**64 - 1. None means a different one for each variable.
    """
    return initializers.Normal(mean, stddev, seed=seed)


def TruncatedNormal(mean: float = 0.0, stddev: float = 0.05, seed: int | None = None) -> Initializer:
    """Returns the initializer that draws from a normal distribution, truncated at two standard deviations.

    Args:
        mean: mean of the distribution.
        stddev: its standard deviation before the truncation.
        seed: 1 to 2**64 - 1. None means a different one for each variable.
    """
    return initializers.TruncatedNormal(mean, stddev, seed=seed)


def GlorotUniform(seed: int | None = None) -> Initializer:
    """Returns Glorot's initializer, uniform: see `shoal.initializers.GlorotUniform`."""
    return initializers.GlorotUniform(seed=seed)


def GlorotNormal(seed: int | None = None) -> Initializer:
    """Returns Glorot's initializer, normal: see `shoal.initializers.GlorotNormal`."""
    return initializers.GlorotNormal(seed=seed)


def HeUniform(seed: int | None = None) -> Initializer:
    """Returns He's initializer, uniform: see `shoal.initializers.HeUniform`."""
    return initializers.HeUniform(seed=seed)


def HeNormal(seed: int | None = None) -> Initializer:
    """Returns He's initializer, normal: see `shoal.initializers.HeNormal`."""
    return initializers.HeNormal(seed=seed)


_BY_NAME: dict[str, Callable[..., Initializer]] = {
    "zeros": Zeros,
    "ones": Ones,
    "constant": Constant,
    "random_uniform": RandomUniform,
    "uniform": RandomUniform,
    "random_normal": RandomNormal,
    "normal": RandomNormal,
    "truncated_normal": TruncatedNormal,
    "glorot_uniform": GlorotUniform,
    "glorot_normal": GlorotNormal,
    "he_uniform": HeUniform,
    "he_normal": HeNormal,
}
_BY_NAME |= {make.__name__: make for make in _BY_NAME.values()}


def get(identifier: Any) -> Initializer:
    """Returns the initializer of this name, or the initializer itself.

    Args:
        identifier: a name such as "glorot_uniform", an initializer, a dict such as {"class_name": "Constant", "config":
            {"value": 0.1}}, or one that `serialized` returned.

    Raises:
        BadRequest: there is no such initializer. The message has the nearest name.
    """
    if isinstance(identifier, Initializer):
        return identifier
    if isinstance(identifier, dict):
        if "name" not in identifier:
            return made_of("initializer", identifier, _BY_NAME)
        parameters = {name: value for name, value in identifier.items() if name != "name"}
        kinds = {kind.name: kind for kind in _kinds()}
        return named("initializer", identifier["name"], kinds)(**parameters)
    if not isinstance(identifier, str):
        raise errors.BadRequest(f"an initializer is {identifier!r}; give its name or an object of keras.initializers")
    return named("initializer", identifier, _BY_NAME)()


def serialized(initializer: Initializer) -> dict[str, Any]:
    """Returns the name and the parameters of an initializer, for a file."""
    return {"name": initializer.name, **vars(initializer)}


def _kinds() -> list[type[Initializer]]:
    return [type(make()) for make in set(_BY_NAME.values())]


__all__ = [
    "Constant",
    "GlorotNormal",
    "GlorotUniform",
    "HeNormal",
    "HeUniform",
    "Ones",
    "RandomNormal",
    "RandomUniform",
    "TruncatedNormal",
    "Zeros",
    "get",
    "serialized",
]
