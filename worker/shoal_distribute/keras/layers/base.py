"""Base class of the Keras-shaped layers."""

import functools
import inspect
import itertools
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from shoal import errors
from shoal_distribute.keras import config, regularizers
from shoal_distribute.keras.layers.own_weights import OwnWeights
from shoal_distribute.keras.layers.symbolic import KerasTensor, SymbolicCall, shapes_of
from shoal_distribute.keras.names import Refused, snake_case, unique_name
from shoal_distribute.keras.tensor import Tensor, array_of, recorded
from shoal_distribute.replica_context import current_replica
from shoal_distribute.strategies import get_strategy
from shoal_distribute.values import DistributedVariable
from shoal_nn.layer import Shape

_numbers = itertools.count()
_OURS = f"{__package__}."
_here = threading.local()  # "training": whether the layer that this thread calls acts as in training; None outside


class Layer(OwnWeights):
    """Layer of a model: its settings, and its variables once it is built for the shape of its samples.

    A call on a symbolic tensor builds the layer and returns another symbolic tensor. A call on an array or a `Tensor`
    computes. Some layers take a list of them.

    A subclass may define `call`, with an argument `training` or without, make variables by `add_weight`, and keep its
    layers as attributes, also in lists, tuples and dicts. Layers that are called within act as in training if the outer
    one does, unless they get another `training`.

    Args:
        name: its name. None makes one from the class, such as "dense_1".
        trainable: whether its variables get gradients. A `BatchNormalization` that is not trainable also acts as in
            evaluation.
        dtype: dtype that it computes in and keeps its variables in. None means `keras.config.floatx()`.
        input_shape: shape of a sample, for the first layer of a `Sequential`.
        activity_regularizer: name, object or function: the penalty of the outputs, divided by the samples of the batch.

    Attributes:
        name: its name.
        dtype: its dtype.
        built: whether the variables exist.
        strategy: the strategy in whose scope it was made.
        joins_replicas: whether a call in training joins sums of all replicas, so that each replica has to make it.
    """

    joins_replicas = False
    refused: ClassVar[Refused] = {"autocast": (True, "inputs are always cast to the dtype of the layer")}

    def __init__(
        self,
        *,
        name: str | None = None,
        trainable: bool = True,
        dtype: str | None = None,
        input_shape: Sequence[int] | None = None,
        activity_regularizer: Any = None,
    ) -> None:
        super().__init__()
        self.name = name or unique_name(snake_case(type(self).__name__))
        self.dtype = dtype or config.floatx()
        self.sample_shape = None if input_shape is None else tuple(input_shape)
        self.built = False
        self.strategy = get_strategy()
        self.activity_regularizer = regularizers.get(activity_regularizer)
        self._trainable = trainable
        self._symbols: tuple[Any, Any] | None = None  # of its first call on symbolic tensors: inputs and output
        self._added: dict[int, list[Tensor]] = {}  # by replica: the losses of its last call

    @property
    def trainable(self) -> bool:
        """Whether the variables get gradients."""
        return self._trainable

    @trainable.setter
    def trainable(self, value: bool) -> None:
        for layer in list(self.all_layers()):
            layer._trainable = bool(value)

    @property
    def layers(self) -> "list[Layer]":
        """The layers that it is made of: its attributes, also in lists, tuples and dicts."""
        if type(self).__module__.startswith(_OURS):  # they keep none, and each step asks each layer
            return []
        return list(dict.fromkeys(_layers_in(vars(self))))

    @property
    def input(self) -> Any:
        """The symbolic tensor that it was first called on, or a list of them."""
        return self._first_call()[0]

    @property
    def output(self) -> Any:
        """The symbolic tensor that its first call on one returned: `Model(model.input, layer.output)`."""
        return self._first_call()[1]

    @property
    def input_shape(self) -> Any:
        """The shape of its symbolic input, or a list of them; None stands for the batch."""
        return shapes_of(self.input)

    @property
    def output_shape(self) -> Any:
        """The shape of its symbolic output; None stands for the batch."""
        return shapes_of(self.output)

    @property
    def is_complete(self) -> bool:
        """Whether it and all layers in it are built, so that all variables exist."""
        return all(layer.built for layer in self.all_layers())

    @property
    def weights(self) -> list[DistributedVariable]:
        """All variables, in Keras' order."""
        return list(dict.fromkeys(variable for layer in self.all_layers() for variable in layer.own_variables))

    @property
    def trainable_variables(self) -> list[DistributedVariable]:
        """The variables that get gradients."""
        own = (variable for layer in self.all_layers(trained=True) for variable in layer.own_variables)
        return list(dict.fromkeys(variable for variable in own if variable.trainable))

    @property
    def non_trainable_variables(self) -> list[DistributedVariable]:
        """The other variables."""
        trained = {id(variable) for variable in self.trainable_variables}
        return [variable for variable in self.weights if id(variable) not in trained]

    @property
    def variables(self) -> list[DistributedVariable]:
        """All variables."""
        return self.weights

    @property
    def trainable_weights(self) -> list[DistributedVariable]:
        """The variables that get gradients."""
        return self.trainable_variables

    @property
    def non_trainable_weights(self) -> list[DistributedVariable]:
        """The other variables."""
        return self.non_trainable_variables

    @property
    def losses(self) -> list[Tensor]:
        """The penalties that `fit` adds to the loss.

        These are what the last call has passed to `add_loss`, such as the penalties of activities, and the penalties
        of the weights that get gradients. A tape follows what is read within it.
        """
        trained = {id(it) for it in self.trainable_variables}
        return self.added_losses + [loss for part in self.all_layers() for loss in part._weight_losses(trained)]

    @property
    def added_losses(self) -> list[Tensor]:
        """What the last call has passed to `add_loss`, such as the penalties of activities."""
        number = _replica_number()
        return [loss for part in self.all_layers() for loss in part._added.get(number, ())]

    def add_loss(self, loss: Tensor | Sequence[Tensor]) -> None:
        """Adds to the losses of this call. The `call` of a layer uses it.

        Args:
            loss: one number, or a list of them.
        """
        added = list(loss) if isinstance(loss, list | tuple) else [loss]
        self._added.setdefault(_replica_number(), []).extend(map(as_tensor, added))

    def get_weights(self) -> list[np.ndarray]:
        """Returns the values of all variables, on the host."""
        return [variable.numpy() for variable in self.weights]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets the values of all variables.

        Args:
            weights: arrays, in the order of `weights`.

        Raises:
            InvalidShape: their number or a shape differs.
        """
        own = self.weights
        if len(weights) != len(own):
            raise errors.InvalidShape(
                f"{self.name} has {len(own)} variables, but set_weights got {len(weights)} arrays; build the model "
                "first, and give an array for each variable"
            )
        for variable, value in zip(own, weights, strict=True):
            given = np.asarray(value)
            if given.shape != tuple(variable.shape):
                raise errors.InvalidShape(
                    f"{variable.name} has the shape {variable.shape}, but set_weights got {given.shape}"
                )
            variable.assign(given)

    def count_params(self) -> int:
        """Returns the number of elements of all variables."""
        return sum(int(np.prod(variable.shape)) for variable in self.weights)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make the same layer again, with its name."""
        return {**self.arguments(), "name": self.name, "trainable": self.trainable, "dtype": self.dtype}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Layer":
        """Returns the layer of the arguments that `get_config` returned."""
        return cls(**config)

    def build(self, shape: Any) -> None:  # noqa: ARG002 - layers without variables
        """Makes the variables, in the scope that the layer was made in.

        Args:
            shape: shape of a sample, or a list of them.
        """
        self.built = True

    def compute_output_shape(self, shape: Any) -> Any:
        """Returns the shape of an output sample for an input sample's, or for a list of them.

        A subclass may define it. By default, the layer computes the output for a sample of zeros.
        """
        zeros = [np.zeros((1, *it), self.dtype) for it in (shape if isinstance(shape, list) else [shape])]
        return self(zeros if isinstance(shape, list) else zeros[0], training=False).shape[1:]

    @abstractmethod
    def call(self, inputs: Any, training: bool = False) -> Any:
        """Computes.

        Args:
            inputs: a `Tensor`, or a list of them.
            training: whether to act as in training.
        """
        raise NotImplementedError

    def __call__(self, inputs: Any, training: bool | None = None) -> Any:
        parts = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
        if any(isinstance(part, KerasTensor) for part in parts):
            return self._called_on_symbols(parts if isinstance(inputs, list | tuple) else inputs, training)
        several = isinstance(inputs, list | tuple) and all(hasattr(part, "dtype") for part in parts)
        tensors: Any
        if isinstance(inputs, dict):
            tensors = {name: as_tensor(it) for name, it in inputs.items()}
        else:
            tensors = [as_tensor(it) for it in inputs] if several else as_tensor(inputs)
        if not self.built:
            self._build_once(_sample_shapes(tensors))
        outer = getattr(_here, "training", None)
        if outer is None:
            for layer in self.all_layers():
                layer._added.pop(_replica_number(), None)
        _here.training = bool(outer if training is None else training)
        try:
            return self._called(tensors, training=_here.training)
        finally:
            _here.training = outer

    def _called(self, tensors: Any, *, training: bool) -> Any:
        outputs = self.call(tensors, training=training) if _takes_training(type(self).call) else self.call(tensors)
        if self.activity_regularizer is not None:
            for output in outputs if isinstance(outputs, list | tuple) else [outputs]:
                self.add_loss(self.activity_regularizer(output) / max(len(output), 1))
        return outputs

    def all_layers(self, *, trained: bool = False) -> "Iterator[Layer]":
        """Yields the layer itself and all layers in it, each once. A layer may also hold the one that holds it.

        Args:
            trained: whether to leave out layers that are not trainable, with the layers in them.
        """
        seen, todo = set(), [self]
        while todo:
            layer = todo.pop()
            if id(layer) not in seen and (layer.trainable or not trained):
                seen.add(id(layer))
                yield layer
                todo += reversed(layer.layers)

    def _called_on_symbols(self, inputs: Any, training: bool | None) -> Any:
        parts = inputs if isinstance(inputs, list) else [inputs]
        if not all(isinstance(part, KerasTensor) for part in parts):
            raise errors.InvalidLayer(f"layer {self.name} was called on symbolic tensors and arrays; give one kind")
        shape = [part.sample_shape for part in parts] if isinstance(inputs, list) else inputs.sample_shape
        output = self.compute_output_shape(shape)
        self._build_once(shape)
        made = KerasTensor(output, self.dtype, SymbolicCall(self, inputs, next(_numbers), training), self.name)
        self._symbols = self._symbols or (inputs, made)
        return made

    def _first_call(self) -> tuple[Any, Any]:
        if self._symbols is None:
            raise AttributeError(
                f"layer {self.name} has no input and no output, because it was not called on a symbolic tensor; make "
                "the model of keras.Input, or build it"
            )
        return self._symbols

    def _build_once(self, shape: Any) -> None:
        if self.built:
            return
        replica = current_replica()
        if replica is None or replica.strategy.local_replicas == 1:
            self.build(shape)
        else:  # all replicas arrive here; one of them makes the variables of all
            replica.merge_call(lambda _: self.build(shape))
        self.built = True


