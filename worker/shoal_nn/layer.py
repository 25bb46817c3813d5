"""What a layer is: pure functions from parameters and inputs to outputs, with pullbacks. No layer lives here."""

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

# Of one sample or an array: lengths of the axes. A model's shapes leave the batch out.
Shape = tuple[int, ...]
# What a layer is fed: a Shape, or of features by name (`ByFeature`) a Mapping of such; no type describes both.
LayerInput = Any
# Arrays by name; those of a container's child have its name before theirs: "conv1/kernel".
Arrays = Mapping[str, Array]
# Takes dy, the gradient of a loss by a layer's output, of that output's shape and dtype. Gives the gradients by its
# parameters (of their names, shapes and dtypes) and dx, by its input (of its shape and dtype; None where it has none).
Pullback = Callable[[Array], tuple[dict[str, Array], Array]]


class PartwisePullback:
    """A pullback whose gradients are known part by part, of the last part first.

    Args:
        parts: for dy, yields each part's gradients, and returns dx.
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
        """The gradients, each part's as soon as they are known."""
        for part in self._parts(dy):
            yield from part.items()


def one_by_one(pullback: Pullback, dy: Array) -> Iterator[tuple[str, Array]]:
    """What a pullback gives by the parameters, for a `shoal.StepOutput` whose first gradients travel as others are computed.

    Of a `Sequential` those of each of its layers, the last one's first; of other layers all at once.
    """
    return pullback.one_by_one(dy) if isinstance(pullback, PartwisePullback) else iter(pullback(dy)[0].items())


@dataclass(frozen=True, slots=True)
class TrainingContext:
    """That a layer is applied to train, and where the random numbers of this step come from.

    Args:
        seed: of the batch, from [0, 2**64): what `shoal.program.RandomProgram` is given.
        path: of the layer that it was handed to, among all layers: each draws from a stream of its own.
    """

    seed: int
    path: str = ""

    def under(self, name: str) -> "TrainingContext":
        """The same step, for a child of this name."""
        return TrainingContext(self.seed, _joined(self.path, name))

    def generator(self, xp: Namespace) -> Any:
        """A generator of the array namespace, the same for the same seed and path.

        NumPy and CuPy draw different numbers from the same seed.
        """
        key = random_streams.key_of(self.seed, self.path)
        if xp is np:
            return np.random.default_rng(key)
        # CuPy's default, XORWOW, takes long to begin, and each layer begins one at each step. Philox counts.
        return xp.random.Generator(xp.random.Philox4x3210(key))


# `False` is how a model is evaluated.
Train = TrainingContext | Literal[False]


