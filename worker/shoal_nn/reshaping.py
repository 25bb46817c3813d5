"""Layers without variables that reshape, pad, resize or rescale samples."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from shoal.program import Array
from shoal_nn.layer import Shape, StatelessLayer, Train
from shoal_worker.arrays import Namespace, namespace_of


@dataclass(frozen=True)
class Flatten(StatelessLayer):
    """Reshapes samples to one axis."""

    def output_shape(self, shape: Shape) -> Shape:
        return (math.prod(shape),)

    def _value(self, x: Array, train: Train) -> tuple[Array, Callable[[Array], Array]]:  # noqa: ARG002 - acts the same
        return x.reshape(len(x), math.prod(x.shape[1:])), lambda dy: dy.reshape(x.shape)


@dataclass(frozen=True)
class Reshape(StatelessLayer):
    """Reshapes samples.

    Args:
        shape: the shape of an output sample. One length can be -1; it follows from the others.

    Raises:
        InvalidLayer: a length is below -1, or more than one is -1.
    """

    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        valid = min(self.shape, default=0) >= -1 and self.shape.count(-1) < 2
        self._demand(valid, f"shape is {self.shape}; give lengths of 0 or more, and -1 at most once")

    def output_shape(self, shape: Shape) -> Shape:
        size, known = math.prod(shape), math.prod(length for length in self.shape if length >= 0)
        fits = size == known if -1 not in self.shape else known > 0 and size % known == 0
        self._require(fits, shape, f"samples that can be reshaped to {self.shape}")
        return tuple(size // known if length == -1 else length for length in self.shape)

    def _value(self, x: Array, train: Train) -> tuple[Array, Callable[[Array], Array]]:  # noqa: ARG002 - acts the same
        return x.reshape(len(x), *self.output_shape(x.shape[1:])), lambda dy: dy.reshape(x.shape)


@dataclass(frozen=True)
class ZeroPad(StatelessLayer):
    """Adds rows and columns of zeros to images [batch, height, width, channels].

    Args:
        sides: rows ((above, below), columns (left, right)), each 0 or more.

    Raises:
        InvalidLayer: a number is below 0.
    """

    sides: tuple[tuple[int, int], tuple[int, int]]

    def __post_init__(self) -> None:
        self._demand(min(map(min, self.sides)) >= 0, f"sides are {self.sides}; give numbers of 0 or more")

    def output_shape(self, shape: Shape) -> Shape:
        self._require(len(shape) == 3, shape, "three axes: (height, width, channels)")
        return shape[0] + sum(self.sides[0]), shape[1] + sum(self.sides[1]), shape[2]

    def _value(self, x: Array, train: Train) -> tuple[Array, Callable[[Array], Array]]:  # noqa: ARG002 - acts the same
        (above, _), (left, _) = self.sides
        interior = (slice(None), slice(above, above + x.shape[1]), slice(left, left + x.shape[2]))
        y = namespace_of(x).zeros((len(x), *self.output_shape(x.shape[1:])), x.dtype)
        y[interior] = x
        return y, lambda dy: dy[interior]


@dataclass(frozen=True)
class Rescale(StatelessLayer):
    """y = x * scale + offset.

    Args:
        scale: a number.
        offset: a number, or one for each index of the last axis.
    """

    scale: float | tuple[float, ...]
    offset: float | tuple[float, ...] = 0.0

    def output_shape(self, shape: Shape) -> Shape:
        for numbers in (self.scale, self.offset):
            fits = not isinstance(numbers, tuple) or (len(shape) > 0 and shape[-1] == len(numbers))
            self._require(fits, shape, f"as many channels as there are numbers in {numbers}")
        return shape

    def _value(self, x: Array, train: Train) -> tuple[Array, Callable[[Array], Array]]:  # noqa: ARG002 - acts the same
        self._require_floats(x)
        xp = namespace_of(x)
        scale, offset = xp.asarray(self.scale, x.dtype), xp.asarray(self.offset, x.dtype)
        return x * scale + offset, lambda dy: dy * scale


@dataclass(frozen=True)
class Interpolate(StatelessLayer):
    """Resizes images [batch, height, width, channels]. It does not smooth images that shrink.

    Args:
        size: new height and width, each 1 or more.
        method: "bilinear": interpolation between the centers of four pixels, as `shoal.data.augment.resize`; "nearest":
            the pixel whose area contains the center of the new pixel.

    Raises:
        InvalidLayer: a length is below 1, or the method is unknown.
    """

    size: tuple[int, int]
    method: Literal["bilinear", "nearest"] = "bilinear"

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", tuple(self.size))
        self._demand(min(self.size) >= 1, f"size is {self.size}; give a height and a width of 1 or more")
        self._demand(self.method in {"bilinear", "nearest"}, f"method is {self.method!r}; give 'bilinear' or 'nearest'")

    def output_shape(self, shape: Shape) -> Shape:
        self._require(len(shape) == 3, shape, "three axes: (height, width, channels)")
        return *self.size, shape[2]

    def _value(self, x: Array, train: Train) -> tuple[Array, Callable[[Array], Array]]:  # noqa: ARG002 - acts the same
        self._require_floats(x)
        xp, (count, height, width, channels) = namespace_of(x), x.shape
        rows, columns = (
            xp.asarray(_shares(xp, before, after, self.method), x.dtype)
            for before, after in zip((height, width), self.size, strict=True)
        )
        wide = (columns @ x.reshape(count * height, width, channels)).reshape(count, height, -1)
        y = (rows @ wide).reshape(count, *self.size, channels)

        def pull(dy: Array) -> Array:
            narrow = (rows.T @ dy.reshape(count, self.size[0], -1)).reshape(count * height, self.size[1], channels)
            return (columns.T @ narrow).reshape(x.shape)

        return y, pull


def _shares(xp: Namespace, before: int, after: int, method: str) -> Array:
    """Returns the share of each old row or column in each new one: [after, before], float64."""
    places = ((xp.arange(after, dtype="float64") + 0.5) * before / after)[:, None]
    old = xp.arange(before)
    if method == "nearest":
        return (xp.floor(places) == old).astype("float64")
    return xp.maximum(0, 1 - abs(xp.clip(places - 0.5, 0, before - 1) - old))


__all__ = ["Flatten", "Interpolate", "Rescale", "Reshape", "ZeroPad"]
