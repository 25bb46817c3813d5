"""Activations by Keras' names: functions of tensors and arrays, and the layers of shoal_nn that compute them."""

from collections.abc import Callable
from typing import Any

import numpy as np

import shoal_nn
from shoal import errors
from shoal_distribute.keras.names import named
from shoal_distribute.keras.tensor import Tensor, array_of, recorded

# The layer of each name; None leaves values as they are. Keras' gelu is the exact one.
_LAYERS: dict[str, shoal_nn.Layer | None] = {
    "linear": None,
    "relu": shoal_nn.ReLU(),
    "relu6": shoal_nn.ReLU6(),
    "leaky_relu": shoal_nn.LeakyReLU(0.2),
    "elu": shoal_nn.ELU(),
    "selu": shoal_nn.SELU(),
    "gelu": shoal_nn.GELU(),
    "sigmoid": shoal_nn.Sigmoid(),
    "tanh": shoal_nn.Tanh(),
    "softmax": shoal_nn.Softmax(),
    "softplus": shoal_nn.Softplus(),
    "silu": shoal_nn.SiLU(),
    "swish": shoal_nn.SiLU(),
}


def layer_of(identifier: Any) -> shoal_nn.Layer | None:
    """Returns the layer of shoal_nn that computes an activation; None if it leaves values as they are.

    Args:
        identifier: None, a name such as "relu", or a function of this module.

    Raises:
        BadRequest: there is no such activation. The message has the nearest name.
    """
    return named("activation", name_of(identifier), _LAYERS)


def name_of(identifier: Any) -> str:
    """Returns the name of an activation.

    Args:
        identifier: see `layer_of`.

    Raises:
        BadRequest: it is neither a name nor a function of this module.
    """
    if identifier is None:
        return "linear"
    if isinstance(identifier, str):
        return identifier
    if getattr(identifier, "__module__", "") == __name__:
        return str(identifier.__name__)
    raise errors.BadRequest(
        f"an activation is {identifier!r}; give its name, such as 'relu', or one of keras.activations"
    )


def get(identifier: Any) -> Callable[[Any], Tensor]:
    """Returns the function of an activation.

    Args:
        identifier: see `layer_of`.
    """
    name = name_of(identifier)
    named("activation", name, _LAYERS)
    found: Callable[[Any], Tensor] = globals()[name]
    return found


def _applied(name: str) -> Callable[[Any], Tensor]:
    layer = _LAYERS[name]

    def activation(x: Any) -> Tensor:
        given = x if isinstance(x, Tensor) else Tensor(array_of(x) if hasattr(array_of(x), "dtype") else np.asarray(x))
        if layer is None:
            return given
        y, _, pull = layer.apply({}, {}, given.array, False)
        return recorded(y, (given,), lambda dy: [pull(dy)[1]])

    activation.__name__ = activation.__qualname__ = name
    activation.__doc__ = f"Returns the values of {name} at each element of a tensor or an array."
    return activation


linear = _applied("linear")
relu = _applied("relu")
relu6 = _applied("relu6")
leaky_relu = _applied("leaky_relu")
elu = _applied("elu")
selu = _applied("selu")
gelu = _applied("gelu")
sigmoid = _applied("sigmoid")
tanh = _applied("tanh")
softmax = _applied("softmax")
softplus = _applied("softplus")
silu = _applied("silu")
swish = silu

__all__ = [
    "elu",
    "gelu",
    "get",
    "layer_of",
    "leaky_relu",
    "linear",
    "name_of",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "swish",
    "tanh",
]
