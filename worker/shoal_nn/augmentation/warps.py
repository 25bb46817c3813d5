"""Rotations, zooms and translations: each pixel comes from a place of the old image that an affine map gives."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np

from shoal.program import Array
from shoal_nn.augmentation import affine_maps
from shoal_nn.augmentation.affine_maps import Maps
from shoal_nn.augmentation.image_layer import Changed, ImageLayer, LowHigh
from shoal_worker.arrays import Namespace, namespace_of

FillMode = Literal["reflect", "wrap", "constant", "nearest"]
Interpolation = Literal["bilinear", "nearest"]


@dataclass(frozen=True, kw_only=True)
class Warp(ImageLayer):
    """Base class of layers that move the pixels of each image by an affine map of its own.

    Args:
        fill_mode: what lies outside of an image. "reflect": its mirror image, with the edge twice; "wrap": the image
            again; "constant": `fill_value`; "nearest": the pixel at the edge.
        interpolation: "bilinear": between the centers of four pixels; "nearest": the nearest pixel.
        fill_value: value outside of an image, for the mode "constant".

    Raises:
        InvalidLayer: the mode or the interpolation is unknown.
    """

    fill_mode: FillMode = "reflect"
    interpolation: Interpolation = "bilinear"
    fill_value: float = 0.0

    def __post_init__(self) -> None:
        modes, kinds = [*_INSIDE, "constant"], ["bilinear", "nearest"]
        self._demand(self.fill_mode in modes, f"fill_mode is {self.fill_mode!r}; give one of {', '.join(modes)}")
        known = f"interpolation is {self.interpolation!r}; give one of {', '.join(kinds)}"
        self._demand(self.interpolation in kinds, known)

    @abstractmethod
    def _maps(self, rng: np.random.Generator, count: int, height: int, width: int) -> Maps:
        """Returns the affine map of each image.

        Args:
            rng: draws the random numbers of this step.
            count: number of images.
            height: their height.
            width: their width.
        """

    def _changed(self, x: Array, rng: np.random.Generator) -> Changed:
        xp, (count, height, width, channels) = namespace_of(x), x.shape
        maps = xp.asarray(self._maps(rng, count, height, width))[..., None, None]
        rows, columns = xp.arange(height)[:, None], xp.arange(width)
        places = [maps[:, axis, 0] * rows + maps[:, axis, 1] * columns + maps[:, axis, 2] for axis in (0, 1)]
        flat = x.reshape(-1, channels)
        first = (xp.arange(count) * height * width)[:, None, None]
        y = xp.zeros_like(x)
        taken: list[tuple[Array, Array]] = []
        for neighbors in product(*(self._neighbors(xp, *it) for it in zip(places, (height, width), strict=True))):
            (row, row_share, row_inside), (column, column_share, column_inside) = neighbors
            inside = row_inside & column_inside
            share = (row_share * column_share).astype(x.dtype)[..., None]
            index = xp.where(inside, first + row * width + column, 0)
            within = share * inside[..., None]
            y += flat[index] * within + self.fill_value * (share - within)
            taken.append((index, within))

        def pull(dy: Array) -> Array:
            dx = xp.zeros_like(flat)
            for index, share in taken:
                xp.add.at(dx, index, dy * share)
            return dx.reshape(x.shape)

        return y, pull

    def _neighbors(self, xp: Namespace, places: Array, length: int) -> Iterator[tuple[Array, Array, Array]]:
        """Yields the pixels around places along one axis: their numbers, their shares, and whether they exist.

        Args:
            xp: the array namespace.
            places: places along the axis.
            length: number of pixels along the axis.
        """
        if self.interpolation == "nearest":  # halves are rounded away from 0
            found = [(xp.sign(places) * xp.floor(abs(places) + 0.5), xp.ones_like(places))]
        else:
            below = xp.floor(places)
            found = [(below, 1 - (places - below)), (below + 1, places - below)]
        for place, share in found:
            number = place.astype("int64")
            if self.fill_mode == "constant":
                yield number, share, (number >= 0) & (number < length)
            else:
                yield _INSIDE[self.fill_mode](xp, number, length), share, xp.ones(number.shape, bool)


@dataclass(frozen=True)
class RandomRotation(Warp):
    """Rotates each image around its middle by a random angle.

    Args:
        turns: lowest and highest angle, in full turns. Above 0 is counterclockwise.
        fill_mode: see `Warp`.
        interpolation: see `Warp`.
        fill_value: see `Warp`.
    """

    turns: LowHigh

    def _maps(self, rng: np.random.Generator, count: int, height: int, width: int) -> Maps:
        return affine_maps.rotations(rng.uniform(*self.turns, count), height, width)


@dataclass(frozen=True)
class RandomZoom(Warp):
    """Makes each image smaller or larger by random factors.

    Args:
        heights: lowest and highest height of the part that is shown, in heights of the image. Above 1 zooms out.
        widths: the same for the width. None means the factor of the height.
        fill_mode: see `Warp`.
        interpolation: see `Warp`.
        fill_value: see `Warp`.
    """

    heights: LowHigh
    widths: LowHigh | None = None

    def _maps(self, rng: np.random.Generator, count: int, height: int, width: int) -> Maps:
        down = rng.uniform(*self.heights, count)
        across = down if self.widths is None else rng.uniform(*self.widths, count)
        return affine_maps.zooms(down, across, height, width)


@dataclass(frozen=True)
class RandomTranslation(Warp):
    """Moves each image by random distances.

    Args:
        heights: lowest and highest distance down, in heights of the image.
        widths: lowest and highest distance to the right, in widths of the image.
        fill_mode: see `Warp`.
        interpolation: see `Warp`.
        fill_value: see `Warp`.
    """

    heights: LowHigh
    widths: LowHigh

    def _maps(self, rng: np.random.Generator, count: int, height: int, width: int) -> Maps:
        down, across = (rng.uniform(*bounds, count) for bounds in (self.heights, self.widths))
        return affine_maps.translations(down * height, across * width)


def _reflected(xp: Namespace, number: Array, length: int) -> Array:  # noqa: ARG001 - by operators
    return (abs((2 * number + 1 + 2 * length) % (4 * length) - 2 * length) - 1) // 2


# By mode: the number of the pixel of the image that lies at a number outside of it.
_INSIDE: Mapping[str, Callable[[Namespace, Array, int], Array]] = {
    "reflect": _reflected,
    "wrap": lambda _, number, length: number % length,
    "nearest": lambda xp, number, length: xp.clip(number, 0, length - 1),
}

__all__ = ["RandomRotation", "RandomTranslation", "RandomZoom", "Warp"]
