"""Containers: layers made of layers. Names of variables begin with the child's name: "conv1/kernel"."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from shoal import errors
from shoal.program import Array
from shoal.variables import Variable
from shoal_nn.layer import (
    Layer,
    LayerInput,
    PartwisePullback,
    Pullback,
    Shape,
    StatelessLayer,
    Train,
    TrainingContext,
    Values,
    shape_of,
    within,
)
from shoal_worker.arrays import namespace_of

_T = TypeVar("_T")

# Layers by name, or a sequence with the names "0", "1" and so on.
Layers = Mapping[str, Layer] | Sequence[Layer]


class _Container(Layer):
    """Base class of containers: children with names."""

    layers: tuple[tuple[str, Layer], ...]

    @abstractmethod
    def _shapes(self, shape: LayerInput) -> list[LayerInput]:
        """Returns each child's input shape for samples of this shape."""

    def variables(self, shape: LayerInput) -> dict[str, Variable]:
        kept = {}
        for (name, layer), fed in zip(self.layers, self._shapes(shape), strict=True):
            with within(name):
                kept.update(_prefixed(name, layer.variables(fed)))
        return kept

    def _apply_child(
        self, child: tuple[str, Layer], params: Values, state: Values, x: Array, train: Train
    ) -> tuple[Array, dict[str, Array], Pullback]:
        """Applies a child; its variables get the names that they have in the container."""
        name, layer = child
        self._trains(train)
        below: Train = train.under(name) if isinstance(train, TrainingContext) else False
        with within(name):
            y, after, pull = layer.apply(params, state, x, below)

        def pullback(dy: Array) -> tuple[dict[str, Array], Array]:
            found, dx = pull(dy)
            return _prefixed(name, found), dx

        return y, _prefixed(name, after), pullback


@dataclass(frozen=True, init=False)
class Sequential(_Container):
    """Layers applied one after the other.

    Example:
        A small network for images. Its variables are "conv/kernel", "conv/bias", "head/kernel" and "head/bias".

            net = Sequential({
                "conv": Conv2D(16, strides=2), "relu": ReLU(), "pool": GlobalAvgPool(), "head": Dense(10),
            })
            params, state = net.init(np.random.default_rng(0), (28, 28, 1))
            logits, state, pullback = net.apply(params, state, images, TrainingContext(seed))
            loss, dlogits = softmax_cross_entropy(logits, labels)
            gradients, _ = pullback(dlogits)

    Args:
        layers: by name, or a list with the names "0", "1" and so on.

    Raises:
        InvalidLayer: a name is empty or has a slash.
    """

    layers: tuple[tuple[str, Layer], ...]

    def __init__(self, layers: Layers) -> None:
        object.__setattr__(self, "layers", _named("Sequential", layers))

    def output_shape(self, shape: LayerInput) -> Shape:
        for name, layer in self.layers:
            with within(name):
                shape = layer.output_shape(shape)
        return shape  # type: ignore[no-any-return]

    def _shapes(self, shape: LayerInput) -> list[LayerInput]:
        fed = []
        for name, layer in self.layers:
            fed.append(shape)
            with within(name):
                shape = layer.output_shape(shape)
        return fed

    def apply(self, params: Values, state: Values, x: Array, train: Train) -> tuple[Array, dict[str, Array], Pullback]:
        own, kept = _by_child(params), _by_child(state)
        after: dict[str, Array] = {}
        pulls: list[Pullback] = []
        fed: list[LayerInput] = []
        for child in self.layers:
            fed.append(shape_of(x))
            x, moved, pull = self._apply_child(child, own.get(child[0], {}), kept.get(child[0], {}), x, train)
            after |= moved
            pulls.append(pull)

        def parts(dy: Array) -> Generator[dict[str, Array], None, Array]:
            for number in reversed(range(len(pulls))):
                part, dy = pulls[number](dy)
                yield part
                if dy is None:  # no gradient with respect to the input, such as of integers
                    self._demand_no_learner(number, fed)
                    break
            return dy

        return x, after, PartwisePullback(parts)

    def _demand_no_learner(self, number: int, fed: list[LayerInput]) -> None:
        """Raises InvalidLayer if a child before this one has parameters, which would have no gradients."""
        for (name, layer), shape in zip(self.layers[:number], fed, strict=False):
            learns = any(it.trainable for it in layer.variables(shape).values())
            self._demand(
                not learns,
                f"its layer {self.layers[number][0]!r} gives no gradient with respect to its input, so "
                f"{name!r} before it would not learn; set input_gradient=True, or freeze the layers before it",
            )


