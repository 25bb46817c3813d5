"""Layers made of layers: their variables are their children's, with the child's name before each."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from shoal import errors
from shoal.program import Array
from shoal.variables import Variable
from shoal_nn.layer import (
    Arrays,
    Layer,
    LayerInput,
    PartwisePullback,
    Pullback,
    Shape,
    StatelessLayer,
    Train,
    TrainingContext,
    shape_of,
    within,
)
from shoal_worker.arrays import namespace_of

_T = TypeVar("_T")

# By name, or one after the other: then their names are "0", "1" and so on.
Layers = Mapping[str, Layer] | Sequence[Layer]


class _Container(Layer):
    """What all containers have in common: children with names."""

    layers: tuple[tuple[str, Layer], ...]

    @abstractmethod
    def _shapes(self, shape: LayerInput) -> list[LayerInput]:
        """What each child is fed, for examples of this shape."""

    def variables(self, shape: LayerInput) -> dict[str, Variable]:
        kept = {}
        for (name, layer), fed in zip(self.layers, self._shapes(shape), strict=True):
            with within(name):
                kept.update(_prefixed(name, layer.variables(fed)))
        return kept

    def _apply_child(
        self, child: tuple[str, Layer], params: Arrays, state: Arrays, x: Array, train: Train
    ) -> tuple[Array, dict[str, Array], Pullback]:
        """As its `apply`, with the names of the container's variables."""
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
    """One layer after the other.

    Sample:
        A small network for images. Its variables are "conv/kernel", "conv/bias", "head/kernel" and "head/bias".

            net = Sequential({
                "conv": Conv2D(16, strides=2), "relu": ReLU(), "pool": GlobalAvgPool(), "head": Dense(10),
            })
            params, state = net.init(np.random.default_rng(0), (28, 28, 1))
            logits, state, pullback = net.apply(params, state, images, Training(seed))
            loss, dlogits = softmax_cross_entropy(logits, labels)
            gradients, _ = pullback(dlogits)

    Args:
        layers: by name, or a list, whose layers are called "0", "1" and so on.

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

    def apply(self, params: Arrays, state: Arrays, x: Array, train: Train) -> tuple[Array, dict[str, Array], Pullback]:
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
                if dy is None:  # such as of whole numbers, which nothing learns to give
                    self._demand_no_learner(number, fed)
                    break
            return dy

        return x, after, PartwisePullback(parts)

    def _demand_no_learner(self, number: int, fed: list[LayerInput]) -> None:
        """Raises InvalidLayer if one of so many first children has parameters: they would have no gradients."""
        for (name, layer), shape in zip(self.layers[:number], fed, strict=False):
            learns = any(it.trainable for it in layer.variables(shape).values())
            self._demand(
                not learns,
                f"its layer {self.layers[number][0]!r} gives no gradient by its input, and {name!r} before it would "
                "not learn; give it input_gradient=True, or freeze what comes before it",
            )


class Merge(ABC):
    """How the outputs of branches become one."""

    @abstractmethod
    def output_shape(self, shapes: list[Shape]) -> Shape | None:
        """Of a sample; None where these do not go together."""

    @abstractmethod
    def join(self, outputs: list[Array]) -> Array:
        """One array."""

    @abstractmethod
    def split(self, dy: Array, lengths: list[int]) -> list[Array]:
        """The gradient by each branch's output, whose last axes have these lengths."""


@dataclass(frozen=True)
class Add(Merge):
    """Their sum; all have one shape."""

    def output_shape(self, shapes: list[Shape]) -> Shape | None:
        return shapes[0] if len(set(shapes)) == 1 else None

    def join(self, outputs: list[Array]) -> Array:
        total = outputs[0]
        for output in outputs[1:]:
            total = total + output
        return total

    def split(self, dy: Array, lengths: list[int]) -> list[Array]:
        return [dy for _ in lengths]


@dataclass(frozen=True)
class Concat(Merge):
    """One after the other along the last axis; all other axes are the same."""

    def output_shape(self, shapes: list[Shape]) -> Shape | None:
        fits = min(map(len, shapes)) > 0 and len({shape[:-1] for shape in shapes}) == 1
        return (*shapes[0][:-1], sum(shape[-1] for shape in shapes)) if fits else None

    def join(self, outputs: list[Array]) -> Array:
        return namespace_of(outputs[0]).concatenate(outputs, axis=-1)

    def split(self, dy: Array, lengths: list[int]) -> list[Array]:
        ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
        return [dy[..., end - length : end] for length, end in zip(lengths, ends, strict=True)]


_ADD = Add()