@functools.cache
def _takes_training(call: Callable[..., Any]) -> bool:
    """Returns whether the `call` of a class takes an argument `training`."""
    parameters = inspect.signature(call).parameters
    return "training" in parameters or any(it.kind is it.VAR_KEYWORD for it in parameters.values())


def _layers_in(held: Any) -> Iterator[Layer]:
    """Yields the layers among values, also in lists, tuples and dicts. A layer can come more than once."""
    for value in list(held.values() if isinstance(held, dict) else held):  # another replica may add to it meanwhile
        if isinstance(value, Layer):
            yield value
        elif isinstance(value, list | tuple | dict):
            yield from _layers_in(value)


def _sample_shapes(tensors: Any) -> Any:
    if isinstance(tensors, dict):
        return {name: it.shape[1:] for name, it in tensors.items()}
    return [it.shape[1:] for it in tensors] if isinstance(tensors, list) else tensors.shape[1:]


def _replica_number() -> int:
    """Returns the number in this process of the replica that this thread runs; 0 outside of `run`."""
    replica = current_replica()
    return replica.local_replica if replica else 0


def as_tensor(value: Any) -> Tensor:
    """Returns a value as a tensor, on the device of the replica that runs."""
    if isinstance(value, Tensor):
        return value
    array = array_of(value)
    if not hasattr(array, "dtype"):
        array = np.asarray(array)
        array = array.astype(config.floatx()) if array.dtype == np.float64 else array
    replica = current_replica()
    return Tensor(replica.device.put(array) if replica else array)


def cast(x: Tensor, dtype: str) -> Tensor:
    """Returns a tensor in another dtype. Its gradient is cast back."""
    before = x.dtype
    if before == dtype:
        return x
    return recorded(x.array.astype(dtype), (x,), lambda dy: [dy.astype(before) if before.kind == "f" else None])


__all__ = ["KerasTensor", "Layer", "Shape", "SymbolicCall", "as_tensor", "cast"]
