"""Functional models, and the base class of all models."""

from typing import Any

from shoal import errors
from shoal_distribute.keras.layers.base import KerasTensor, Layer, SymbolicCall
from shoal_distribute.keras.models import saving
from shoal_distribute.keras.models.summary import summary_of
from shoal_distribute.keras.names import advice
from shoal_distribute.keras.tensor import Tensor
from shoal_distribute.keras.training.trainer import Trainer


class Model(Trainer, Layer):
    """Model of layers that were called on symbolic tensors.

        inputs = keras.Input((28, 28, 1))
        x = keras.layers.Conv2D(16, 3, activation="relu")(inputs)
        outputs = keras.layers.Dense(10)(keras.layers.Flatten()(x))
        model = keras.Model(inputs, outputs)

    A subclass may instead define `call`, and keep its layers as attributes: see `Layer`.

    Args:
        inputs: what `Input` returned, or a list or dict of such tensors. Then `fit` and calls take the same. A list
            can also be given as a dict by the names of the inputs. A subclass with a `call` of its own has none.
        outputs: the symbolic tensors that the model computes: one, or a list.
        **kwargs: see `Layer`.

    Raises:
        InvalidLayer: the outputs depend on an input that is missing, or two layers have the same name.
    """

    def __init__(self, inputs: Any = None, outputs: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if isinstance(outputs, dict):
            raise errors.InvalidLayer(
                f"the outputs of model {self.name} are a dict; give one tensor, or a list of them"
            )
        self._inputs, self._outputs = inputs, outputs
        self._calls = [] if inputs is None else calls_between(_listed(inputs), _listed(outputs))
        if inputs is not None:
            self._check_names()
            self.built = True

    def __call__(self, inputs: Any, training: bool | None = None) -> Any:
        if isinstance(inputs, dict) and self._inputs is not None:
            inputs = self.listed_inputs(inputs)
        return super().__call__(inputs, training)

    @property
    def layers(self) -> list[Layer]:
        if self._inputs is not None:
            first = [it.input_layer for it in self.inputs if it.input_layer is not None]
            return list(dict.fromkeys([*first, *(call.layer for call in self._calls)]))
        return super().layers

    @property
    def inputs(self) -> list[KerasTensor]:
        """The symbolic inputs."""
        return [] if self._inputs is None else _listed(self._inputs)

    @property
    def outputs(self) -> list[KerasTensor]:
        """The symbolic outputs."""
        return [] if self._outputs is None else _listed(self._outputs)

    @property
    def input(self) -> Any:
        """The symbolic input, or a list or dict of them."""
        return self._inputs

    @property
    def output(self) -> Any:
        """The symbolic output, or a list of them."""
        return self._outputs

    def get_layer(self, name: str | None = None, index: int | None = None) -> Layer:
        """Returns a layer.

        Args:
            name: its name.
            index: its number, instead of the name.

        Raises:
            BadRequest: there is no layer of this name.
        """
        if index is not None:
            return self.layers[index]
        by_name = {layer.name: layer for layer in self.layers}
        if name not in by_name:
            raise errors.BadRequest(f"model {self.name} has no layer {name!r}; {advice(str(name), by_name)}")
        return by_name[name]

    def compute_output_shape(self, shape: Any) -> Any:
        if not isinstance(self._outputs, KerasTensor):
            raise errors.InvalidLayer(
                f"model {self.name} has {len(self.outputs)} outputs, so it cannot be a layer of another model"
            )
        given = shape if isinstance(shape, list) else [shape]
        if [tuple(it) for it in given] != [it.sample_shape for it in self.inputs]:
            wants = ", ".join(str(it.sample_shape) for it in self.inputs)
            raise errors.InvalidShape(f"model {self.name} got samples of the shape {shape}, but needs {wants}")
        return self._outputs.sample_shape

    def call(self, inputs: Any, training: bool = False) -> Any:
        if self._inputs is None:
            raise errors.InvalidLayer(f"model {self.name} has no inputs; give inputs and outputs, or define call()")
        given = self.checked_inputs(self.listed_inputs(inputs))
        values = {id(symbol): value for symbol, value in zip(self.inputs, given, strict=True)}
        for symbol, call in self.steps():
            fed: Any = [values[id(it)] for it in call.tensors]
            learns = training if call.training is None else call.training
            values[id(symbol)] = call.layer(fed if isinstance(call.inputs, list) else fed[0], training=learns)
        found = [values[id(symbol)] for symbol in self.outputs]
        return found if isinstance(self._outputs, list | tuple) else found[0]

    def checked_inputs(self, inputs: list[Tensor]) -> list[Tensor]:
        """Returns the inputs of a batch.

        Raises:
            InvalidShape: they do not fit the symbolic inputs.
        """
        if len(inputs) != len(self.inputs):
            raise errors.InvalidShape(f"model {self.name} got {len(inputs)} inputs, but has {len(self.inputs)}")
        for symbol, value in zip(self.inputs, inputs, strict=True):
            if value.shape[1:] != symbol.sample_shape:
                raise errors.InvalidShape(
                    f"model {self.name} got samples of the shape {value.shape[1:]} for the input {symbol.name}, but "
                    f"needs {symbol.sample_shape}; reshape the data, or change Input"
                )
        return inputs

    def listed_inputs(self, given: Any) -> list[Any]:
        """Returns the inputs of a batch as a list: what is given, or what a dict has by the names of the inputs.

        Raises:
            InvalidData: the names are not those of the inputs.
        """
        if not isinstance(given, dict):
            return list(given) if isinstance(given, list | tuple) else [given]
        names = list(self._inputs) if isinstance(self._inputs, dict) else [it.name for it in self.inputs]
        if set(given) != set(names):
            raise errors.InvalidData(
                f"model {self.name} got the inputs {', '.join(map(str, given)) or 'of an empty dict'}, but needs "
                f"{', '.join(names)}"
            )
        return [given[name] for name in names]

    def steps(self) -> list[tuple[KerasTensor, SymbolicCall]]:
        """Returns the calls of layers, each with the symbolic tensor that it computes."""
        symbols = [*self.outputs, *(it for call in self._calls for it in call.tensors)]
        computed = {symbol.call.number: symbol for symbol in symbols if symbol.call}
        return [(computed[call.number], call) for call in self._calls]

    def summary(self, line_length: int | None = None, *, print_fn: Any = None) -> None:
        """Writes a table of the layers, their output shapes and their numbers of parameters.

        Args:
            line_length: width of the table; None means 80.
            print_fn: what is called with the text; None means standard output.
        """
        summary_of(self, line_length or 80, print_fn)

    def save_weights(self, filepath: str, overwrite: bool = True) -> None:
        """Writes the values of all variables.

        Args:
            filepath: the file.
            overwrite: whether an existing file may be replaced.

        Raises:
            StorageFailed: the file exists, or cannot be written.
        """
        saving.save_weights(self, filepath, overwrite)

    def load_weights(self, filepath: str) -> None:
        """Sets all variables to the values of a file that `save_weights` or `save` has written.

        Args:
            filepath: the file.

        Raises:
            UnknownCheckpoint: there is no such file.
            CorruptCheckpoint: the file is of another kind, or damaged.
            IncompatibleCheckpoint: the variables are not those of this model.
        """
        saving.load_weights(self, filepath)

    def save(self, filepath: str, overwrite: bool = True) -> None:
        """Writes the layers, the variables and the state of the optimizer. `keras.models.load_model` reads them.

        Args:
            filepath: the file.
            overwrite: whether an existing file may be replaced.

        Raises:
            InvalidLayer: a layer cannot be described, such as a `WrappedLayer`, or one of a class of your own.
            StorageFailed: the file exists, or cannot be written.
        """
        saving.save_model(self, filepath, overwrite)

    def _check_names(self) -> None:
        names = [layer.name for layer in self.layers]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise errors.InvalidLayer(f"model {self.name} has more than one layer {twice[0]!r}; give each its own name")


def calls_between(inputs: list[KerasTensor], outputs: list[KerasTensor]) -> list[SymbolicCall]:
    """Returns the calls that compute the outputs from the inputs, in an order in which they can be made.

    Args:
        inputs: the symbolic inputs.
        outputs: the symbolic outputs.

    Raises:
        InvalidLayer: an output depends on another input.
    """
    known = {id(it) for it in inputs}
    found: dict[int, SymbolicCall] = {}
    todo = [it for it in outputs if id(it) not in known]
    while todo:
        symbol = todo.pop()
        if symbol.call is None:
            raise errors.InvalidLayer(f"an output depends on the input {symbol.name!r}, which is not among the inputs")
        if symbol.call.number in found:
            continue
        found[symbol.call.number] = symbol.call
        todo += [it for it in symbol.call.tensors if id(it) not in known]
    return [found[number] for number in sorted(found)]


def _listed(tensors: Any) -> list[KerasTensor]:
    if isinstance(tensors, dict):
        tensors = list(tensors.values())
    listed = list(tensors) if isinstance(tensors, list | tuple) else [tensors]
    for each in listed:
        if not isinstance(each, KerasTensor):
            raise errors.InvalidLayer(
                f"Model got {each!r}; inputs are what keras.Input returns, and outputs what layers called on it return"
            )
    return listed


__all__ = ["Model", "calls_between"]