class _Branches(_Container):
    """Children side by side, whose outputs are joined."""

    layers: tuple[tuple[str, Layer], ...]
    join: Merge

    def __init__(self, layers: Layers, join: Merge) -> None:
        object.__setattr__(self, "layers", _named(type(self).__name__, layers))
        object.__setattr__(self, "join", join)
        self._demand(len(self.layers) > 0, "it has no branch; give one at least")

    @abstractmethod
    def _shares(self, whole: Any, shape: LayerInput) -> list[Any]:
        """What each branch is fed of a batch, or of its shape; the shape comes along for what is said of a misfit."""

    @abstractmethod
    def _by_input(self, dxs: list[Array | None]) -> Array | None:
        """The gradient by the input, of those that the branches give."""

    def output_shape(self, shape: LayerInput) -> Shape:
        outputs = []
        for (name, layer), share in zip(self.layers, self._shares(shape, shape), strict=True):
            with within(name):
                outputs.append(layer.output_shape(share))
        return self._joined(outputs, shape)

    def _shapes(self, shape: LayerInput) -> list[LayerInput]:
        self.output_shape(shape)
        return self._shares(shape, shape)

    def apply(self, params: Arrays, state: Arrays, x: Array, train: Train) -> tuple[Array, dict[str, Array], Pullback]:
        own, kept, shape = _by_child(params), _by_child(state), shape_of(x)
        applied = [
            self._apply_child(child, own.get(child[0], {}), kept.get(child[0], {}), share, train)
            for child, share in zip(self.layers, self._shares(x, shape), strict=True)
        ]
        outputs = [y for y, _, _ in applied]
        self._joined([y.shape[1:] for y in outputs], shape)
        lengths = [y.shape[-1] for y in outputs]
        pulls = [pull for _, _, pull in applied]

        def pullback(dy: Array) -> tuple[dict[str, Array], Array]:
            pulled = [pull(part) for pull, part in zip(pulls, self.join.split(dy, lengths), strict=True)]
            found = {name: gradient for gradients, _ in pulled for name, gradient in gradients.items()}
            return found, self._by_input([dx for _, dx in pulled])

        after = {name: array for _, moved, _ in applied for name, array in moved.items()}
        return self.join.join(outputs), after, pullback

    def _joined(self, outputs: list[Shape], shape: LayerInput) -> Shape:
        joined = self.join.output_shape(outputs)
        named = ", ".join(f"{name} {tuple(each)}" for (name, _), each in zip(self.layers, outputs, strict=True))
        self._require(
            joined is not None, shape, f"such that {type(self.join).__name__} can join what its branches give: {named}"
        )
        assert joined is not None
        return joined


@dataclass(frozen=True, init=False)
class Parallel(_Branches):
    """Branches that are all fed the same, and whose outputs are joined.

    Args:
        layers: the branches, one at least: by name, or a list.
        join: `Add()` or `Concat()`.

    Raises:
        InvalidLayer: there is no branch, or a name is empty or has a slash.
    """

    layers: tuple[tuple[str, Layer], ...]
    join: Merge

    def __init__(self, layers: Layers, join: Merge = _ADD) -> None:
        super().__init__(layers, join)

    def _shares(self, whole: Any, shape: LayerInput) -> list[Any]:  # noqa: ARG002 - all fit here
        return [whole for _ in self.layers]

    def _by_input(self, dxs: list[Array | None]) -> Array | None:
        total = dxs[0]
        for dx in dxs[1:]:  # without that of one branch, the others' sum is no gradient
            total = None if total is None or dx is None else total + dx
        return total


@dataclass(frozen=True, init=False)
class ByFeature(_Branches):
    """Branches that are each fed the feature of their name, and whose outputs are joined.

    What it is fed is a mapping: {"age": [batch, ...], "occupation": [batch, ...]}; so are the shapes of a sample that
    `variables` and the like take: {"age": (), "occupation": ()}. Features that no branch is named after are left alone.
    Features are data, and there is no dx.

    Sample:
        [batch, 9] of two features, one of numbers of rows and one of floats.

            ByFeature({"occupation": Embedding(21, 8), "age": Column()}, Concat())

    Args:
        layers: the branches by feature, one at least.
        join: `Add()` or `Concat()`.

    Raises:
        InvalidLayer: there is no branch, or a name is empty or has a slash.
    """

    layers: tuple[tuple[str, Layer], ...]
    join: Merge

    def __init__(self, layers: Mapping[str, Layer], join: Merge = _ADD) -> None:
        super().__init__(layers, join)

    def _shares(self, whole: Any, shape: LayerInput) -> list[Any]:
        names = [name for name, _ in self.layers]
        given = shape if isinstance(shape, Mapping) else {}
        missing = ", ".join(name for name in names if name not in given)
        self._require(not missing, shape, f"features by name, {', '.join(names)}; of these it got no {missing}")
        return [whole[name] for name in names]

    def _by_input(self, dxs: list[Array | None]) -> None:
        """None: nobody before it learns."""


@dataclass(frozen=True)
class Identity(StatelessLayer):
    """The input."""

    def output_shape(self, shape: Shape) -> Shape:
        return shape

    def _value(self, x: Array, train: Train) -> tuple[Array, Callable[[Array], Array]]:  # noqa: ARG002 - acts the same
        return x, lambda dy: dy


_IDENTITY = Identity()


@dataclass(frozen=True, init=False)
class Residual(Parallel):
    """y = body(x) + shortcut(x) (He et al., "Deep residual learning for image recognition", CVPR 2016).

    Its variables begin with "body/" and "shortcut/". An activation after the sum is a layer of its own.

    Args:
        body: what is learned.
        shortcut: brings x to the shape of body(x), where they differ.
    """

    def __init__(self, body: Layer, shortcut: Layer = _IDENTITY) -> None:
        super().__init__({"body": body, "shortcut": shortcut})


def _named(kind: str, layers: Layers) -> tuple[tuple[str, Layer], ...]:
    named = layers if isinstance(layers, Mapping) else {str(number): layer for number, layer in enumerate(layers)}
    for name in named:
        if not name or "/" in name:
            raise errors.InvalidLayer(
                f"{kind}: {name!r} cannot be a layer's name; give one that is not empty and has no slash", kind=kind
            )
    return tuple(named.items())


def _by_child(arrays: Arrays) -> dict[str, dict[str, Array]]:
    """A container's arrays, for each of its children by the names that it knows."""
    children: dict[str, dict[str, Array]] = {}
    for name, array in arrays.items():
        child, _, rest = name.partition("/")
        children.setdefault(child, {})[rest] = array
    return children


def _prefixed(child: str, values: Mapping[str, _T]) -> dict[str, _T]:
    return {f"{child}/{name}": value for name, value in values.items()}


__all__ = ["Add", "ByFeature", "Concat", "Identity", "Merge", "Parallel", "Residual", "Sequential"]
