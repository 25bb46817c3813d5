"""Dropout layer."""

from collections.abc import Callable
from dataclasses import dataclass

from shoal.program import Array
from shoal_nn.layer import Shape, StatelessLayer, Train, TrainingContext
from shoal_worker.arrays import namespace_of


@dataclass(frozen=True)
class Dropout(StatelessLayer):
    """Dropout (Srivastava et al., JMLR 2014).

    In training, y is 0 with probability `rate` and x / (1 - rate) otherwise. In evaluation, y = x. The choice depends
    only on the seed of `TrainingContext` and on the layer's path.

    Args:
        rate: in [0, 1).

    Raises:
        InvalidLayer: rate is out of range.
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
