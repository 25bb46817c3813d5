"""Models as files: the values of their variables, and what is needed to make the layers again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal import errors
from shoal.initializers import Initializer
from shoal_distribute.keras import activations, constraints, initializers
from shoal_distribute.keras import layers as keras_layers
from shoal_distribute.keras.constraints import Constraint
from shoal_distribute.keras.files import read_arrays, write_arrays
from shoal_distribute.keras.layers.base import Layer
from shoal_distribute.keras.names import known_arguments
from shoal_distribute.keras.optimizers import Optimizer
from shoal_distribute.keras.regularizers import L1L2, serialized
from shoal_distribute.keras.saving import get_registered_name
from shoal_distribute.values import DistributedVariable

# What each layer has, also if the constructor of a user's class does not take it.
_OF_ALL = ("name", "trainable", "dtype")


def variables_by_place(layer: Layer, place: str = "", above: Sequence[Layer] = ()) -> dict[str, DistributedVariable]:
    """Returns the variables by their place in a model: "2/kernel" of the third layer.

    Names of layers are left out, because they differ from one model to the next in the same process.

    Args:
        layer: the model or the layer.
        place: what the places begin with.
        above: the layers that hold this one. They are left out if it holds them, too.
    """
    found = {f"{place}{it.name.removeprefix(layer.name + '/')}": it for it in layer.own_variables}
    for number, child in enumerate(layer.layers):
        if not any(child is it for it in (*above, layer)):
            found |= variables_by_place(child, f"{place}{number}/", (*above, layer))
    return found


def values_of(layer: Layer) -> dict[str, np.ndarray]:
    """Returns the values of all variables by their place.

    Raises:
        InvalidLayer: the model is not built.
    """
    _require_built(layer)
    return {place: variable.numpy() for place, variable in variables_by_place(layer).items()}


def set_values(layer: Layer, values: dict[str, np.ndarray], where: str) -> None:
    """Sets all variables.

    Args:
        layer: the model or the layer.
        values: values by place.
        where: what they come from, for messages.

    Raises:
        InvalidLayer: the model is not built.
        IncompatibleCheckpoint: the variables are not those of the model. Nothing has changed.
    """
    _require_built(layer)
    own = variables_by_place(layer)
    for place in sorted({*own} | {*values}):
        has, wants = values.get(place), own.get(place)
        if has is None or wants is None or tuple(wants.shape) != has.shape:
            got = "no variable" if has is None else f"{has.shape}"
            needs = "none" if wants is None else f"{wants.name} of the shape {wants.shape}"
            raise errors.IncompatibleCheckpoint(
                f"{where} has {got} at {place}, but the model {layer.name} has {needs}; load it into the same layers"
            )
    for place, variable in own.items():
        variable.assign(values[place])


def save_weights(model: Any, path: str, overwrite: bool) -> None:
    """Writes the values of a model's variables.

    Args:
        model: the model.
        path: the file.
        overwrite: whether an existing file may be replaced.
    """
    _write(model, path, overwrite, values_of(model), {})


def load_weights(model: Any, path: str) -> None:
    """Sets a model's variables to the values of a file; see `Model.load_weights`."""
    arrays, _ = read_arrays(path)
    set_values(model, {name: it for name, it in arrays.items() if not name.startswith("optimizer/")}, path)


def save_model(model: Any, path: str, overwrite: bool) -> None:
    """Writes a whole model.

    Args:
        model: the model.
        path: the file.
        overwrite: whether an existing file may be replaced.
    """
    description = {"model": described(model)}
    arrays = values_of(model)
    if model.optimizer is not None and (state := _state_of(model.optimizer)):
        places = {it.name: place for place, it in variables_by_place(model).items()}
        arrays |= {f"optimizer/{placed(name, places)}": array for name, array in state.items()}
    _write(model, path, overwrite, arrays, description)


def _state_of(optimizer: Optimizer) -> dict[str, np.ndarray]:
    """Returns the state of an optimizer; nothing if servers keep it, which have checkpoints of their own."""
    try:
        return optimizer.state()
    except errors.WrongContext:
        return {}


