"""Variables of metrics that users define: `Metric.add_weight`."""

from typing import Any, Protocol

from shoal.program import Array
from shoal_distribute.keras.tensor import Tensor, array_of
from shoal_worker.arrays import namespace_of


class SumsOwner(Protocol):
    """What a variable asks its metric."""

    def present_sums(self) -> list[Array]:
        """See `Metric`."""

    def replace_sum(self, number: int, value: Array) -> None:
        """See `Metric`."""


class MetricVariable(Tensor):
    """Variable of a metric: a tensor whose array is the sum at this moment.

    Within `Strategy.run`, it is the sum of the replica. Within the `result` of the metric, it is the sum that `result`
    is asked for: of the replica, of the process or of all processes.

    Args:
        metric: the metric.
        number: its number among the variables of the metric.
        initial: its initial value.
        name: its name.

    Attributes:
        name: its name.
    """

    __slots__ = ("_initial", "_metric", "_number", "name")

    def __init__(self, metric: SumsOwner, number: int, initial: Array, name: str) -> None:
        self._whole, self.node = None, None
        self._metric, self._number, self._initial, self.name = metric, number, initial, name

    @property
    def stored(self) -> Array:
        """The sum. The metric keeps it without the initial value, so that the sums of replicas can be added."""
        added = self._metric.present_sums()[self._number]
        return added + namespace_of(added).asarray(self._initial)

    def assign(self, value: Any) -> None:
        """Sets the sum. Outside of `Strategy.run`, it sets that of the first replica, and the others' to 0.

        Args:
            value: the sum.
        """
        array = array_of(value)
        xp = namespace_of(array)
        self._metric.replace_sum(self._number, xp.asarray(array) - xp.asarray(self._initial))

    def assign_add(self, value: Any) -> None:
        """Adds to the sum."""
        self.assign(self + value)

    def assign_sub(self, value: Any) -> None:
        """Subtracts from the sum."""
        self.assign(self - value)


__all__ = ["MetricVariable"]
