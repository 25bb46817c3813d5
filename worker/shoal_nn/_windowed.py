"""Base class of convolutions and pooling: settings of windows, and their positions."""

from typing import Any

from shoal_nn._ops import Padding, Pair, Windows, explicit, pair, windows_over
from shoal_nn.layer import Layer, Shape


class Windowed(Layer):
    """Base class of layers over windows of images. A pair may be given as a list, as in JSON."""

    window: Pair
    strides: Pair | None
    padding: Padding

    def _check_windows(self, *, overlapping: bool = False) -> None:
        """Raises InvalidLayer if a setting is invalid.

        Args:
            overlapping: whether each window must overlap the image.
        """
        self._demand(_are_lengths(self.window, 1), f"window is {self.window!r}; give 1 or more, or two such numbers")
        self._demand(_are_lengths(self._steps, 1), f"strides are {self.strides!r}; give 1 or more, or two such numbers")
        if self.padding in ("same", "valid"):
            return
        sides = (self.padding,) * 2 if isinstance(self.padding, int) else self.padding
        lists = isinstance(sides, tuple | list) and len(sides) == 2
        named = f"padding is {self.padding!r}; give same, valid, "
        self._demand(
            lists and all(_are_lengths(side, 0) for side in sides), named + "or the number of zero rows and columns"
        )
        height, width = pair(self.window)
        fits = all(
            side < size for side, size in zip(explicit(self.padding), (height, height, width, width), strict=True)
        )
        self._demand(fits or not overlapping, named + f"or fewer zeros than the window has, {self.window}")

    def _windows(self, shape: Shape) -> Windows:
        """Returns the windows over images of this shape. Raises InvalidShape if it does not fit."""
        self._require(len(shape) == 3, shape, "three axes: (height, width, channels)")
        windows = windows_over((shape[0], shape[1]), self.window, self._steps, self.padding)
        height, width = pair(self.window)
        self._require(min(windows.outputs) > 0, shape, f"images of {height}x{width} at least, with their padding")
        return windows

    @property
    def _steps(self) -> Pair:
        return self.window if self.strides is None else self.strides


def _are_lengths(given: Any, least: int) -> bool:
    """Returns whether the value is an integer >= `least`, or a pair of such integers."""
    lengths = given if isinstance(given, tuple | list) and len(given) == 2 else [given]
    return all(isinstance(each, int) and each >= least for each in lengths)


__all__ = ["Windowed"]
