"""Layers that change images at random in training, and crops. In evaluation, random layers return the images."""

from collections.abc import Sequence
from typing import Any

import shoal_nn
from shoal import errors
from shoal_distribute.keras.layers.core import check_channels_last
from shoal_distribute.keras.layers.core_layer import CoreLayer
from shoal_distribute.keras.names import advice
from shoal_nn import augmentation
from shoal_nn.augmentation.image_layer import LowHigh

Factor = float | Sequence[float]
_FLIPS = {"horizontal": (True, False), "vertical": (False, True), "horizontal_and_vertical": (True, True)}


class ImageAugmentation(CoreLayer):
    """Base class of layers that a layer of `shoal_nn.augmentation` computes.

    Args:
        layer: that layer.
        seed: seed of the random numbers; None means one that `keras.utils.set_random_seed` determines.
        data_format: must be None or "channels_last".
        **kwargs: see `Layer`.
    """

    def __init__(self, layer: shoal_nn.Layer, seed: int | None, data_format: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_channels_last(type(self).__name__, data_format)
        self._layer = layer
        self._seed = self._seed if seed is None else seed

    def core(self) -> shoal_nn.Layer:
        return self._layer


class RandomFlip(ImageAugmentation):
    """Mirrors half of the images.

    Args:
        mode: "horizontal", "vertical" or "horizontal_and_vertical". The last one mirrors an image both ways, or not at
            all.
        seed: seed of the random numbers; None means one that `keras.utils.set_random_seed` determines.
        data_format: must be None or "channels_last".
        **kwargs: see `Layer`.

    Raises:
        InvalidLayer: the mode is unknown.
    """

    def __init__(
        self,
        mode: str = "horizontal_and_vertical",
        seed: int | None = None,
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        if mode not in _FLIPS:
            raise errors.InvalidLayer(f"RandomFlip: mode is {mode!r}; {advice(str(mode), _FLIPS)}", kind="RandomFlip")
        super().__init__(augmentation.RandomFlip(*_FLIPS[mode]), seed, data_format, **kwargs)


class RandomRotation(ImageAugmentation):
    """Rotates each image around its middle.

    Args:
        factor: lowest and highest angle in full turns, or one number for both directions.
        fill_mode: what lies outside of an image: "reflect", "wrap", "constant" or "nearest".
        interpolation: "bilinear" or "nearest".
        seed: see `RandomFlip`.
        fill_value: value outside of an image, for `fill_mode="constant"`.
        data_format: must be None or "channels_last".
        **kwargs: see `Layer`.

    Raises:
        InvalidLayer: an argument is another one.
    """

    def __init__(
        self,
        factor: Factor,
        fill_mode: Any = "reflect",
        interpolation: Any = "bilinear",
        seed: int | None = None,
        fill_value: float = 0.0,
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        options = {"fill_mode": fill_mode, "interpolation": interpolation, "fill_value": fill_value}
        turns = _bounds("RandomRotation", "factor", factor)
        super().__init__(augmentation.RandomRotation(turns, **options), seed, data_format, **kwargs)


class RandomZoom(ImageAugmentation):
    """Makes each image smaller or larger.

    Args:
        height_factor: lowest and highest change of the height that is shown, or one number for both directions. 0.2
            shows 20 % more, and -0.2 shows 20 % less.
        width_factor: the same for the width. None means as the height.
        fill_mode: see `RandomRotation`.
        interpolation: see `RandomRotation`.
        seed: see `RandomFlip`.
        fill_value: see `RandomRotation`.
        data_format: must be None or "channels_last".
        **kwargs: see `Layer`.

    Raises:
        InvalidLayer: an argument is another one.
    """

    def __init__(
        self,
        height_factor: Factor,
        width_factor: Factor | None = None,
        fill_mode: Any = "reflect",
        interpolation: Any = "bilinear",
        seed: int | None = None,
        fill_value: float = 0.0,
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        options = {"fill_mode": fill_mode, "interpolation": interpolation, "fill_value": fill_value}
        heights = _added(1, _bounds("RandomZoom", "height_factor", height_factor))
        widths = None if width_factor is None else _added(1, _bounds("RandomZoom", "width_factor", width_factor))
        super().__init__(augmentation.RandomZoom(heights, widths, **options), seed, data_format, **kwargs)


class RandomTranslation(ImageAugmentation):
    """Moves each image.

    Args:
        height_factor: lowest and highest distance down, as shares of the height, or one number for both directions.
        width_factor: the same to the right, as shares of the width.
        fill_mode: see `RandomRotation`.
        interpolation: see `RandomRotation`.
        seed: see `RandomFlip`.
        fill_value: see `RandomRotation`.
        data_format: must be None or "channels_last".
        **kwargs: see `Layer`.

    Raises:
        InvalidLayer: an argument is another one.
    """

    def __init__(
        self,
        height_factor: Factor,
        width_factor: Factor,
        fill_mode: Any = "reflect",
        interpolation: Any = "bilinear",
        seed: int | None = None,
        fill_value: float = 0.0,
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        options = {"fill_mode": fill_mode, "interpolation": interpolation, "fill_value": fill_value}
        heights = _bounds("RandomTranslation", "height_factor", height_factor)
        widths = _bounds("RandomTranslation", "width_factor", width_factor)
        super().__init__(augmentation.RandomTranslation(heights, widths, **options), seed, data_format, **kwargs)


class RandomCrop(ImageAugmentation):
    """Cuts a box out of all images of a batch, at the same random place. In evaluation, it acts as `CenterCrop`.

    Args:
        height: height of the box.
        width: width of the box.
        seed: see `RandomFlip`.
        data_format: must be None or "channels_last".
        **kwargs: see `Layer`.

    Raises:
        InvalidLayer: a length is below 1.
    """

    def __init__(
        self, height: int, width: int, seed: int | None = None, data_format: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(augmentation.RandomCrop((height, width)), seed, data_format, **kwargs)


class CenterCrop(ImageAugmentation):
    """Cuts out the middle of images. Smaller images are cropped to the ratio of the box, and resized.

    Args:
        height: height of the box.
        width: width of the box.
        data_format: must be None or "channels_last".
        **kwargs: see `Layer`.

    Raises:
        InvalidLayer: a length is below 1.
    """

    def __init__(self, height: int, width: int, data_format: str | None = None, **kwargs: Any) -> None:
        super().__init__(augmentation.CenterCrop((height, width)), None, data_format, **kwargs)


class RandomContrast(ImageAugmentation):
    """Multiplies the distances of an image from the mean of each channel by a random factor.

    Args:
        factor: how far below and above 1 the factor may be. One number means above 1 only, as in Keras. One number, and
            the second of two, must be 0 or more.
        value_range: lowest and highest value of the result.
        seed: see `RandomFlip`.
        **kwargs: see `Layer`.

    Raises:
        InvalidLayer: an argument is another one.
    """

    def __init__(
        self, factor: Factor, value_range: Sequence[float] = (0, 255), seed: int | None = None, **kwargs: Any
    ) -> None:
        below, above = _bounds("RandomContrast", "factor", factor, lowest=0)
        layer = augmentation.RandomContrast((1 - below, 1 + above), _range("RandomContrast", value_range))
        super().__init__(layer, seed, **kwargs)


class RandomBrightness(ImageAugmentation):
    """Adds a random number to each image.

    Args:
        factor: lowest and highest number, as shares of the length of `value_range`, or one number for both directions.
        value_range: lowest and highest value of the result.
        seed: see `RandomFlip`.
        **kwargs: see `Layer`.

    Raises:
        InvalidLayer: an argument is another one.
    """

    def __init__(
        self, factor: Factor, value_range: Sequence[float] = (0, 255), seed: int | None = None, **kwargs: Any
    ) -> None:
        shares = _bounds("RandomBrightness", "factor", factor)
        super().__init__(augmentation.RandomBrightness(shares, _range("RandomBrightness", value_range)), seed, **kwargs)


def _bounds(layer: str, name: str, factor: Any, lowest: float = -1) -> LowHigh:
    """Returns the lowest and the highest value that a factor stands for.

    Args:
        layer: name of the layer's class.
        name: name of the argument.
        factor: two numbers, or one for both directions.
        lowest: what one number, and the second of two, must not be below, as in Keras.
    """
    given = list(factor) if isinstance(factor, Sequence) and not isinstance(factor, str) else [factor]
    is_valid = 1 <= len(given) <= 2 and all(isinstance(it, int | float) and -1 <= it <= 1 for it in given)
    if not is_valid or given[-1] < lowest:
        exact = f"give a number from {lowest:g} to 1, or two from -1 to 1, the second from {lowest:g}"
        allowed = exact if lowest > -1 else "give a number, or two, from -1 to 1"
        raise errors.InvalidLayer(f"{layer}: {name} is {factor!r}; {allowed}", kind=layer)
    if len(given) == 2:
        return min(given), max(given)
    return max(-abs(given[0]), lowest), abs(given[0])


def _range(layer: str, value_range: Any) -> LowHigh:
    """Returns the lowest and the highest value of a range."""
    if not isinstance(value_range, Sequence) or len(value_range) != 2:
        raise errors.InvalidLayer(f"{layer}: value_range is {value_range!r}; give two numbers", kind=layer)
    return min(value_range), max(value_range)


def _added(number: float, bounds: LowHigh) -> LowHigh:
    return number + bounds[0], number + bounds[1]


__all__ = [
    "CenterCrop",
    "RandomBrightness",
    "RandomContrast",
    "RandomCrop",
    "RandomFlip",
    "RandomRotation",
    "RandomTranslation",
    "RandomZoom",
]
