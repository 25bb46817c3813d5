"""Image augmentation: functions of whole batches, and transforms that call these functions with random arguments.

Images are [n, height, width, channels]. Functions take random values as arguments. An `Augmentation` draws these
values. They depend only on a seed and the samples' numbers. With the same seed, a sample is transformed in the same way
in every batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from shoal import errors
from shoal._numerics.random_streams import GOLDEN, splitmix64


def flip(images: np.ndarray, which: np.ndarray) -> np.ndarray:
    """Returns the images with left and right exchanged in some of them.

    Args:
        images: [n, height, width, channels].
        which: whether to flip each image, bool [n].

    Raises:
        InvalidData: the images have another number of dimensions.
    """
    _check(images, "flip")
    flipped: np.ndarray = np.where(which[:, np.newaxis, np.newaxis, np.newaxis], images[:, :, ::-1], images)
    return flipped


def pad(images: np.ndarray, padding: int) -> np.ndarray:
    """Returns the images with `padding` pixels of zeros on all four sides."""
    _check(images, "pad")
    return np.pad(images, ((0, 0), (padding, padding), (padding, padding), (0, 0)))


def crop(images: np.ndarray, tops: np.ndarray, lefts: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Returns a rectangle of each image, all of the same size.

    Args:
        images: [n, height, width, channels].
        tops: first row of each rectangle, whole numbers [n].
        lefts: first column of each rectangle, whole numbers [n].
        size: height and width of the rectangles, in pixels.

    Returns:
        [n, *size, channels].

    Raises:
        InvalidData: a rectangle is not within its image.
    """
    _check(images, "crop")
    count, height, width, channels = images.shape
    high, wide = size
    if count and not (
        0 <= tops.min() <= tops.max() <= height - high and 0 <= lefts.min() <= lefts.max() <= width - wide
    ):
        raise errors.InvalidData(
            f"crop: rectangles of {high} x {wide} that begin at rows {tops.min()} to {tops.max()} and columns "
            f"{lefts.min()} to {lefts.max()} are not within images of {height} x {width}; pad the images, or choose "
            "smaller rectangles"
        )
    if high > height or wide > width:
        raise errors.InvalidData(f"crop: images are {height} x {width}, smaller than {high} x {wide}")
    # With columns and channels in one axis, a row of a rectangle is copied in one piece.
    rows = np.ascontiguousarray(images).reshape(count, height, width * channels)
    windows = np.lib.stride_tricks.sliding_window_view(rows, (high, wide * channels), axis=(1, 2))
    taken: np.ndarray = windows[np.arange(count), tops, lefts * channels]
    reshaped: np.ndarray = taken.reshape(count, high, wide, channels)
    return reshaped


