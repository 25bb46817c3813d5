"""Base classes of metrics: sums that the replicas collect, each for itself, and that are added when they are read."""

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from shoal import errors
from shoal.initializers import fill
from shoal.program import Array
from shoal_distribute.collectives import ReduceOp
from shoal_distribute.keras import config, initializers
from shoal_distribute.keras.metrics.variables import MetricVariable
from shoal_distribute.keras.names import Advising, checked_dtype, snake_case
from shoal_distribute.keras.tensor import Tensor, array_of
from shoal_distribute.replica_context import current_replica
from shoal_distribute.strategies import get_strategy
from shoal_distribute.values import PerReplica
from shoal_worker.arrays import namespace_of, on_host

_OURS = "shoal_distribute.keras.metrics."


class Metric(Advising):
    """Metric: sums over samples, and what they amount to.

    Within `Strategy.run`, `update_state` adds to the sums of the replica that calls it. `result` adds up those of all
    replicas and processes; within `run`, it is the replica's own. All processes must ask for results together.

    Args:
        dtype: dtype of the result; None means float64. The sums are always float64.
        name: its name. None means the class' in snake case.

    Raises:
        BadRequest: the dtype is unknown.
    """

    _of_user: ClassVar[Callable[[Any], Any] | None] = None  # the `result` of a user's class

    def __init__(self, dtype: str | None = None, name: str | None = None) -> None:
        self.name = name or snake_case(type(self).__name__)
        self.dtype = checked_dtype(self.name, dtype)
        self.strategy = get_strategy()
        self._sums: dict[int, list[Array]] = {}  # by replica of this process
        self._variables: list[MetricVariable] = []
        self._initial: list[np.ndarray] = []
        self._asked = threading.local()  # "sums": those that the `result` of a user's class is called for

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "result" in cls.__dict__ and not cls.__module__.startswith(_OURS):
            cls._of_user = cls.__dict__["result"]  # `Metric.result` calls it with the sums of all replicas
            del cls.result

    def value(self, *sums: np.ndarray) -> Any:
        """Returns the metric for its sums. A subclass defines it, or `result`."""
        raise NotImplementedError(f"metric {self.name} has no result; define result() in {type(self).__name__}")

    def empty(self) -> list[np.ndarray]:
        """Returns the sums over no samples."""
        return [np.zeros_like(it) for it in self._initial] if self._initial else [np.zeros(()), np.zeros(())]

    def add_weight(
        self,
        shape: Sequence[int] | int = (),
        initializer: Any = None,
        dtype: str | None = None,
        name: str | None = None,
    ) -> MetricVariable:
        """Returns a new variable, whose values of all replicas are added.

        Args:
            shape: its shape.
            initializer: name or object; None means zeros.
            dtype: its dtype; None means float64.
            name: its name; None means "variable".
        """
        lengths = (shape,) if isinstance(shape, int) else tuple(shape)
        values, named = np.empty(lengths, dtype or np.float64), name or "variable"
        fill(values.reshape(-1), initializers.get(initializer or "zeros"), named, lengths, config.next_seed())
        made = MetricVariable(self, len(self._variables), values, named)
        self._variables.append(made)
        self._initial.append(values)
        return made

    add_variable = add_weight

    @property
    def variables(self) -> list[MetricVariable]:
        """The variables that `add_weight` has made."""
        return list(self._variables)

    def present_sums(self) -> list[Array]:
        """Returns the sums that variables have at this place; see `MetricVariable`."""
        if found := getattr(self._asked, "sums", None):
            return list(found)
        replica, own = current_replica(), self._own_sums()
        if replica:
            return [replica.device.put(it) for it in own[replica.local_replica]]
        return [sum(map(on_host, it), np.zeros(())) for it in zip(*own, strict=True)]

    def replace_sum(self, number: int, value: Array) -> None:
        """Sets a sum; see `MetricVariable.assign`.

        Args:
            number: number of the variable.
            value: the sum, without the initial value.
        """
        replica, own = current_replica(), self._own_sums()
        for local, sums in enumerate(own) if replica is None else [(replica.local_replica, own[replica.local_replica])]:
            first = replica is not None or local == 0
            self._sums[local] = [*sums[:number], value if first else value * 0, *sums[number + 1 :]]

    def add(self, *parts: Array) -> None:
        """Adds to the sums of the replica that runs.

        Args:
            *parts: what to add to each.

        Raises:
            WrongContext: the metric was made in another strategy's scope.
        """
        replica = current_replica()
        if replica and replica.strategy is not self.strategy:
            raise errors.WrongContext(
                f"metric {self.name} was made outside of the scope of the {type(replica.strategy).__name__} that uses "
                "it; make it within `with strategy.scope():`"
            )
        number = replica.local_replica if replica else 0
        before = self._sums.get(number)
        self._sums[number] = list(parts) if before is None else [a + b for a, b in zip(before, parts, strict=True)]

    @abstractmethod
    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Adds a batch to the sums."""
        raise NotImplementedError

    def result(self) -> Tensor:
        """Returns the metric of all samples since the last reset."""
        if found := getattr(self._asked, "sums", None):  # the `result` of a user's class calls that of its base class
            return Tensor(np.asarray(self.value(*found)))
        if current_replica() or self.strategy.has_results:
            return self.local_result()
        own = self._own_sums()
        parts = [PerReplica(it) if len(own) > 1 else it[0] for it in zip(*own, strict=True)]
        sums = [np.asarray(self.strategy.reduce(ReduceOp.SUM, it)) for it in parts]
        return self._found(sums)

    def local_result(self) -> Tensor:
        """Returns the metric of this process's samples alone; within `Strategy.run`, of the replica's."""
        replica, own = current_replica(), self._own_sums()
        chosen = [own[replica.local_replica]] if replica else own
        sums = [sum(map(on_host, it), np.zeros(())) for it in zip(*chosen, strict=True)]
        return self._found(sums)

    def _found(self, sums: Sequence[np.ndarray]) -> Tensor:
        compute = type(self)._of_user
        found = np.asarray(self.value(*sums) if compute is None else self._asked_for(sums, compute))
        return Tensor(found if self.dtype is None else found.astype(self.dtype))

    def _asked_for(self, sums: Sequence[np.ndarray], compute: Callable[[Any], Any]) -> Any:
        """Returns what the `result` of a user's class computes of these sums."""
        before, self._asked.sums = getattr(self._asked, "sums", None), list(sums)
        try:
            return compute(self)
        finally:
            self._asked.sums = before

    def _own_sums(self) -> list[list[Array]]:
        """Returns the sums of each replica of this process."""
        return [self._sums.get(number) or self.empty() for number in range(self.strategy.local_replicas)]

    def snapshot(self) -> dict[int, list[Array]]:
        """Returns the sums by replica, for `restore_snapshot`."""
        return dict(self._sums)  # `add` makes new lists

    def value_since(self, sums: dict[int, list[Array]]) -> float:
        """Returns the metric of the samples that the calling replica has added since a snapshot."""
        number = replica.local_replica if (replica := current_replica()) else 0
        now = self._sums.get(number) or self.empty()
        before = sums.get(number) or self.empty()
        return float(self._found([on_host(a) - on_host(b) for a, b in zip(now, before, strict=True)]))

    def restore_snapshot(self, sums: dict[int, list[Array]]) -> None:
        """Replaces the sums by those of a snapshot."""
        self._sums = dict(sums)

    def reset_state(self) -> None:
        """Forgets all samples. Within `Strategy.run`, only those of the replica that calls it."""
        replica = current_replica()
        if replica:
            self._sums.pop(replica.local_replica, None)
        else:
            self._sums.clear()

    def reset_states(self) -> None:
        """Does the same as `reset_state`: its earlier name."""
        self.reset_state()

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.update_state(*args, **kwargs)
        return self.result()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} name={self.name}>"


