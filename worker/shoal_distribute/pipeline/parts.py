"""Parts of a model: what each stage computes, and the layers that several stages have."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from shoal import errors
from shoal_distribute.devices import LogicalDevice
from shoal_distribute.keras.layers import Dropout
from shoal_distribute.keras.layers.core_layer import CoreLayer
from shoal_distribute.pipeline.graph import Graph, LayerCall
from shoal_distribute.pipeline.variables import StageVariable


@dataclass(frozen=True)
class StagePart:
    """What a stage computes.

    Attributes:
        number: its number.
        device: its device.
        calls: the calls of layers.
        feeds: numbers of the model's inputs that the stage reads from the data itself.
        receives: numbers of the values that come from the stage before.
        sends: numbers of the values that go to the next stage; of the last stage, the outputs of the model.
    """

    number: int
    device: LogicalDevice
    calls: Sequence[LayerCall]
    feeds: Sequence[int]
    receives: Sequence[int]
    sends: Sequence[int]

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of its layers."""
        return tuple(call.layer.name for call in self.calls)

    @property
    def variables(self) -> list[StageVariable]:
        """The variables of its layers, each once."""
        found = {id(it): it for call in self.calls for it in call.layer.weights}
        return [cast(StageVariable, it) for it in found.values()]


def parts_of(graph: Graph, cuts: Sequence[int], devices: Sequence[LogicalDevice]) -> Iterator[StagePart]:
    """Yields what each stage computes.

    Args:
        graph: the model.
        cuts: the places in front of the first call of each stage but the first.
        devices: the device of each stage.
    """
    bounds, inputs = [0, *cuts, len(graph.calls)], len(graph.inputs)
    for number, device in enumerate(devices):
        calls = graph.calls[bounds[number] : bounds[number + 1]]
        is_last = number == len(devices) - 1
        received = graph.crossing(bounds[number])
        sent = graph.outputs if is_last else graph.crossing(bounds[number + 1])
        read = {it for call in calls for it in call.inputs} | (set(sent) if is_last else set())
        feeds = sorted(it for it in read if it < inputs)
        yield StagePart(number, device, calls, feeds, received, sent)


def users_of(parts: Sequence[StagePart]) -> list[tuple[StageVariable, list[int]]]:
    """Returns all variables, each with the numbers of the stages that use it.

    Args:
        parts: the stages.
    """
    found: dict[int, tuple[StageVariable, list[int]]] = {}
    for part in parts:
        for variable in part.variables:
            found.setdefault(id(variable), (variable, []))[1].append(part.number)
    return list(found.values())


def tied_layers(model: str, parts: Sequence[StagePart]) -> dict[int, tuple[CoreLayer, list[int]]]:
    """Returns the layers with calls in several stages, each with its number of training calls in each stage.

    Args:
        model: name of the model.
        parts: the stages.

    Raises:
        InvalidLayer: such a layer is a model, or has variables that are not trainable: their order would be lost. Or it
            has these or draws numbers, and a part of its calls is in a model within the model.
    """
    _check_inner_layers(model, parts)
    stages: dict[int, Counter[int]] = {}
    layers: dict[int, Any] = {}
    for part in parts:
        for call in part.calls:
            layers[id(call.layer)] = call.layer
            stages.setdefault(id(call.layer), Counter())[part.number] += call.training is not False
    found: dict[int, tuple[CoreLayer, list[int]]] = {}
    for key, counts in stages.items():
        layer = layers[key]
        if len(counts) < 2 or not (layer.weights or layer.layers or isinstance(layer, CoreLayer)):
            continue
        if layer.layers or any(not it.trainable for it in layer.weights):
            where = " and ".join(map(str, counts))
            why = "is a model" if layer.layers else "has variables that each call in training changes"
            raise errors.InvalidLayer(
                f"layer {layer.name} of model {model} is called in the stages {where}, but {why}; choose a cut that "
                "leaves all its calls in one stage"
            )
        if isinstance(layer, CoreLayer):
            found[key] = layer, [counts[part.number] for part in parts]
    return found


def _check_inner_layers(model: str, parts: Sequence[StagePart]) -> None:
    """Checks the layers of models within the model. Their calls are not counted, so their order would be lost."""
    stages: dict[int, set[int]] = {}
    inner: dict[int, Any] = {}
    for part in parts:
        for call in part.calls:
            for layer in call.layer.all_layers():
                stages.setdefault(id(layer), set()).add(part.number)
                if layer is not call.layer:
                    inner[id(layer)] = layer
    for key, layer in inner.items():
        keeps = any(not it.trainable for it in layer.weights) or isinstance(layer, Dropout)
        if len(stages[key]) > 1 and keeps and not layer.layers:
            where = " and ".join(map(str, sorted(stages[key])))
            raise errors.InvalidLayer(
                f"layer {layer.name} of a model within model {model} is called in the stages {where}, but the order of "
                "its calls in training matters; choose a cut that leaves all its calls in one stage"
            )


__all__ = ["StagePart", "parts_of", "tied_layers", "users_of"]