class Layer(ABC):
    """A function with parameters. A frozen dataclass of settings, which holds no array.

    It computes in the dtype of its input, whatever that of its parameters, and in float32 where sums of halves would
    lose too much. What it is given it does not change; what it returns may be the input itself, or a view of it.
    """

    @abstractmethod
    def output_shape(self, shape: LayerInput) -> Shape:
        """The shape of a sample of the output, for examples of this shape.

        Raises:
            InvalidShape: the layer does not take such samples.
        """

    def variables(self, shape: LayerInput) -> dict[str, Variable]:
        """What the layer keeps, by name, for examples of this shape; what is not trainable is its state.

        A program's `variables()` can return them: then the servers draw the first values.

        Raises:
            InvalidShape: the layer does not take such samples.
        """
        self.output_shape(shape)
        return {}

    @abstractmethod
    def apply(self, params: Arrays, state: Arrays, x: Array, train: Train) -> tuple[Array, dict[str, Array], Pullback]:
        """The layer's output for a batch.

        Args:
            params: the trainable variables, by name, on the device of x.
            state: the others.
            x: [batch, ...]; or features by name, each such an array, where the layer is made for them.
            train: how to act where training differs from evaluation.

        Returns:
            The output, the new state (all of it, whether it changed or not, but nothing of what is `Frozen`), and the
            pullback, which may be called once or more, or never.

        Raises:
            InvalidShape: the layer does not take such an array, or a variable is missing or of another shape.
            InvalidLayer: train is neither Training nor False, where it matters.
        """

    def init(self, rng: np.random.Generator, shape: LayerInput) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """First values, in float32: parameters and state.

        Args:
            rng: draws one number for each variable, in their order.
            shape: of a sample.

        Raises:
            InvalidShape: the layer does not take such samples.
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
        """Raises InvalidShape unless the samples that the layer got fit; containers add the way to the layer."""
        if not fits:
            kind, change = type(self).__name__, "it, or what comes before it"
            raise shape_error("", kind, "samples of shape", _shown(got), wants, change)

    def _require_floats(self, x: Array) -> None:
        """Raises InvalidShape for whole numbers: in their dtype there is nothing to learn from."""
        wants = f"floats, not {x.dtype} (shoal.data.augment.ToFloat makes them of images)"
        self._require(is_float(x.dtype), x.shape[1:], wants)

    def _kept(self, arrays: Arrays, name: str, *shape: int | None) -> Array:
        """The variable of this name; raises InvalidShape unless it is there and its axes have these lengths, or any."""
        array = arrays.get(name)
        got = () if array is None else array.shape
        if len(got) != len(shape) or not all(want in (None, has) for want, has in zip(shape, got, strict=True)):
            what = f"the variable {name!r} of shape" if name in arrays else "variables, but not"
            wants = f"[{', '.join('any' if length is None else str(length) for length in shape)}]"
            change = "what it is given: the variables that it describes, for the samples that it is fed"
            raise shape_error("", type(self).__name__, what, str(got) if name in arrays else repr(name), wants, change)
        return array

    def _trains(self, train: object) -> bool:
        """Whether to act as in training; raises InvalidLayer for what does not say."""
        self._demand(
            isinstance(train, TrainingContext) or train is False, f"train is {train!r}; give Training(seed) or False"
        )
        return train is not False

    def _demand(self, holds: bool, what: str) -> None:
        """Raises InvalidLayer unless a setting is in its range."""
        if not holds:
            raise errors.InvalidLayer(f"{type(self).__name__}: {what}", kind=type(self).__name__)


class StatelessLayer(Layer):
    """A layer that keeps nothing: a function of its input."""

    def apply(self, params: Arrays, state: Arrays, x: Array, train: Train) -> tuple[Array, dict[str, Array], Pullback]:  # noqa: ARG002 - there are none
        self.output_shape(shape_of(x))
        y, pull = self._value(x, train)
        return y, {}, lambda dy: ({}, pull(dy))

    @abstractmethod
    def _value(self, x: Array, train: Train) -> tuple[Array, Callable[[Array], Array]]:
        """The output, and what gives dx for dy."""


def shape_of(x: Array | Mapping[str, Array]) -> LayerInput:
    """Of a sample of what a layer is fed."""
    return {name: shape_of(each) for name, each in x.items()} if isinstance(x, Mapping) else x.shape[1:]


@contextmanager
def within(name: str) -> Iterator[None]:
    """Adds a container's child to the path of a layer that is fed, or holds, a wrong shape."""
    try:
        yield
    except errors.InvalidShape as error:
        said = error.details
        path = _joined(name, said["layer"])
        raise shape_error(**{**said, "layer": path}).with_traceback(error.__traceback__) from None


def trainable(shape: Shape, initializer: Initializer) -> Variable:
    """A parameter."""
    return Variable(shape, "float32", initializer)


def statistic(shape: Shape, initializer: Initializer) -> Variable:
    """What training moves without a gradient; workers' values of one step are averaged."""
    return Variable(shape, "float32", initializer, trainable=False, aggregation="mean")


def _shown(shape: LayerInput) -> str:
    if not isinstance(shape, Mapping):
        return str(tuple(shape))
    return "{" + ", ".join(f"{name}: {_shown(each)}" for name, each in shape.items()) + "}"


def _joined(path: str, name: str) -> str:
    return f"{path}/{name}" if path and name else path or name


__all__ = [
    "Arrays",
    "Layer",
    "LayerInput",
    "PartwisePullback",
    "Pullback",
    "Shape",
    "StatelessLayer",
    "Train",
    "TrainingContext",
    "one_by_one",
    "shape_of",
    "statistic",
    "trainable",
    "within",
]
