"""What is done to images before a model sees them: functions of whole batches, and steps that draw their arguments.

Images are [n, height, width, channels]. Functions take what was drawn as arguments. An `Augmentation` draws it from a
seed and the samples' numbers alone: a sample is changed alike with the same seed, in whichever batch it comes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from shoal import errors
from shoal._numerics.random_streams import GOLDEN, splitmix64


def flip(images: np.ndarray, which: np.ndarray) -> np.ndarray:
    """Left and right exchanged in some images.

    Args:
        images: [n, height, width, channels].
        which: bool [n].
    """
    _check(images, "flip")
    flipped: np.ndarray = np.where(which[:, np.newaxis, np.newaxis, np.newaxis], images[:, :, ::-1], images)
    return flipped


def pad(images: np.ndarray, padding: int) -> np.ndarray:
    """Zeros on all four sides, so many pixels wide."""
    _check(images, "pad")
    return np.pad(images, ((0, 0), (padding, padding), (padding, padding), (0, 0)))


def crop(images: np.ndarray, tops: np.ndarray, lefts: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """A rectangle of each image, all of one size.

    Args:
        images: [n, height, width, channels].
        tops: whole numbers [n]: the first row of each rectangle.
        lefts: whole numbers [n]: its first column.
        size: height and width of the rectangles.

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
            f"crop: rectangles of {high} x {wide} from rows {tops.min()} to {tops.max()} and columns {lefts.min()} to "
            f"{lefts.max()} on are not within images of {height} x {width}; pad them, or take less"
        )
    if high > height or wide > width:
        raise errors.InvalidData(f"crop: images are {height} x {width}, smaller than {high} x {wide}")
    # Rows as one run of numbers: then the columns of a rectangle are copied as one piece, channels and all.
    rows = np.ascontiguousarray(images).reshape(count, height, width * channels)
    windows = np.lib.stride_tricks.sliding_window_view(rows, (high, wide * channels), axis=(1, 2))
    taken: np.ndarray = windows[np.arange(count), tops, lefts * channels]
    reshaped: np.ndarray = taken.reshape(count, high, wide, channels)
    return reshaped


