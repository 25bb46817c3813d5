"""Base class of layers that change images at random."""

from abc import abstractmethod
from collections.abc import Callable

import numpy as np

from shoal.program import Array
from shoal_nn.layer import Shape, StatelessLayer, Train, TrainingContext

# What a change returns: the images, and a function that returns dx for dy.
Changed = tuple[Array, Callable[[Array], Array]]
# The lowest and the highest value of a random number. They may be equal.
LowHigh = tuple[float, float]


class ImageLayer(StatelessLayer):
    """Layer that changes images [batch, height, width, channels] in training."""

    def output_shape(self, shape: Shape) -> Shape:
        self._require(len(shape) == 3, shape, "three axes: (height, width, channels)")
        return shape

    def _value(self, x: Array, train: Train) -> Changed:
        self._require_floats(x)
        if not self._trains(train):
            return self._evaluated(x)
        assert isinstance(train, TrainingContext)
        return self._changed(x, train.generator(np))

    def _evaluated(self, x: Array) -> Changed:
        """Returns the images as they are in evaluation."""
        return x, lambda dy: dy

    @abstractmethod
    def _changed(self, x: Array, rng: np.random.Generator) -> Changed:
        """Returns the changed images.

        Args:
            x: images, floats.
            rng: draws the random numbers of this step.
        """


__all__ = ["Changed", "ImageLayer", "LowHigh"]
