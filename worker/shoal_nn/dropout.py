"""Dropout: noise that training has and evaluation has not."""

from collections.abc import Callable
from dataclasses import dataclass

from shoal.program import Array
from shoal_nn.layer import Shape, StatelessLayer, Train, TrainingContext
from shoal_worker.arrays import namespace_of


@dataclass(frozen=True)
class Dropout(StatelessLayer):
    """In training, each element is 0 with probability `rate`, otherwise x / (1 - rate) (Srivastava et al., JMLR 2014).

    Which ones follows from the seed of `TrainingContext` and the layer's path alone; in evaluation it is the identity.

    Args:
        rate: from [0, 1).

    Raises:
        InvalidLayer: rate is not.
    """

    rate: float = 0.5

    def __post_init__(self) -> None:
        self._demand(0 <= self.rate < 1, f"rate is {self.rate}; it must be 0 or more and less than 1")

    def output_shape(self, shape: Shape) -> Shape:
        return shape

    def _value(self, x: Array, train: Train) -> tuple[Array, Callable[[Array], Array]]:
        if not self._trains(train) or self.rate == 0:
            return x, lambda dy: dy
        assert isinstance(train, TrainingContext)
        drawn = train.generator(namespace_of(x)).random(x.shape, dtype="float32")
        factor = ((drawn >= self.rate) * (1 / (1 - self.rate))).astype(x.dtype)
        return x * factor, lambda dy: dy * factor


__all__ = ["Dropout"]
