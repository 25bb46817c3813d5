"""Models from files that `Model.save` wrote."""

from collections.abc import Mapping
from typing import Any

from shoal import errors
from shoal_distribute.keras import layers as keras_layers
from shoal_distribute.keras.files import read_arrays
from shoal_distribute.keras.layers.base import Layer
from shoal_distribute.keras.models import saving
from shoal_distribute.keras.models.model import Model
from shoal_distribute.keras.models.sequential import Sequential
from shoal_distribute.keras.names import named
from shoal_distribute.keras.saving import class_of_user
from shoal_distribute.tensor_parallel import DeviceMesh


def load_model(
    filepath: str,
    custom_objects: Mapping[str, Any] | None = None,
    compile: bool = True,
    safe_mode: bool = True,
    *,
    mesh: DeviceMesh | None = None,
) -> Model:
    """Returns the model of a file, in the scope that is in use. It is not compiled.

    The state of the optimizer is set when the model is compiled with the same optimizer. To compile it with another
    one, set `saved_state` of the model to None before.

    Args:
        filepath: a file that `Model.save` wrote.
        custom_objects: classes of your own by name, for layers of them. `register_keras_serializable` makes a class
            known without this.
        compile: accepted for Keras' sake, and ignored: call `compile`.
        safe_mode: accepted for Keras' sake, and ignored: a file has no code.
        mesh: devices of the layers that are split over devices, in any number. None means those of the file.

    Raises:
        UnknownCheckpoint: there is no such file.
        CorruptCheckpoint: the file is of another kind, or damaged.
        InvalidLayer: a layer is of an unknown class.
        DeviceUnavailable: a layer is split over devices that this machine does not have.
    """
    del compile, safe_mode
    arrays, description = read_arrays(filepath)
    if "model" not in description:
        raise errors.CorruptCheckpoint(f"{filepath} has variables only; make the model, and use load_weights")
    model = made(description["model"] if mesh is None else _moved(description["model"], mesh), custom_objects)
    if not isinstance(model, Model):
        raise errors.CorruptCheckpoint(f"{filepath} describes a {type(model).__name__}, which is no model")
    prefix = "optimizer/"
    saving.set_values(model, {name: it for name, it in arrays.items() if not name.startswith(prefix)}, filepath)
    names = {place: variable.name for place, variable in saving.variables_by_place(model).items()}
    state = {}
    for name, array in arrays.items():
        if name.startswith(prefix):
            place, _, slot = name.removeprefix(prefix).rpartition("/")
            state[f"{names[place]}/{slot}" if place else slot] = array
    model.saved_state = state
    return model


def made(description: dict[str, Any], custom_objects: Mapping[str, Any] | None = None) -> Layer:
    """Returns the layer or the model of a description; see `saving.described`.

    Args:
        description: the description.
        custom_objects: see `load_model`.

    Raises:
        InvalidLayer: a layer is of an unknown class.
    """
    kind, config = description["class"], dict(description["config"])
    if description.get("of_user"):
        own: Layer = class_of_user(kind, custom_objects).from_config(config)
        common = description["common"]
        own.name, own.dtype = common.get("name", own.name), common.get("dtype", own.dtype)
        own.trainable = common.get("trainable", own.trainable)
        return own
    if kind == "Sequential":
        shape = config["sample_shape"]
        first = [] if shape is None else [keras_layers.Input(shape)]
        layers = [made(it, custom_objects) for it in config["layers"]]
        return Sequential([*first, *layers], name=config["name"])
    if kind == "Model":
        return _graph(config, custom_objects)
    known = {name: getattr(keras_layers, name) for name in keras_layers.__all__}
    layer: Layer = named("layer", kind, known)(**{name: _tupled(value) for name, value in config.items()})
    return layer


def _moved(description: Any, mesh: DeviceMesh) -> Any:
    """Returns a description whose split layers have another mesh."""
    if isinstance(description, list):
        return [_moved(it, mesh) for it in description]
    if not isinstance(description, dict):
        return description
    moved = {name: _moved(value, mesh) for name, value in description.items()}
    return moved | {"mesh": mesh.description()} if "mesh" in moved else moved


def _graph(config: dict[str, Any], custom_objects: Mapping[str, Any] | None) -> Model:
    inputs = [keras_layers.Input(**given) for given in config["inputs"]]
    parts, symbols = [made(it, custom_objects) for it in config["layers"]], list(inputs)
    for call in config["calls"]:
        fed = [symbols[number] for number in call["inputs"]]
        learns = call.get("training")  # earlier files do not have it
        symbols.append(parts[call["layer"]](fed if call["several"] else fed[0], training=learns))
    outputs = [symbols[number] for number in config["outputs"]]
    several_inputs, several_outputs = config["several"]
    given: Any = inputs if several_inputs else inputs[0]
    if names := config.get("input_names"):  # earlier files do not have it
        given = dict(zip(names, inputs, strict=True))
    return Model(given, outputs if several_outputs else outputs[0], name=config["name"])


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


__all__ = ["load_model", "made"]
