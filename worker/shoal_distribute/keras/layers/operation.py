"""Layer that computes an operator of symbolic tensors, such as `x / 255.0` or `x + y`."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shoal import errors
from shoal_distribute.keras import config
from shoal_distribute.keras.layers.base import KerasTensor, Layer, cast
from shoal_distribute.keras.names import named, unique_name

# The operators by their names in Keras, which the names of the layers begin with.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "true_divide": operator.truediv,
    "matmul": operator.matmul,
    "power": operator.pow,
    "negative": operator.neg,
    "absolute": operator.abs,
    "get_item": operator.getitem,
}
_NAMES = {function: name for name, function in _FUNCTIONS.items()}
_BATCH = 3  # samples that find the shape of an output


class Operation(Layer):
    """Operator of one or two symbolic tensors. An operator of a `KerasTensor` makes it.

    Args:
        function: Keras' name of the operator, such as "add".
        operands: its operands. None stands for an input of the layer, and a slice of an index is a dict of its bounds.
        **kwargs: see `Layer`.

    Raises:
        BadRequest: there is no such operator.
    """

    def __init__(self, function: str, operands: Sequence[Any], **kwargs: Any) -> None:
        super().__init__(**{"name": unique_name(function), **kwargs})
        self._function, self._operands = named("operator", function, _FUNCTIONS), tuple(operands)
        self._key = _decoded(operands[1]) if function == "get_item" else None
        self.built = True

    def get_config(self) -> dict[str, Any]:
        plain = [it.tolist() if isinstance(it, np.ndarray | np.generic) else it for it in self._operands]
        return {**super().get_config(), "operands": plain}

    def compute_output_shape(self, shape: Any) -> Any:
        shapes = shape if isinstance(shape, list) else [shape]
        found = self([np.ones((_BATCH, *it), self.dtype) for it in shapes], training=False).shape
        if found[:1] != (_BATCH,):
            raise errors.InvalidLayer(
                f"layer {self.name} changes the first axis, which is the batch; leave it as it is, such as x[:, 0]",
                kind="Operation",
            )
        return found[1:]

    def call(self, inputs: Any, training: bool = False) -> Any:  # noqa: ARG002 - acts the same
        tensors = iter([cast(it, self.dtype) for it in (inputs if isinstance(inputs, list) else [inputs])])
        if self._key is not None:
            return next(tensors)[self._key]
        return self._function(*(next(tensors) if it is None else _constant(it, self.dtype) for it in self._operands))


def operated(function: Callable[..., Any], *operands: Any) -> Any:
    """Returns the symbolic tensor of an operator.

    Args:
        function: the function of the module `operator`.
        *operands: symbolic tensors, numbers and arrays; of an index, the tensor and the key.

    Raises:
        InvalidLayer: an operand is of another kind, or the operator changes the batch's axis.
        InvalidShape: the shapes do not fit together.
    """
    name, symbols = _NAMES[function], [it for it in operands if isinstance(it, KerasTensor)]
    is_index = name == "get_item"
    others = [] if is_index else [it for it in operands if not isinstance(it, KerasTensor)]
    for other in others:
        if not isinstance(other, bool | int | float | np.ndarray | np.generic):
            raise errors.InvalidLayer(
                f"{name} of a symbolic tensor got a {type(other).__name__}; give symbolic tensors, numbers or arrays",
                kind="Operation",
            )
    given = [symbols[0], _encoded(operands[1])] if is_index else list(operands)
    layer = Operation(
        name,
        [None if isinstance(it, KerasTensor) else it for it in given],
        dtype=_result(name, [it.dtype for it in symbols], others),
    )
    try:
        return layer(symbols if len(symbols) > 1 else symbols[0])
    except (ValueError, IndexError, TypeError) as error:
        shapes = " and ".join(str(it.shape) for it in symbols)
        raise errors.InvalidShape(f"{name} of symbolic tensors of the shape {shapes} fails: {error}") from None


def _result(name: str, dtypes: list[str], others: list[Any]) -> str:
    """Returns the dtype of an operator's result: a float if an operand is one, or if it divides."""
    floats = [it for it in dtypes if "float" in it]
    if floats:
        return max(floats, key=lambda it: np.dtype(it).itemsize if it != "bfloat16" else 2)
    if name != "get_item" and (name == "true_divide" or any(np.asarray(it).dtype.kind == "f" for it in others)):
        return config.floatx()
    return str(np.result_type(*dtypes))


def _constant(value: Any, dtype: str) -> Any:
    return value if isinstance(value, bool | int | float) else np.asarray(value, dtype)


def _encoded(key: Any) -> Any:
    """Returns an index in a form that files can have."""
    if isinstance(key, tuple):
        return [_encoded(it) for it in key]
    if isinstance(key, slice):
        return {"start": key.start, "stop": key.stop, "step": key.step}
    if key is Ellipsis:
        return "..."
    if key is None or isinstance(key, int):
        return key
    raise errors.InvalidLayer(
        f"a symbolic tensor was indexed by a {type(key).__name__}; use whole numbers, slices, None and ...",
        kind="Operation",
    )


def _decoded(key: Any) -> Any:
    if isinstance(key, list | tuple):
        return tuple(map(_decoded, key))
    if isinstance(key, dict):
        return slice(key["start"], key["stop"], key["step"])
    return Ellipsis if key == "..." else key


KerasTensor.operated = operated

__all__ = ["Operation", "operated"]