class Merge(ABC):
    """Base class of the ways to merge the outputs of branches."""

    @abstractmethod
    def output_shape(self, shapes: list[Shape]) -> Shape | None:
        """Returns the shape of a merged sample; None if the shapes do not match."""

    @abstractmethod
    def merge(self, outputs: list[Array]) -> Array:
        """Returns the merged array."""

    @abstractmethod
    def split(self, dy: Array, lengths: list[int]) -> list[Array]:
        """Returns the gradient with respect to each branch's output.

        Args:
            dy: the gradient with respect to the merged array.
            lengths: length of the last axis of each output.
        """


@dataclass(frozen=True)
class Add(Merge):
    """Sum of the outputs, which must have the same shape."""

    def output_shape(self, shapes: list[Shape]) -> Shape | None:
        return shapes[0] if len(set(shapes)) == 1 else None

    def merge(self, outputs: list[Array]) -> Array:
        total = outputs[0]
        for output in outputs[1:]:
            total = total + output
        return total

    def split(self, dy: Array, lengths: list[int]) -> list[Array]:
        return [dy for _ in lengths]


@dataclass(frozen=True)
class Concat(Merge):
    """Concatenation along the last axis; the other axes must be equal."""

    def output_shape(self, shapes: list[Shape]) -> Shape | None:
        fits = min(map(len, shapes)) > 0 and len({shape[:-1] for shape in shapes}) == 1
        return (*shapes[0][:-1], sum(shape[-1] for shape in shapes)) if fits else None

    def merge(self, outputs: list[Array]) -> Array:
        return namespace_of(outputs[0]).concatenate(outputs, axis=-1)

    def split(self, dy: Array, lengths: list[int]) -> list[Array]:
        ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
        return [dy[..., end - length : end] for length, end in zip(lengths, ends, strict=True)]


_ADD = Add()


class _Branches(_Container):
    """Base class of containers whose children are applied side by side and whose outputs are merged."""

    layers: tuple[tuple[str, Layer], ...]
    merge: Merge

    def __init__(self, layers: Layers, merge: Merge) -> None:
        object.__setattr__(self, "layers", _named(type(self).__name__, layers))
        object.__setattr__(self, "merge", merge)
        self._demand(len(self.layers) > 0, "it has no branch; give at least one")

    @abstractmethod
    def _shares(self, whole: Any, shape: LayerInput) -> list[Any]:
        """Returns each branch's part of a batch, or of its shape; `shape` is for error messages."""

    @abstractmethod
    def _by_input(self, dxs: list[Array | None]) -> Array | None:
        """Returns the gradient with respect to the input, given the branches' gradients."""

    def output_shape(self, shape: LayerInput) -> Shape:
        outputs = []
        for (name, layer), share in zip(self.layers, self._shares(shape, shape), strict=True):
            with within(name):
                outputs.append(layer.output_shape(share))
        return self._merged(outputs, shape)

    def _shapes(self, shape: LayerInput) -> list[LayerInput]:
        self.output_shape(shape)
        return self._shares(shape, shape)

    def apply(self, params: Values, state: Values, x: Array, train: Train) -> tuple[Array, dict[str, Array], Pullback]:
        own, kept, shape = _by_child(params), _by_child(state), shape_of(x)
        applied = [
            self._apply_child(child, own.get(child[0], {}), kept.get(child[0], {}), share, train)
            for child, share in zip(self.layers, self._shares(x, shape), strict=True)
        ]
        outputs = [y for y, _, _ in applied]
        self._merged([y.shape[1:] for y in outputs], shape)
        lengths = [y.shape[-1] for y in outputs]
        pulls = [pull for _, _, pull in applied]

        def pullback(dy: Array) -> tuple[dict[str, Array], Array]:
            pulled = [pull(part) for pull, part in zip(pulls, self.merge.split(dy, lengths), strict=True)]
            found = {name: gradient for gradients, _ in pulled for name, gradient in gradients.items()}
            return found, self._by_input([dx for _, dx in pulled])

        after = {name: array for _, moved, _ in applied for name, array in moved.items()}
        return self.merge.merge(outputs), after, pullback

    def _merged(self, outputs: list[Shape], shape: LayerInput) -> Shape:
        joined = self.merge.output_shape(outputs)
        named = ", ".join(f"{name} {tuple(each)}" for (name, _), each in zip(self.layers, outputs, strict=True))
        self._require(
            joined is not None,
            shape,
            f"such that {type(self.merge).__name__} can merge the outputs of its branches: {named}",
        )
        assert joined is not None
        return joined


