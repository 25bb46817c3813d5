"""Published weights as the values of a model's variables."""

import os
from collections.abc import Iterator, Mapping

import numpy as np

from shoal import errors
from shoal.variables import AggregationName, Variable
from shoal_nn.containers import Sequential
from shoal_nn.layer import Layer, Shape
from shoal_nn.models._parts import STYLES
from shoal_nn.models.weights.files import read_arrays
from shoal_nn.models.weights.naming import Naming, Source, namings
from shoal_nn.normalization import BatchNorm

# The weights of a model do not depend on the size of its images.
_IMAGES = (224, 224, 3)


def load_weights(
    net: Sequential, path: str | os.PathLike[str], *, head: bool = True, shape: Shape = _IMAGES
) -> dict[str, np.ndarray]:
    """Returns the values of a model's variables from a file, by name.

        net = mobilenet_v2()
        values = load_weights(net, "mobilenet_v2-7ebf99e0.pth")

    The file is one that torchvision or Keras publishes, or one with Shoal's names, such as the output of `shoal pull`
    or `shoal export`. Its format is safetensors, .npz, .pth or .h5; docs/how-to/models.md has a table. No format
    runs code of the file.

    Args:
        net: the model, such as `mobilenet_v2()` or `resnet(50)`. For Keras' files, build it with `style="keras"`.
        path: the file.
        head: whether to load the last part too. False suits a head for other classes, and files without a head.
        shape: shape of an image.

    Returns:
        Arrays in the shapes and dtypes of the variables; without those of the last part if `head` is False.

    Raises:
        InvalidData: the file does not exist, is damaged, or does not fit the model.
        InvalidLayer: the weights are of another publisher than the model's style.
        ImportError: it is an HDF5 file, and h5py is not installed.
    """
    last = net.layers[-1][0]
    wanted = {
        name: variable for name, variable in net.variables(shape).items() if head or name.partition("/")[0] != last
    }
    arrays = read_arrays(path)
    naming = _naming_of(arrays, wanted, last, path)
    _check_style(net, naming, path)
    used: set[str] = set()
    values = {
        name: _value(arrays, naming.source(name), name, variable, used, path) for name, variable in wanted.items()
    }
    _check_rest(arrays.keys() - used, naming, net, last, shape, path)
    return values


def pretrained(
    net: Sequential, path: str | os.PathLike[str], shape: Shape, *, head: bool = True
) -> dict[str, Variable]:
    """Returns a model's variables, which start with the values of a file. A program's `variables()` can return them.

    Args:
        net: the model.
        path: the file, as for `load_weights`. The process that submits the job reads it.
        shape: shape of an input sample.
        head: whether to load the last part too. If not, its initializers give its values.

    Raises:
        InvalidData: the file does not exist, is damaged, or does not fit the model.
        InvalidLayer: the weights are of another publisher than the model's style.
        InvalidShape: the model does not accept such samples.
        ImportError: it is an HDF5 file, and h5py is not installed.
    """
    variables = net.variables(shape)
    for name, value in load_weights(net, path, head=head, shape=shape).items():
        like = variables[name]
        aggregation: AggregationName | None = None if like.trainable else _AGGREGATIONS[like.aggregation.name]
        variables[name] = Variable.of(
            value, trainable=like.trainable, aggregation=aggregation, partitioner=like.partitioner
        )
    return variables


_AGGREGATIONS: Mapping[str, AggregationName] = {"MEAN": "mean", "LAST": "last", "SUM": "sum"}


def _naming_of(
    arrays: Mapping[str, np.ndarray], wanted: Mapping[str, Variable], last: str, path: str | os.PathLike[str]
) -> Naming:
    """Returns the naming with which the file has all variables."""

    def missing(naming: Naming) -> list[str]:
        return [name for name in wanted if naming.source(name).find(arrays) is None]

    naming = min(namings(wanted, last), key=lambda each: len(missing(each)))
    lacks = missing(naming)
    if not lacks:
        return naming
    theirs = naming.source(lacks[0]).names[0]
    if all(name.partition("/")[0] == last for name in lacks):
        raise errors.InvalidData(
            f"{path} has no weights for the last part of the model ({theirs}); give head=False "
            "to start it from initial values"
        )
    has = ", ".join(sorted(arrays)[:3])
    raise errors.InvalidData(
        f"{path} lacks {len(lacks)} of the {len(wanted)} arrays of the model, such as {theirs} for {lacks[0]}; it has "
        f"{has or 'nothing'}. Give the file of this model, by torchvision, Keras or Shoal"
    )


def _check_style(net: Layer, naming: Naming, path: str | os.PathLike[str]) -> None:
    """Checks that the model is built as the publisher's. All shapes are the same, so nothing else would tell."""
    style = STYLES.get(naming.publisher)
    epsilons = {layer.epsilon for layer in _within(net) if isinstance(layer, BatchNorm)}
    if style and epsilons and epsilons.isdisjoint(style.epsilons):
        raise errors.InvalidLayer(
            f"{path} has weights of {naming.publisher}, but the model is not built as that of {naming.publisher}; "
            f'build it with style="{naming.publisher}"',
            kind=type(net).__name__,
        )


def _within(layer: Layer) -> Iterator[Layer]:
    """Yields a layer and all layers in it."""
    yield layer
    if (inner := getattr(layer, "layer", None)) is not None:
        yield from _within(inner)
    for _, child in getattr(layer, "layers", ()):
        yield from _within(child)


def _value(
    arrays: Mapping[str, np.ndarray],
    source: Source,
    name: str,
    variable: Variable,
    used: set[str],
    path: str | os.PathLike[str],
) -> np.ndarray:
    found = source.find(arrays)
    assert found is not None  # `_naming_of` has checked it
    array = source.layout(arrays[found])
    used.add(found)
    if array.shape != variable.shape:
        raise errors.InvalidData(
            f"{path} has {found} for {name} in the shape {array.shape}, but the model has {variable.shape}; build the "
            "model as it was published (classes, width, depth), or give head=False if only the last part differs"
        )
    if (bias := next((it for it in source.minus if it in arrays), None)) is not None:
        used.add(bias)
        array = array - arrays[bias]
    return np.ascontiguousarray(array, variable.dtype)


def _check_rest(
    rest: set[str], naming: Naming, net: Sequential, last: str, shape: Shape, path: str | os.PathLike[str]
) -> None:
    """Checks that no array of the file is left over: it would be a deeper model's."""
    variables = net.variables(shape)
    allowed = {it for name in variables if name.partition("/")[0] == last for it in naming.source(name).names}
    if naming.publisher == "shoal":  # another head may be there
        parts = {name.partition("/")[0] for name in variables}
        allowed |= {name for name in rest if name.partition("/")[0] not in parts}
    over = sorted(name for name in rest - allowed if not name.endswith("num_batches_tracked"))
    if over:
        raise errors.InvalidData(
            f"{path} has {len(over)} arrays that the model does not use, such as {over[0]}; it is of another model: "
            "build the model as it was published"
        )


__all__ = ["load_weights", "pretrained"]
