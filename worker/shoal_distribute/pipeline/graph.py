"""Graphs of models: the calls of layers in order, and the values that they pass to each other."""

from dataclasses import dataclass
from typing import Any

from shoal import errors
from shoal_distribute.keras.layers.base import KerasTensor, Layer
from shoal_distribute.keras.models.model import Model, calls_between


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer.

    Attributes:
        layer: the layer.
        inputs: numbers of the values that it takes.
        output: number of the value that it computes.
        takes_list: whether it takes a list of values.
        training: whether the layer acts as in training; None means as the model does.
    """

    layer: Layer
    inputs: tuple[int, ...]
    output: int
    takes_list: bool
    training: bool | None


class Graph:
    """The calls of a model's layers, in an order in which they can be made. Values have numbers, inputs the first ones.

    Args:
        model: a `Sequential` or functional model that is built.

    Attributes:
        calls: the calls.
        inputs: the symbolic inputs of the model.
        outputs: numbers of the values that the model returns.
        returns_list: whether it returns a list.

    Raises:
        InvalidLayer: the model has a `call` of its own, so its layers have no known order; or a layer joins sums of all
            replicas.
    """

    def __init__(self, model: Model) -> None:
        if not model.outputs:
            raise errors.InvalidLayer(
                f"model {model.name} has a call() of its own, so it cannot be cut into stages; use a Sequential or a "
                "functional model, keras.Model(inputs, outputs)"
            )
        if joining := [it.name for it in model.all_layers() if it.joins_replicas]:
            raise errors.InvalidLayer(
                f"layer {joining[0]} of model {model.name} joins sums of all replicas, but stages normalize each "
                "micro-batch by itself; leave out synchronized=True"
            )
        self._outputs: Any = model.output
        self.inputs: list[KerasTensor] = model.inputs
        numbers = {id(symbol): number for number, symbol in enumerate(self.inputs)}
        by_call: dict[int, int] = {}
        found: list[LayerCall] = []

        def number_of(symbol: KerasTensor) -> int:
            if id(symbol) in numbers:
                return numbers[id(symbol)]
            assert symbol.call is not None  # `calls_between` has checked it
            return by_call[symbol.call.number]

        for call in calls_between(self.inputs, model.outputs):
            output = by_call[call.number] = len(numbers) + len(found)
            inputs = tuple(map(number_of, call.tensors))
            found.append(LayerCall(call.layer, inputs, output, isinstance(call.inputs, list), call.training))
        self.calls = tuple(found)
        self.outputs = tuple(map(number_of, model.outputs))
        self.returns_list = isinstance(model.output, list | tuple)
        self._last_reader = {value: index for index, call in enumerate(self.calls) for value in call.inputs}
        self._last_reader |= dict.fromkeys(self.outputs, len(self.calls))

    def is_of(self, model: Model) -> bool:
        """Returns whether the model still has this graph. `Sequential.add` makes a new one."""
        return model.output is self._outputs

    def crossing(self, place: int) -> list[int]:
        """Returns the values that calls before a place compute, and calls from there on or the outputs need.

        Args:
            place: number of the first call behind the cut.
        """
        computed = [call.output for call in self.calls[:place]]
        return [value for value in computed if self._last_reader.get(value, -1) >= place]

    def name_of(self, value: int) -> str:
        """Returns the name of the layer or the input that a value comes from."""
        first = len(self.inputs)
        return self.inputs[value].name if value < first else self.calls[value - first].layer.name


__all__ = ["Graph", "LayerCall"]
