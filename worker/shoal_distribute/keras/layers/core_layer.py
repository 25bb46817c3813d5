"""Base class of the layers that a pure layer of shoal_nn computes."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

import shoal_nn
from shoal._numerics import random_streams
from shoal.initializers import fill
from shoal.program import Array
from shoal_distribute.keras import config, constraints, initializers, regularizers
from shoal_distribute.keras.layers.base import Layer, Shape, cast
from shoal_distribute.keras.layers.forward_pass import TrainingCall, current_pass
from shoal_distribute.keras.layers.weight_attribute import WeightAttribute
from shoal_distribute.keras.tensor import Tensor, is_recorded, recorded, tensor_of
from shoal_distribute.replica_context import current_replica
from shoal_distribute.values import DistributedVariable
from shoal_nn.layer import TrainingContext
from shoal_worker.arrays import namespace_of


@dataclass(frozen=True)
class WeightArguments:
    """Arguments of a layer for one of its variables.

    Attributes:
        initializer: its name or the object.
        regularizer: its name, the object or a function; None means none.
        constraint: as `regularizer`.
    """

    initializer: Any
    regularizer: Any = None
    constraint: Any = None


class CoreLayer(Layer):
    """Base class of layers that one pure layer of shoal_nn computes, with an activation behind it.

    Args:
        found: the arguments for variables, by their names in shoal_nn.
        **kwargs: see `Layer`.
    """

    # Keras' names of the variables whose names differ in shoal_nn.
    weight_names: ClassVar[Mapping[str, str]] = {}
    takes_integers: ClassVar[bool] = False

    kernel, bias = WeightAttribute(), WeightAttribute()
    gamma, beta = WeightAttribute(), WeightAttribute()
    moving_mean, moving_variance = WeightAttribute(), WeightAttribute()
    embeddings = WeightAttribute()

    def __init__(self, found: Mapping[str, WeightArguments] | None = None, /, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        given = found or {}
        self._initializers = {name: initializers.get(it.initializer) for name, it in given.items()}
        self._regularizers = {name: regularizers.get(it.regularizer) for name, it in given.items()}
        self._constraints = {name: constraints.get(it.constraint) for name, it in given.items()}
        self._variables: dict[str, DistributedVariable] = {}  # by their names in shoal_nn, in Keras' order
        self._shapes: dict[str, Shape] = {}  # in shoal_nn
        self._constants: dict[str, np.ndarray] = {}
        self._steps: dict[int, int] = {}  # by replica: its steps of training, which have a seed each
        self._seed = config.next_seed()

    @abstractmethod
    def core(self) -> shoal_nn.Layer:
        """Returns the pure layer."""
        raise NotImplementedError

    def activated(self) -> shoal_nn.Layer | None:
        """Returns the pure layer of the activation; None without one."""
        return None

    def stored_shape(self, _name: str, shape: Shape, /) -> Shape:
        """Returns the shape in which a variable is kept: Keras', for a name and a shape of shoal_nn."""
        return shape

    def create_variable(self, _name: str, full: str, values: np.ndarray, /, *, trainable: bool) -> DistributedVariable:
        """Returns a new variable.

        Args:
            _name: its name in shoal_nn.
            full: its own name.
            values: its initial value.
            trainable: whether it gets gradients.
        """
        return self.strategy.create_variable(full, values, trainable=trainable)

    def constants(self, _shape: Shape, /) -> dict[str, np.ndarray]:
        """Returns the values of the pure layer's variables that this layer does not have, by name."""
        return {}

    def variable_named(self, name: str) -> DistributedVariable | None:
        """Returns the variable with this name of Keras', such as "kernel"; None if there is none."""
        return next((it for own, it in self._variables.items() if self.weight_names.get(own, own) == name), None)

    @property
    def own_variables(self) -> list[DistributedVariable]:
        return [*self._variables.values(), *super().own_variables]

    def build(self, shape: Shape) -> None:
        self._constants = {name: values.astype(self.dtype) for name, values in self.constants(shape).items()}
        for name, described in self.core().variables(shape).items():
            self._shapes[name] = tuple(described.shape)
            if name in self._constants:
                continue
            stored = self.stored_shape(name, tuple(described.shape))
            values = np.empty(stored, self.dtype)
            initializer = self._initializers.get(name) or described.initializer
            fill(values.reshape(-1), initializer, name, stored, config.next_seed())
            full = f"{self.name}/{self.weight_names.get(name, name)}"
            constraint = self._applied_constraint(self._constraints.get(name), self.weight_names.get(name, name))
            made = self._variables[name] = self.create_variable(name, full, values, trainable=described.trainable)
            made.constraint = constraint
        self.built = True

    def compute_output_shape(self, shape: Shape) -> Shape:
        found: Shape = self.core().output_shape(shape)
        return found

    def call(self, inputs: Tensor, training: bool = False) -> Tensor:
        x = inputs if self.takes_integers else cast(inputs, self.dtype)
        core: Any = self.core()
        if getattr(core, "input_gradient", False) and not is_recorded(x):
            core = replace(core, input_gradient=False)  # nobody asks for the gradient with respect to the data
        learns = training and (self.trainable or not self._variables)  # random layers act when others are frozen, too
        arrays = {name: it.read().reshape(self._shapes[name]) for name, it in self._variables.items()}
        xp = namespace_of(next(iter(arrays.values()), x.array))
        arrays |= {name: xp.asarray(values) for name, values in self._constants.items()}
        given = x.array if namespace_of(x.array) is xp else xp.asarray(x.array)
        context, state, changes = self._context(learns, arrays)
        y, after, pull = core.apply(arrays, {**arrays, **state}, given, context)
        if changes:
            for name, value in after.items():  # some pure layers return all variables if a batch changes none
                if not self._variables[name].trainable:
                    self._variables[name].assign(value)
        trained = self.trained_variables()

        def pullback(dy: Array) -> list[Array | None]:
            gradients, dx = pull(dy)
            return [dx, *(gradients[name].reshape(it.shape) for name, it in trained.items())]

        output = recorded(y, (x, *trained.values()), pullback)
        activation = self.activated()
        return output if activation is None else applied(activation, output)

    def _weight_losses(self, trained: set[int]) -> list[Tensor]:
        found = super()._weight_losses(trained)
        for name, variable in self._variables.items():
            penalty = self._regularizers.get(name)
            if penalty is not None and id(variable) in trained:
                found.append(penalty(tensor_of(variable)))
        return found

    def trained_variables(self) -> dict[str, DistributedVariable]:
        """Returns the variables that get gradients, by their names in shoal_nn."""
        return {name: it for name, it in self._variables.items() if it.trainable and self.trainable}

    @property
    def training_calls(self) -> int:
        """The number of calls in training so far, by the first replica. Each has a seed of its own."""
        return self._steps.get(0, -1) + 1

    @training_calls.setter
    def training_calls(self, count: int) -> None:
        self._steps[0] = count - 1

    @property
    def drawn_seed(self) -> int:
        """The seed of what its calls in training draw."""
        return self._seed

    @drawn_seed.setter
    def drawn_seed(self, seed: int) -> None:
        self._seed = seed

    def _context(self, learns: bool, arrays: Mapping[str, Array]) -> tuple[Any, Mapping[str, Array], bool]:
        """Returns the context of a call, state that replaces the present one, and whether the call changes the state.

        A training step has a seed of its own. In evaluation, the context is False.
        """
        if not learns:
            return False, {}, False
        computed = current_pass()
        if computed is None:
            return self._next_context(None), {}, True
        state = {name: arrays[name] for name, it in self._variables.items() if not it.trainable}
        call = computed.training_call(lambda: TrainingCall(self._next_context(computed.number(self)), state))
        return call.context, call.state, computed.changes_state

    def _next_context(self, chosen: int | None) -> TrainingContext:
        replica = current_replica()
        number = replica.replica_id_in_sync_group if replica else 0
        if chosen is None:
            chosen = self._steps[number] = self._steps.get(number, -1) + 1
        return TrainingContext(random_streams.key_of(self._seed, f"{number}/{chosen}") % 2**63)


class WrappedLayer(CoreLayer):
    """Any layer of `shoal_nn` as a layer of a model, such as one of `shoal_nn.models`.

    Args:
        wrapped: the layer.
        values: initial values of its variables by name, such as those of `shoal_nn.models.load_weights`. The other
            variables have initial values of their own.
        **kwargs: see `Layer`.
    """

    def __init__(self, wrapped: shoal_nn.Layer, values: Mapping[str, np.ndarray] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._wrapped, self._values = wrapped, values or {}

    def core(self) -> shoal_nn.Layer:
        return self._wrapped

    def build(self, shape: Shape) -> None:
        super().build(shape)
        for name, value in self._values.items():
            self._variables[name].assign(value)


def applied(layer: shoal_nn.Layer, x: Tensor) -> Tensor:
    """Returns what a pure layer without variables computes from a tensor."""
    y, _, pull = layer.apply({}, {}, x.array, False)
    return recorded(y, (x,), lambda dy: [pull(dy)[1]])


__all__ = ["CoreLayer", "WeightArguments", "WrappedLayer", "applied"]
