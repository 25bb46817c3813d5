"""Flips, crops, contrast and brightness."""

from dataclasses import dataclass

import numpy as np

from shoal.program import Array
from shoal_nn.augmentation.image_layer import Changed, ImageLayer, LowHigh
from shoal_nn.layer import Shape
from shoal_nn.reshaping import Interpolate
from shoal_worker.arrays import namespace_of


@dataclass(frozen=True)
class RandomFlip(ImageLayer):
    """Mirrors half of the images.

    Args:
        horizontal: whether left and right are exchanged.
        vertical: whether top and bottom are exchanged. An image is mirrored both ways, or not at all.
    """

    horizontal: bool = True
    vertical: bool = True

    def _changed(self, x: Array, rng: np.random.Generator) -> Changed:
        xp = namespace_of(x)
        flips = xp.asarray(rng.random((len(x), 1, 1, 1)) <= 0.5)
        axes = (*((1,) if self.vertical else ()), *((2,) if self.horizontal else ()))

        def flipped(images: Array) -> Array:
            return xp.where(flips, xp.flip(images, axes), images)

        return flipped(x), flipped


@dataclass(frozen=True)
class CenterCrop(ImageLayer):
    """Cuts out the middle of images. Smaller images are cropped to the ratio of the size, and resized.

    Args:
        size: height and width, each 1 or more.

    Raises:
        InvalidLayer: a length is below 1.
    """

    size: tuple[int, int]

    def __post_init__(self) -> None:
        self._demand(min(self.size) >= 1, f"size is {self.size}; give a height and a width of 1 or more")

    def output_shape(self, shape: Shape) -> Shape:
        return *self.size, super().output_shape(shape)[2]

    def _evaluated(self, x: Array) -> Changed:
        return self._centered(x)

    def _changed(self, x: Array, rng: np.random.Generator) -> Changed:  # noqa: ARG002 - acts the same
        return self._centered(x)

    def _centered(self, x: Array) -> Changed:
        rooms = [has - wants for has, wants in zip(x.shape[1:3], self.size, strict=True)]
        if min(rooms) >= 0:
            return _cut(x, [room // 2 for room in rooms], self.size)
        return self._resized(x, *self._box(x))

    def _box(self, x: Array) -> tuple[list[int], tuple[int, int]]:
        """Returns the corner and the size of the largest box in the middle that has the ratio of the size."""
        (height, width), (wanted_height, wanted_width) = x.shape[1:3], self.size
        size = (
            max(min(height, int(width * wanted_height / wanted_width)), 1),
            max(min(width, int(height * wanted_width / wanted_height)), 1),
        )
        return [int((has - cut) / 2) for has, cut in zip((height, width), size, strict=True)], size

    def _resized(self, x: Array, corner: list[int], size: tuple[int, int]) -> Changed:
        """Returns boxes of images, resized if that is needed."""
        cut, pull_cut = _cut(x, corner, size)
        if cut.shape[1:3] == self.size:
            return cut, pull_cut
        y, _, pull = Interpolate(self.size).apply({}, {}, cut, False)
        return y, lambda dy: pull_cut(pull(dy)[1])


@dataclass(frozen=True)
class RandomCrop(CenterCrop):
    """Cuts a box out of all images of a batch, at the same random place. In evaluation, it acts as `CenterCrop`.

    Images that are not larger than the size in both directions are cut at a fixed place, and resized if needed.

    Args:
        size: height and width of the box, each 1 or more.

    Raises:
        InvalidLayer: a length is below 1.
    """

    def _changed(self, x: Array, rng: np.random.Generator) -> Changed:
        rooms = [has - wants for has, wants in zip(x.shape[1:3], self.size, strict=True)]
        if min(rooms) > 0:
            return _cut(x, [int(rng.integers(0, room + 1)) for room in rooms], self.size)
        return self._resized(x, self._box(x)[0], self.size)


@dataclass(frozen=True)
class RandomContrast(ImageLayer):
    """Multiplies the distances of an image from the mean of each channel by a random factor.

    Args:
        factors: lowest and highest factor.
        value_range: lowest and highest value of the result.
    """

    factors: LowHigh
    value_range: LowHigh

    def _changed(self, x: Array, rng: np.random.Generator) -> Changed:
        factor = namespace_of(x).asarray(rng.uniform(*self.factors, (len(x), 1, 1, 1)), x.dtype)
        mean = x.mean(axis=(1, 2), keepdims=True)
        y, kept = _clipped((x - mean) * factor + mean, self.value_range)

        def pull(dy: Array) -> Array:
            slope = dy * kept
            return slope * factor + slope.mean(axis=(1, 2), keepdims=True) * (1 - factor)

        return y, pull


@dataclass(frozen=True)
class RandomBrightness(ImageLayer):
    """Adds a random number to each image.

    Args:
        shares: lowest and highest number, as shares of the length of `value_range`.
        value_range: lowest and highest value of the result.
    """

    shares: LowHigh
    value_range: LowHigh

    def _changed(self, x: Array, rng: np.random.Generator) -> Changed:
        low, high = self.value_range
        added = rng.uniform(*self.shares, (len(x), 1, 1, 1)) * (high - low)
        y, kept = _clipped(x + namespace_of(x).asarray(added, x.dtype), self.value_range)
        return y, lambda dy: dy * kept


def _clipped(x: Array, value_range: LowHigh) -> tuple[Array, Array]:
    """Returns values within a range, and which ones were in it."""
    low, high = value_range
    return x.clip(low, high), (x >= low) & (x <= high)


def _cut(x: Array, corner: list[int], size: tuple[int, int]) -> Changed:
    """Returns boxes of images. They end where the image ends."""
    (top, left), (height, width) = corner, size
    box = (slice(None), slice(top, top + height), slice(left, left + width))

    def pull(dy: Array) -> Array:
        dx = namespace_of(dy).zeros(x.shape, dy.dtype)
        dx[box] = dy
        return dx

    return x[box], pull


__all__ = ["CenterCrop", "RandomBrightness", "RandomContrast", "RandomCrop", "RandomFlip"]