class Mean(Metric):
    """Mean of all values, by their weights.

    Args:
        name: see `Metric`.
        dtype: see `Metric`.
    """

    def __init__(self, name: str | None = "mean", dtype: str | None = None) -> None:
        super().__init__(dtype, name)

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Adds values.

        Args:
            values: a number or an array.
            sample_weight: weights of the values; None means 1.
        """
        self.add(*weighted_sum(array_of(values), sample_weight))

    def value(self, *sums: np.ndarray) -> Any:
        total, count = sums
        return total / count if count else np.zeros(())


class Sum(Metric):
    """Sum of all values, times their weights.

    Args:
        name: see `Metric`.
        dtype: see `Metric`.
    """

    def __init__(self, name: str | None = "sum", dtype: str | None = None) -> None:
        super().__init__(dtype, name)

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Adds values.

        Args:
            values: a number or an array.
            sample_weight: weights of the values; None means 1.
        """
        self.add(*weighted_sum(array_of(values), sample_weight))

    def value(self, *sums: np.ndarray) -> Any:
        return sums[0]


class MeanMetricWrapper(Mean):
    """Mean of a function of labels and outputs over all samples.

    Args:
        fn: takes labels and outputs, and returns a value for each sample.
        name: see `Metric`.
        dtype: see `Metric`.
    """

    def __init__(self, fn: Callable[[Any, Any], Any], name: str | None = None, dtype: str | None = None) -> None:
        super().__init__(name or getattr(fn, "__name__", None), dtype)
        self._function = fn

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:  # type: ignore[override]
        """Adds the values of a batch.

        Args:
            y_true: labels.
            y_pred: outputs of a model.
            sample_weight: weights of the samples; None means 1.
        """
        super().update_state(self._function(y_true, y_pred), sample_weight)


def weighted_sum(values: Any, sample_weight: Any) -> tuple[Array, Array]:
    """Returns the sum of values times their weights, and the sum of the weights, in float64 on the values' device.

    Args:
        values: a number or an array.
        sample_weight: weights along the first axes; None means 1.
    """
    xp = namespace_of(values)
    wide = xp.asarray(values).astype("float64")
    if sample_weight is None:
        return wide.sum(), xp.asarray(float(wide.size))
    weights = xp.asarray(array_of(sample_weight)).astype("float64")
    if weights.ndim == wide.ndim + 1 and weights.shape[-1] == 1:
        weights = weights[..., 0]
    weights = xp.broadcast_to(
        weights.reshape(*weights.shape, *(1 for _ in range(wide.ndim - weights.ndim))), wide.shape
    )
    return (wide * weights).sum(), weights.sum()


__all__ = ["Mean", "MeanMetricWrapper", "Metric", "Sum", "weighted_sum"]
