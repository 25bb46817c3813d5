"""Symbolic tensors, which stand for values in a functional model, and the calls that compute them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from shoal_distribute.operators import Operators
from shoal_nn.layer import Shape


class KerasTensor(Operators):
    """Symbolic tensor: the value of a functional model at one place, known by its shape only.

    The operators `+ - * / @ **`, `abs` and indexing return another one: each is a layer of the model.

    Args:
        shape: shape of a sample.
        dtype: dtype of the values.
        call: the call of a layer that computes it; None for an input.
        name: name of the input or of the layer.
        input_layer: the layer that stands for an input among the layers of a model.
    """

    operated: ClassVar[Callable[..., Any]]  # computes an operator. `layers.operation` sets it

    def __init__(
        self,
        shape: Shape,
        dtype: str,
        call: "SymbolicCall | None" = None,
        name: str = "",
        input_layer: Any = None,
    ) -> None:
        self.sample_shape, self.dtype, self.call, self.name = tuple(shape), dtype, call, name
        self.input_layer = input_layer

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The shape; None stands for the batch."""
        return None, *self.sample_shape

    def _operated(self, function: Callable[..., Any], *operands: Any) -> Any:
        return KerasTensor.operated(function, *operands)

    def __repr__(self) -> str:
        return f"<KerasTensor shape={self.shape}, dtype={self.dtype}, name={self.name!r}>"


@dataclass(frozen=True, eq=False)
class SymbolicCall:
    """One call of a layer on symbolic tensors.

    Attributes:
        layer: the layer.
        inputs: what it was called on: a symbolic tensor, or a list of them.
        number: larger than those of the calls that computed the inputs.
        training: whether the layer acts as in training; None means as the model does.
    """

    layer: Any
    inputs: Any
    number: int
    training: bool | None = None

    @property
    def tensors(self) -> list[KerasTensor]:
        """The inputs as a list."""
        return list(self.inputs) if isinstance(self.inputs, list) else [self.inputs]


def shapes_of(symbols: Any) -> Any:
    """Returns the shape of a symbolic tensor, or those of a list or dict of them."""
    if isinstance(symbols, dict):
        return {name: it.shape for name, it in symbols.items()}
    return [it.shape for it in symbols] if isinstance(symbols, list | tuple) else symbols.shape


__all__ = ["KerasTensor", "SymbolicCall", "shapes_of"]