def resize(images: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Bilinear interpolation between the centres of pixels; what is beyond the edge is as the edge.

    As PyTorch's `interpolate(mode="bilinear", align_corners=False, antialias=False)`: a pixel is made of four, however
    much smaller the image gets. Pillow's BILINEAR, of `ImageFolder`, averages all that a pixel covers when it shrinks;
    where it enlarges, the two agree.

    Args:
        images: [n, height, width, channels]. Whole numbers are computed as float32 and rounded to the nearest, half to
            even.
        size: height and width to come.

    Returns:
        Of the dtype of the images.
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
    """uint8 from 0 to 255 as numbers from 0 to 1; numbers that are floats already are only converted.

    Raises:
        InvalidData: the images are of other whole numbers, whose range is not known.
    """
    _check(images, "to_float")
    if images.dtype == np.uint8:
        scaled: np.ndarray = np.multiply(images, np.asarray(1 / 255, dtype), dtype=dtype)
        return scaled
    if images.dtype.kind != "f":
        raise errors.InvalidData(f"to_float: images are {images.dtype}; give uint8 or floats")
    return images.astype(dtype, copy=False)


def normalize(images: np.ndarray, mean: ArrayLike, std: ArrayLike) -> np.ndarray:
    """(images - mean) / std, for each channel.

    Args:
        images: [n, height, width, channels], of floats.
        mean: a number, or one for each channel.
        std: likewise, none of them 0.

    Raises:
        InvalidData: the images are whole numbers, or mean and std are no such numbers.
    """
    _check(images, "normalise")
    if images.dtype.kind != "f":
        raise errors.InvalidData(f"normalise: images are {images.dtype}; make them floats first, with to_float")
    means, stds = np.asarray(mean, images.dtype), np.asarray(std, images.dtype)
    for name, array in (("mean", means), ("std", stds)):
        if array.shape not in {(), (1,), (images.shape[-1],)}:
            raise errors.InvalidData(
                f"normalise: {name} has the shape {array.shape}; give a number, or one for each of "
                f"{images.shape[-1]} channels"
            )
    if not stds.all() or not np.isfinite(stds).all() or not np.isfinite(means).all():
        raise errors.InvalidData("normalise: mean or std is not finite, or a std is 0; give the statistics of the data")
    normal: np.ndarray = (images - means) / stds
    return normal


def uniforms(seed: int | Sequence[int], samples: np.ndarray, count: int) -> np.ndarray:
    """Numbers from [0, 1) for each sample, float64 [n, count], that depend on the seed and its number alone.

    SplitMix64's finalizer, once over the sample's number and once over the place in its row, each with half of the
    mixed seed.
    """
    keys = np.random.SeedSequence(seed).generate_state(2, np.uint64)
    rows = splitmix64(samples.astype(np.uint64) * GOLDEN + keys[0])
    places = np.arange(1, count + 1, dtype=np.uint64) * GOLDEN + keys[1]
    drawn: np.ndarray = (splitmix64(rows[:, np.newaxis] + places) >> np.uint64(11)) * 2.0**-53
    return drawn


class Transform(Protocol):
    """One thing that is done to a batch."""

    @property
    def draws(self) -> int:
        """Random numbers that it needs for each sample; 0: none."""
        ...

    def apply(self, images: np.ndarray, drawn: np.ndarray) -> np.ndarray:
        """New images; `drawn` is float64 [n, draws], from [0, 1). What was given is not changed."""
        ...


@dataclass(frozen=True, slots=True)
class Flip:
    """Left and right are exchanged with this probability."""

    probability: float = 0.5
    draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise errors.InvalidData(f"Flip: probability is {self.probability!r}; give a number from 0 to 1")

    def apply(self, images: np.ndarray, drawn: np.ndarray) -> np.ndarray:
        return flip(images, drawn[:, 0] < self.probability)


@dataclass(frozen=True, slots=True)
class Crop:
    """A rectangle from anywhere in the image with zeros around it.

    Args:
        padding: pixels of zeros on each side.
        size: height and width of the rectangle; None: those of the image.
    """

    padding: int = 4
    size: tuple[int, int] | None = None
    draws: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if self.padding < 0 or (self.size is not None and min(self.size) < 1):
            raise errors.InvalidData(
                f"Crop: padding is {self.padding} and size {self.size}; give 0 or more, and 1 or more"
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
    """`resize` to a height and width."""

    size: tuple[int, int]
    draws: ClassVar[int] = 0

    def apply(self, images: np.ndarray, drawn: np.ndarray) -> np.ndarray:  # noqa: ARG002 - as all steps
        return resize(images, self.size)


@dataclass(frozen=True, slots=True)
class ToFloat:
    """`to_float` of a dtype."""

    dtype: DTypeLike = np.float32
    draws: ClassVar[int] = 0

    def apply(self, images: np.ndarray, drawn: np.ndarray) -> np.ndarray:  # noqa: ARG002 - as all steps
        return to_float(images, self.dtype)


@dataclass(frozen=True, slots=True)
class Normalize:
    """`normalize` by a mean and a standard deviation, of one number or one for each channel."""

    mean: float | Sequence[float]
    std: float | Sequence[float]
    draws: ClassVar[int] = 0

    def apply(self, images: np.ndarray, drawn: np.ndarray) -> np.ndarray:  # noqa: ARG002 - as all steps
        return normalize(images, self.mean, self.std)


class Augmentation:
    """Steps, one after the other; itself a step.

        change = Augmentation(Flip(), Crop(padding=4), ToFloat(), Normalise(0.29, 0.35))
        x = change(x, seed=seed)

    There is no generator behind it, and so no state: what is drawn follows from the seed and the samples' numbers. A
    step that is added behind others changes nothing of what they draw.

    Args:
        steps: of this module, or of your own.
    """

    def __init__(self, *steps: Transform) -> None:
        self.steps = steps

    @property
    def draws(self) -> int:
        return sum(step.draws for step in self.steps)

    def __call__(
        self, images: np.ndarray, *, seed: int | Sequence[int], samples: np.ndarray | None = None
    ) -> np.ndarray:
        """The batch, changed.

        Args:
            images: [n, height, width, channels].
            seed: a whole number, 0 or more, or several. With `samples`, of the epoch; without, of the batch, such as a
                `shoal.program.RandomProgram` gets one.
            samples: their numbers in the data set, whole numbers [n]; None: their places in the batch.

        Raises:
            InvalidData: the images have other dimensions, or a step cannot do with them.
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
        for step in self.steps:
            images = step.apply(images, drawn[:, start : start + step.draws])
            start += step.draws
        return images


def _check(images: np.ndarray, who: str) -> None:
    if images.ndim != 4:
        raise errors.InvalidData(f"{who}: images have the shape {images.shape}; give [n, height, width, channels]")


def _between(old: int, new: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each pixel to come: the two that it lies between, and the share of the second."""
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
