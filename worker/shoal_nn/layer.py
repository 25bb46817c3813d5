"""Interface of layers: pure functions from parameters and inputs to outputs, with pullbacks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from shoal import errors, initializers
from shoal._numerics import random_streams
from shoal.initializers import Initializer
from shoal.program import Array
from shoal.variables import Variable
from shoal_nn._ops import is_float
from shoal_nn._shape_errors import shape_error
from shoal_worker.arrays import Namespace

# Lengths of the axes of a sample or an array. Shapes of a model leave out the batch.
Shape = tuple[int, ...]
# Shape of a layer's input: a Shape, or a Mapping of Shapes by feature (`ByFeature`). No type describes both.
LayerInput = Any
# Arrays of a layer by name. Names in a container begin with the child's name: "conv1/kernel".
Values = Mapping[str, Array]
Pullback = Callable[[Array], tuple[dict[str, Array], Array]]
"""The function that a layer's forward pass returns for its backward pass.

It takes dy, the gradient of a loss with respect to the layer's output, in the output's shape and dtype. It returns two
values: the gradients with respect to the parameters, with their names, shapes and dtypes; and dx, the gradient with
respect to the input, in the input's shape and dtype, or None.
"""


class PartwisePullback:
    """Pullback that computes gradients part by part, the last part first.

    Args:
        parts: takes dy, yields each part's gradients, and returns dx.
    """

    def __init__(self, parts: Callable[[Array], Generator[dict[str, Array], None, Array]]) -> None:
        self._parts = parts

    def __call__(self, dy: Array) -> tuple[dict[str, Array], Array]:
        found: dict[str, Array] = {}
        parts = self._parts(dy)
        while True:
            try:
                found |= next(parts)
            except StopIteration as end:
                return found, end.value

    def one_by_one(self, dy: Array) -> Iterator[tuple[str, Array]]:
        """Yields the gradients of each part as soon as they are computed."""
        for part in self._parts(dy):
            yield from part.items()


def one_by_one(pullback: Pullback, dy: Array) -> Iterator[tuple[str, Array]]:
    """Yields a pullback's gradients by name, so that they can be pushed while others are computed.

    A `shoal.StepOutput` takes the result. A `Sequential` yields the gradients of one layer after the other, the last
    layer first. Other layers yield all gradients at the end.
    """
    return pullback.one_by_one(dy) if isinstance(pullback, PartwisePullback) else iter(pullback(dy)[0].items())


@dataclass(frozen=True, slots=True)
class TrainingContext:
    """Context of a training step: it tells a layer to act as in training, and seeds its random numbers.

    Args:
        seed: the batch's seed, in [0, 2**64), as given to a `shoal.program.RandomProgram`.
        path: path of the layer in the model. Each layer draws from a random stream of its own.
    """

    seed: int
    path: str = ""

    def under(self, name: str) -> "TrainingContext":
        """Returns the context of the child with this name."""
        return TrainingContext(self.seed, _joined(self.path, name))

    def generator(self, xp: Namespace) -> Any:
        """Returns a random generator of the array namespace, determined by the seed and the path.

        NumPy and CuPy draw different numbers from the same seed.
        """
        key = random_streams.key_of(self.seed, self.path)
        if xp is np:
            return np.random.default_rng(key)
        # Each layer creates a generator at each step. CuPy's default, XORWOW, is slow to create; Philox is not.
        return xp.random.Generator(xp.random.Philox4x3210(key))


# False means evaluation.
Train = TrainingContext | Literal[False]


class Layer(ABC):
    """Function with parameters. A layer is a frozen dataclass of settings and holds no arrays.

    A layer computes in the dtype of its input, whatever the dtype of its parameters. Sums of 16-bit floats are computed
    in float32. A layer never changes its arguments. It may return its input, or a view of it.
    """

    @abstractmethod
    def output_shape(self, shape: LayerInput) -> Shape:
        """Returns the shape of an output sample for input samples of this shape.

        Raises:
            InvalidShape: the layer does not accept such samples.
        """

    def variables(self, shape: LayerInput) -> dict[str, Variable]:
        """Returns the layer's variables by name, for samples of this shape. Variables that are not trainable are state.

        A program's `variables()` can return them; the servers then initialize them.

        Raises:
            InvalidShape: the layer does not accept such samples.
        """
        self.output_shape(shape)
        return {}

    @abstractmethod
    def apply(self, params: Values, state: Values, x: Array, train: Train) -> tuple[Array, dict[str, Array], Pullback]:
        """Applies the layer to a batch.

        Args:
            params: the trainable variables by name, on the device of x.
            state: the other variables by name.
            x: [batch, ...], or features by name if the layer supports them.
            train: a TrainingContext in training; False in evaluation.

        Returns:
            The output, the new state, and the pullback. The new state has all state variables, changed or not, except
            those of `Frozen` layers. The pullback takes dy, the gradient of a loss with respect to the output. It
            returns the parameters' gradients by name, and dx, the gradient with respect to the input, which can be
            None. The pullback may be called any number of times.

        Raises:
            InvalidShape: the layer does not accept the array, or a variable is missing or has another shape.
            InvalidLayer: train is neither a TrainingContext nor False, and the layer depends on it.
        """

    def init(self, rng: np.random.Generator, shape: LayerInput) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Returns initial values of parameters and state, in float32.

        Args:
            rng: draws one seed for the initializer of each variable, in the order of `variables`.
            shape: shape of an input sample.

        Raises:
            InvalidShape: the layer does not accept such samples.
        """
        params: dict[str, np.ndarray] = {}
        state: dict[str, np.ndarray] = {}
        for name, variable in self.variables(shape).items():
            values = np.empty(variable.shape, variable.dtype)
            initializers.fill(
                values.reshape(-1), variable.initializer, name, variable.shape, int(rng.integers(1, 2**63))
            )
            (params if variable.trainable else state)[name] = values
        return params, state

    def _require(self, fits: bool, got: LayerInput, wants: str) -> None:
        """Raises InvalidShape unless the samples fit. Containers add the layer's path."""
        if not fits:
            kind, change = type(self).__name__, "this layer or the ones before it"
            raise shape_error("", kind, "samples of shape", _shown(got), wants, change)

    def _require_floats(self, x: Array) -> None:
        """Raises InvalidShape if x has integers, which have no gradient."""
        wants = f"floats, not {x.dtype} (shoal.data.augment.ToFloat converts images)"
        self._require(is_float(x.dtype), x.shape[1:], wants)

    def _kept(self, arrays: Values, name: str, *shape: int | None) -> Array:
        """Returns a variable. Raises InvalidShape if it is missing or its axes have other lengths; None means any."""
        array = arrays.get(name)
        got = () if array is None else array.shape
        if len(got) != len(shape) or not all(want in (None, has) for want, has in zip(shape, got, strict=True)):
            what = f"the variable {name!r} of shape" if name in arrays else "variables, but not"
            wants = f"[{', '.join('any' if length is None else str(length) for length in shape)}]"
            change = "the variables: they must be those that the layer describes for its samples"
            raise shape_error("", type(self).__name__, what, str(got) if name in arrays else repr(name), wants, change)
        return array

    def _trains(self, train: object) -> bool:
        """Returns whether to act as in training. Raises InvalidLayer for an invalid `train`."""
        self._demand(
            isinstance(train, TrainingContext) or train is False,
            f"train is {train!r}; give TrainingContext(seed) or False",
        )
        return train is not False

    def _demand(self, holds: bool, what: str) -> None:
        """Raises InvalidLayer unless a condition of the settings holds."""
        if not holds:
            raise errors.InvalidLayer(f"{type(self).__name__}: {what}", kind=type(self).__name__)