def described(layer: Layer) -> dict[str, Any]:
    """Returns what is needed to make a layer or a model again.

    Raises:
        InvalidLayer: a model is of a class of the user, or an argument of a layer cannot be written to a file.
    """
    kind, of_keras = type(layer).__name__, _is_of_keras(layer)
    if not of_keras and hasattr(layer, "fit"):
        raise errors.InvalidLayer(
            f"{layer.name} cannot be saved, because {kind} is no class of keras; use save_weights, then make the "
            "model by code and use load_weights"
        )
    config = layer.get_config()
    if not of_keras:
        known, plain = known_arguments(type(layer)), {it: _plain(layer, it, value) for it, value in config.items()}
        own = {name: value for name, value in plain.items() if name not in _OF_ALL or name in known}
        common = {name: plain[name] for name in _OF_ALL if name in plain and name not in known}
        return {"class": get_registered_name(type(layer)), "of_user": True, "config": own, "common": common}
    if kind == "Sequential":
        shape = layer.sample_shape
        config = {"name": layer.name, "sample_shape": shape, "layers": [described(it) for it in layer.layers]}
    elif kind == "Model":
        config = _described_graph(layer)
    return {"class": kind, "config": {name: _plain(layer, name, value) for name, value in config.items()}}


def _is_of_keras(layer: Layer) -> bool:
    """Returns whether the class of a layer, or of a model with layers, is of this package."""
    kind = type(layer)
    if kind.__name__ in {"Sequential", "Model"}:
        return kind.__module__.startswith(f"{__package__}.") and bool(layer.layers)
    return getattr(keras_layers, kind.__name__, None) is kind


def _described_graph(model: Any) -> dict[str, Any]:
    numbers: dict[int, int] = {id(symbol): number for number, symbol in enumerate(model.inputs)}
    calls: list[dict[str, Any]] = []
    for symbol, call in model.steps():
        numbers[id(symbol)] = len(numbers)
        calls.append(
            {
                "layer": model.layers.index(call.layer),
                "inputs": [numbers[id(it)] for it in call.tensors],
                "several": isinstance(call.inputs, list),
                "training": call.training,
            }
        )
    return {
        "name": model.name,
        "inputs": [{"shape": it.sample_shape, "dtype": it.dtype, "name": it.name} for it in model.inputs],
        "layers": [described(it) for it in model.layers],
        "calls": calls,
        "outputs": [numbers[id(it)] for it in model.outputs],
        "input_names": list(model.input) if isinstance(model.input, dict) else None,
        "several": [isinstance(model.input, list | tuple), isinstance(model.output, list | tuple)],
    }


def _plain(layer: Layer, name: str, value: Any) -> Any:
    if isinstance(value, Initializer):
        return initializers.serialized(value)
    if isinstance(value, L1L2):
        return serialized(value)
    if isinstance(value, Constraint) and (found := constraints.serialized(value)):
        return found
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if callable(value) and name == "activation":
        return activations.name_of(value)
    if isinstance(value, str | int | float | bool | dict | list | tuple | None):
        return value
    raise errors.InvalidLayer(
        f"layer {layer.name} cannot be saved, because its argument {name} is a {type(value).__name__}; use "
        "save_weights, and make the model by code"
    )


def placed(name: str, places: dict[str, str]) -> str:
    """Returns the name of a slot, "variable/slot", with another name of the variable.

    Args:
        name: the name of the slot.
        places: the other names.
    """
    variable, _, slot = name.rpartition("/")
    return f"{places[variable]}/{slot}" if variable in places else name


def _write(model: Any, path: str, overwrite: bool, arrays: dict[str, np.ndarray], description: Any) -> None:
    if not model.strategy.writes_files:
        return
    if not overwrite and Path(path).exists():
        raise errors.StorageFailed(f"{path} exists; give overwrite=True, or another name")
    write_arrays(path, arrays, description)


def _require_built(layer: Layer) -> None:
    if not layer.is_complete:
        raise errors.InvalidLayer(
            f"{layer.name} has no variables yet; give an Input, call build(shape), or call it on a batch"
        )


__all__ = [
    "described",
    "load_weights",
    "placed",
    "save_model",
    "save_weights",
    "set_values",
    "values_of",
    "variables_by_place",
]