def resize(images: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resizes images by bilinear interpolation between the centers of pixels.

    The result is that of PyTorch's `interpolate(mode="bilinear", align_corners=False, antialias=False)`: each pixel is
    interpolated from four, also when the image shrinks. Pillow's BILINEAR, which `ImageFolder` uses, averages all
    pixels that a new pixel covers. When the image grows, both give the same result.

    Args:
        images: [n, height, width, channels]. Whole numbers are computed as float32 and rounded to the nearest, half to
            even.
        size: new height and width, in pixels.

    Returns:
        [n, *size, channels], of the dtype of the images.

    Raises:
        InvalidData: the images have another number of dimensions, or `size` is below 1.
    """
    _check(images, "resize")
    if min(size) < 1:
        raise errors.InvalidData(f"resize: size is {size}; give a height and a width of 1 or more")
    dtype = images.dtype
    precise = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    below, above, share = _between(images.shape[1], size[0], precise)
    share = share[:, np.newaxis, np.newaxis]
    result: np.ndarray = images[:, below] * (1 - share) + images[:, above] * share
    below, above, share = _between(images.shape[2], size[1], precise)
    share = share[:, np.newaxis]
    result = result[:, :, below] * (1 - share) + result[:, :, above] * share
    if dtype.kind in "iu":
        result = np.rint(result)
    return result.astype(dtype, copy=False)


def to_float(images: np.ndarray, dtype: DTypeLike = np.float32) -> np.ndarray:
    """Converts uint8 images from 0 to 255 to floats from 0 to 1. Float images keep their values.

    Args:
        images: [n, height, width, channels], uint8 or floats.
        dtype: float dtype of the result.

    Raises:
        InvalidData: the images have another dtype or another number of dimensions.
    """
    _check(images, "to_float")
    if images.dtype == np.uint8:
        scaled: np.ndarray = np.multiply(images, np.asarray(1 / 255, dtype), dtype=dtype)
        return scaled
    if images.dtype.kind != "f":
        raise errors.InvalidData(f"to_float: images are {images.dtype}; give uint8 or floats")
    return images.astype(dtype, copy=False)


def normalize(images: np.ndarray, mean: ArrayLike, std: ArrayLike) -> np.ndarray:
    """Returns (images - mean) / std for each channel.

    Args:
        images: [n, height, width, channels], floats.
        mean: one number, or one for each channel.
        std: one number, or one for each channel; not 0.

    Returns:
        New images of the same shape and dtype.

    Raises:
        InvalidData: the images are not floats, or `mean` or `std` is invalid.
    """
    _check(images, "normalize")
    if images.dtype.kind != "f":
        raise errors.InvalidData(f"normalize: images are {images.dtype}; convert them with to_float first")
    means, stds = np.asarray(mean, images.dtype), np.asarray(std, images.dtype)
    for name, array in (("mean", means), ("std", stds)):
        if array.shape not in {(), (1,), (images.shape[-1],)}:
            raise errors.InvalidData(
                f"normalize: {name} has the shape {array.shape}; give a number, or one for each of "
                f"{images.shape[-1]} channels"
            )
    if not stds.all() or not np.isfinite(stds).all() or not np.isfinite(means).all():
        raise errors.InvalidData("normalize: mean or std is not finite, or a std is 0; give the statistics of the data")
    normal: np.ndarray = (images - means) / stds
    return normal


def uniforms(seed: int | Sequence[int], samples: np.ndarray, count: int) -> np.ndarray:
    """Returns random numbers in [0, 1), which depend only on the seed and the sample's number.

    The algorithm applies the finalizer of SplitMix64 twice: to the sum of the sample's number and a key, and to the sum
    of that result, the place in the row and another key. Both keys come from the seed.

    Args:
        seed: a whole number, 0 or more, or several.
        samples: numbers of the samples, whole numbers [n].
        count: random numbers per sample.

    Returns:
        float64 [n, count].
    """
    keys = np.random.SeedSequence(seed).generate_state(2, np.uint64)
    rows = splitmix64(samples.astype(np.uint64) * GOLDEN + keys[0])
    places = np.arange(1, count + 1, dtype=np.uint64) * GOLDEN + keys[1]
    drawn: np.ndarray = (splitmix64(rows[:, np.newaxis] + places) >> np.uint64(11)) * 2.0**-53
    return drawn


class Transform(Protocol):
    """A transform of a batch of images."""

    @property
    def draws(self) -> int:
        """The number of random numbers that the transform needs for each sample, 0 or more."""
        ...

    def apply(self, images: np.ndarray, drawn: np.ndarray) -> np.ndarray:
        """Returns new images, without changing the given ones.

        Args:
            images: [n, height, width, channels].
            drawn: random numbers in [0, 1), float64 [n, draws].
        """
        ...


@dataclass(frozen=True, slots=True)
class Flip:
    """Exchanges left and right of each image at random.

    Args:
        probability: probability of the exchange, from 0 to 1.

    Raises:
        InvalidData: the probability is out of range.
    """

    probability: float = 0.5
    draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise errors.InvalidData(f"Flip: probability is {self.probability!r}; give a number from 0 to 1")

    def apply(self, images: np.ndarray, drawn: np.ndarray) -> np.ndarray:
        return flip(images, drawn[:, 0] < self.probability)


@dataclass(frozen=True, slots=True)
class Crop:
    """Pads each image with zeros, and cuts out a rectangle at a random position.

    Args:
        padding: pixels of zeros on each side, 0 or more.
        size: height and width of the rectangle, in pixels. None means those of the image.

    Raises:
        InvalidData: an argument is out of range.
    """

    padding: int = 4
    size: tuple[int, int] | None = None
    draws: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if self.padding < 0 or (self.size is not None and min(self.size) < 1):
            raise errors.InvalidData(
                f"Crop: padding is {self.padding} and size {self.size}; padding must be 0 or more, and size 1 or more"
            )

    def apply(self, images: np.ndarray, drawn: np.ndarray) -> np.ndarray:
        padded = pad(images, self.padding) if self.padding else images
        size = self.size or images.shape[1:3]
        room = np.array(padded.shape[1:3]) - size
        if room.min() < 0:
            raise errors.InvalidData(
                f"Crop: images with padding are {padded.shape[1]} x {padded.shape[2]}, smaller than "
                f"{size[0]} x {size[1]}"
            )
        corners = (drawn * (room + 1)).astype(np.int64)
        return crop(padded, corners[:, 0], corners[:, 1], (size[0], size[1]))


@dataclass(frozen=True, slots=True)
class Resize:
    """Resizes images with `resize` to a height and width in pixels."""

    size: tuple[int, int]
    draws: ClassVar[int] = 0

    def apply(self, images: np.ndarray, drawn: np.ndarray) -> np.ndarray:  # noqa: ARG002 - the interface of transforms
        return resize(images, self.size)


@dataclass(frozen=True, slots=True)
class ToFloat:
    """Converts images with `to_float` to a float dtype."""

    dtype: DTypeLike = np.float32
    draws: ClassVar[int] = 0

    def apply(self, images: np.ndarray, drawn: np.ndarray) -> np.ndarray:  # noqa: ARG002 - the interface of transforms
        return to_float(images, self.dtype)


@dataclass(frozen=True, slots=True)
class Normalize:
    """Applies `normalize` with a mean and a standard deviation: one number each, or one for each channel."""

    mean: float | Sequence[float]
    std: float | Sequence[float]
    draws: ClassVar[int] = 0

    def apply(self, images: np.ndarray, drawn: np.ndarray) -> np.ndarray:  # noqa: ARG002 - the interface of transforms
        return normalize(images, self.mean, self.std)


class Augmentation:
    """A sequence of transforms, which is itself a transform.

        augmentation = Augmentation(Flip(), Crop(padding=4), ToFloat(), Normalize(0.29, 0.35))
        x = augmentation(x, seed=seed)

    It has no state: the random numbers depend only on the seed and the samples' numbers. A transform that is added at
    the end does not change the random numbers of the others.

    Args:
        transforms: transforms of this module, or your own.

    Attributes:
        transforms: the transforms.
    """

    def __init__(self, *transforms: Transform) -> None:
        self.transforms = transforms

    @property
    def draws(self) -> int:
        """The number of random numbers for each sample, of all transforms."""
        return sum(transform.draws for transform in self.transforms)

    def __call__(
        self, images: np.ndarray, *, seed: int | Sequence[int], samples: np.ndarray | None = None
    ) -> np.ndarray:
        """Returns the transformed images.

        Args:
            images: [n, height, width, channels].
            seed: a whole number, 0 or more, or several: the seed of the epoch with `samples`, or the seed of the batch
                without, such as a `shoal.program.RandomProgram` receives.
            samples: numbers of the samples in the data set, whole numbers [n]. None means their places in the batch.

        Raises:
            InvalidData: the images have another number of dimensions, or a transform does not accept them.
        """
        _check(images, "Augmentation")
        numbers = np.arange(len(images)) if samples is None else np.asarray(samples)
        if len(numbers) != len(images):
            raise errors.InvalidData(
                f"Augmentation: {len(images)} images have {len(numbers)} numbers; give one for each"
            )
        return self.apply(images, uniforms(seed, numbers, self.draws))

    def apply(self, images: np.ndarray, drawn: np.ndarray) -> np.ndarray:
        start = 0
        for transform in self.transforms:
            images = transform.apply(images, drawn[:, start : start + transform.draws])
            start += transform.draws
        return images


def _check(images: np.ndarray, function: str) -> None:
    if images.ndim != 4:
        raise errors.InvalidData(f"{function}: images have the shape {images.shape}; give [n, height, width, channels]")


def _between(old: int, new: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns for each new pixel the two old ones that it lies between, and the share of the second."""
    centres = np.clip((np.arange(new) + 0.5) * (old / new) - 0.5, 0, old - 1)
    below = centres.astype(np.int64)
    return below, np.minimum(below + 1, old - 1), (centres - below).astype(dtype)


__all__ = [
    "Augmentation",
    "Crop",
    "Flip",
    "Normalize",
    "Resize",
    "ToFloat",
    "Transform",
    "crop",
    "flip",
    "normalize",
    "pad",
    "resize",
    "to_float",
    "uniforms",
]