@dataclass(frozen=True, init=False)
class Parallel(_Branches):
    """Branches that get the same input and whose outputs are merged.

    Args:
        layers: the branches, at least one, by name or as a list.
        merge: `Add()` or `Concat()`: how the outputs are merged.

    Raises:
        InvalidLayer: there is no branch, or a name is empty or has a slash.
    """

    layers: tuple[tuple[str, Layer], ...]
    merge: Merge

    def __init__(self, layers: Layers, merge: Merge = _ADD) -> None:
        super().__init__(layers, merge)

    def _shares(self, whole: Any, shape: LayerInput) -> list[Any]:  # noqa: ARG002 - any shape fits
        return [whole for _ in self.layers]

    def _by_input(self, dxs: list[Array | None]) -> Array | None:
        total = dxs[0]
        for dx in dxs[1:]:  # without one branch, the sum is not the gradient
            total = None if total is None or dx is None else total + dx
        return total


@dataclass(frozen=True, init=False)
class ByFeature(_Branches):
    """Branches by feature: each gets the feature of the same name, and their outputs are merged.

    The input is a mapping, such as {"age": [batch, ...], "occupation": [batch, ...]}. The shape of a sample is also a
    mapping, such as {"age": (), "occupation": ()}. Features without a branch are ignored. There is no dx, because
    features are data.

    Example:
        One feature has the numbers of table rows, and the other has floats. The output is [batch, 9].

            ByFeature({"occupation": Embedding(21, 8), "age": Column()}, Concat())

    Args:
        layers: the branches by feature, at least one.
        merge: `Add()` or `Concat()`: how the outputs are merged.

    Raises:
        InvalidLayer: there is no branch, or a name is empty or has a slash.
    """

    layers: tuple[tuple[str, Layer], ...]
    merge: Merge

    def __init__(self, layers: Mapping[str, Layer], merge: Merge = _ADD) -> None:
        super().__init__(layers, merge)

    def _shares(self, whole: Any, shape: LayerInput) -> list[Any]:
        names = [name for name, _ in self.layers]
        given = shape if isinstance(shape, Mapping) else {}
        missing = ", ".join(name for name in names if name not in given)
        self._require(not missing, shape, f"features by name, {', '.join(names)}; missing: {missing}")
        return [whole[name] for name in names]

    def _by_input(self, dxs: list[Array | None]) -> None:
        """Returns None: features are data."""


@dataclass(frozen=True)
class Identity(StatelessLayer):
    """y = x."""

    def output_shape(self, shape: Shape) -> Shape:
        return shape

    def _value(self, x: Array, train: Train) -> tuple[Array, Callable[[Array], Array]]:  # noqa: ARG002 - acts the same
        return x, lambda dy: dy


_IDENTITY = Identity()


@dataclass(frozen=True, init=False)
class Residual(Parallel):
    """y = body(x) + shortcut(x) (He et al., "Deep residual learning for image recognition", CVPR 2016).

    Names of variables begin with "body/" and "shortcut/". An activation after the sum is a separate layer.

    Args:
        body: the residual branch.
        shortcut: maps x to the shape of body(x), if the two shapes differ.
    """

    def __init__(self, body: Layer, shortcut: Layer = _IDENTITY) -> None:
        super().__init__({"body": body, "shortcut": shortcut})


def _named(kind: str, layers: Layers) -> tuple[tuple[str, Layer], ...]:
    named = layers if isinstance(layers, Mapping) else {str(number): layer for number, layer in enumerate(layers)}
    for name in named:
        if not name or "/" in name:
            raise errors.InvalidLayer(
                f"{kind}: {name!r} is not a valid name of a layer; a name must not be empty or contain a slash",
                kind=kind,
            )
    return tuple(named.items())


def _by_child(arrays: Values) -> dict[str, dict[str, Array]]:
    """Groups a container's arrays by child, with the child's own names."""
    children: dict[str, dict[str, Array]] = {}
    for name, array in arrays.items():
        child, _, rest = name.partition("/")
        children.setdefault(child, {})[rest] = array
    return children


def _prefixed(child: str, values: Mapping[str, _T]) -> dict[str, _T]:
    return {f"{child}/{name}": value for name, value in values.items()}


__all__ = ["Add", "ByFeature", "Concat", "Identity", "Merge", "Parallel", "Residual", "Sequential"]