class StatelessLayer(Layer):
    """Base class of layers without variables."""

    def apply(self, params: Values, state: Values, x: Array, train: Train) -> tuple[Array, dict[str, Array], Pullback]:  # noqa: ARG002 - there are none
        self.output_shape(shape_of(x))
        y, pull = self._value(x, train)
        return y, {}, lambda dy: ({}, pull(dy))

    @abstractmethod
    def _value(self, x: Array, train: Train) -> tuple[Array, Callable[[Array], Array]]:
        """Returns the output, and a function that returns dx for dy."""


def shape_of(x: Array | Mapping[str, Array]) -> LayerInput:
    """Returns the shape of a sample of a layer's input."""
    return {name: shape_of(each) for name, each in x.items()} if isinstance(x, Mapping) else x.shape[1:]


@contextmanager
def within(name: str) -> Iterator[None]:
    """Adds a child's name to the layer path of any InvalidShape raised in the block."""
    try:
        yield
    except errors.InvalidShape as error:
        details = error.details
        path = _joined(name, details["layer"])
        raise shape_error(**{**details, "layer": path}).with_traceback(error.__traceback__) from None


def trainable(shape: Shape, initializer: Initializer) -> Variable:
    """Returns a trainable variable in float32."""
    return Variable(shape, "float32", initializer)


def statistic(shape: Shape, initializer: Initializer) -> Variable:
    """Returns a variable without gradients, such as a running mean. Workers' values are averaged in each step."""
    return Variable(shape, "float32", initializer, trainable=False, aggregation="mean")


def _shown(shape: LayerInput) -> str:
    if not isinstance(shape, Mapping):
        return str(tuple(shape))
    return "{" + ", ".join(f"{name}: {_shown(each)}" for name, each in shape.items()) + "}"


def _joined(path: str, name: str) -> str:
    return f"{path}/{name}" if path and name else path or name


__all__ = [
    "Layer",
    "LayerInput",
    "PartwisePullback",
    "Pullback",
    "Shape",
    "StatelessLayer",
    "Train",
    "TrainingContext",
    "Values",
    "one_by_one",
    "shape_of",
    "statistic",
    "trainable",
    "within",
]
