"""Values of several replicas: `PerReplica` results, and variables, which each strategy places in its own way."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from shoal import errors
from shoal.program import Array
from shoal_distribute.devices import LogicalDevice
from shoal_distribute.operators import Operators
from shoal_distribute.replica_context import Replicated, current_replica
from shoal_worker.arrays import on_host


class PerReplica:
    """The values of the replicas of this process, one for each.

    Args:
        values: the values, in the order of the replicas.

    Attributes:
        values: the values, in the order of the replicas.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = tuple(values)

    def __repr__(self) -> str:
        return f"PerReplica({', '.join(map(repr, self.values))})"


def part_of(tree: Any, replica: int) -> Any:
    """Returns one replica's part of a tree: each `PerReplica` is replaced by its value, and other values stay.

    Args:
        tree: tuples, lists and dicts of values.
        replica: number of the replica in this process.

    Raises:
        BadRequest: a `PerReplica` has no value for this replica.
    """

    def pick(leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica):
            return leaf
        if replica >= len(leaf.values):
            raise errors.BadRequest(
                f"a PerReplica has {len(leaf.values)} values, but replica {replica} needs one; "
                "it is of a strategy with fewer devices"
            )
        return leaf.values[replica]

    return _mapped(pick, tree)


def regrouped(trees: Sequence[Any]) -> Any:
    """Returns one tree from those of all replicas. Leaves are `PerReplica`; with one replica, the tree is unchanged.

    Args:
        trees: one for each replica. Where their structures differ, the leaf has the subtrees.
    """
    first = trees[0]
    if len(trees) == 1 or all(it is None for it in trees):
        return first
    if any(type(it) is not type(first) for it in trees):
        return PerReplica(trees)
    if isinstance(first, dict) and all(it.keys() == first.keys() for it in trees):
        return {key: regrouped([it[key] for it in trees]) for key in first}
    if isinstance(first, tuple | list) and all(len(it) == len(first) for it in trees):
        return rebuilt(first, [regrouped(parts) for parts in zip(*trees, strict=True)])
    return PerReplica(trees)


def _mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _mapped(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return rebuilt(tree, [_mapped(function, value) for value in tree])
    return function(tree)


def rebuilt(like: Any, parts: list[Any]) -> Any:
    """Returns the parts in a container of the same type: a list, a tuple or a named tuple."""
    return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)


class DistributedVariable(Operators, ABC):
    """A variable of a strategy. `Strategy.create_variable` makes it.

    Its operators return a `keras.Tensor`, which a gradient tape follows back to the variable.

    The replicas' copies of a trainable variable are always equal. Each replica has its own copy of a variable that is
    not trainable, such as a running mean; outside of `run`, its value is the mean of the copies.

    Args:
        strategy: the strategy that places it.
        name: its name.
        initial: its initial value, which gives its shape and dtype.
        trainable: whether it gets gradients.

    Attributes:
        constraint: returns the values that replace those of an update; None keeps them. Strategies whose servers update
            the variables do not apply it.
    """

    # Returns the value as a tensor that tapes follow. `keras.tensor`, a layer above, sets it.
    tensor_of: ClassVar[Callable[["DistributedVariable"], Any]]

    def __init__(self, strategy: Replicated, name: str, initial: np.ndarray, *, trainable: bool) -> None:
        self.strategy, self.name, self.trainable = strategy, name, trainable
        self.shape, self.dtype = initial.shape, initial.dtype
        self.constraint: Callable[[Array], Array] | None = None

    @property
    @abstractmethod
    def values(self) -> tuple[Array, ...]:
        """The copies, one for each replica of this process, or the one value that there is."""

    @abstractmethod
    def read(self) -> Array:
        """Returns the value, on the device of the current replica. Do not change the array."""

    def storage(self) -> Array:
        """Returns the array that optimizers update in place: that of `read`, or one in parts on several devices."""
        return self.read()

    def gradient(self, given: Array, device: LogicalDevice) -> Array:
        """Returns a gradient of this variable where an optimizer needs it, in the variable's dtype.

        Args:
            given: the gradient, in the variable's shape.
            device: the device of the replica.
        """
        return device.put(given).astype(self.dtype, copy=False)

    def constrain(self, value: Array) -> None:
        """Applies the constraint, if there is one. Strategies call it after each update.

        Args:
            value: the array that the optimizer has updated. It is changed in place.

        Raises:
            InvalidShape: the constraint returns another shape.
        """
        if self.constraint is None:
            return
        found = self.constraint(value)
        if found.shape != value.shape:
            raise errors.InvalidShape(
                f"the constraint of variable {self.name} returned the shape {found.shape}, not {value.shape}; return "
                "an array of the same shape"
            )
        value[...] = found

    def assign(self, value: Any) -> None:
        """Sets the value.

        Args:
            value: an array or a number that can be broadcast to the variable's shape. In cross-replica context, all
                copies get it. Within `run`, only a variable that is not trainable can be set: this replica's copy.

        Raises:
            InvalidShape: the shape does not fit.
            WrongContext: the variable is trainable, and `run` is in progress.
        """
        replica = current_replica()
        if replica and replica.strategy is self.strategy and self.trainable and self.strategy.local_replicas > 1:
            raise errors.WrongContext(
                f"variable {self.name} is trainable and cannot be assigned within run, where the replicas could give "
                "it different values; assign it outside of run, or use apply_gradients"
            )
        given = on_host(value) if hasattr(value, "dtype") else np.asarray(value)
        try:
            whole = np.broadcast_to(given, self.shape)
        except ValueError:
            raise errors.InvalidShape(f"variable {self.name} has the shape {self.shape}, not {given.shape}") from None
        self._set(whole)

    @abstractmethod
    def _set(self, value: np.ndarray) -> None:
        """Sets this replica's copy within `run`, else all copies. The value has the variable's shape."""

    def numpy(self) -> np.ndarray:
        """Returns a copy of the value on the host."""
        return np.array(on_host(self.read()))

    def _operated(self, function: Callable[..., Any], *operands: Any) -> Any:
        tensor = type(self).tensor_of(self)
        return function(*(tensor if it is self else it for it in operands))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"{kind}({self.name!r}, shape={self.shape}, dtype={self.dtype}, trainable={self.trainable})"


class MirroredVariable(DistributedVariable):
    """A variable of which each replica has a copy on its device.

    Args:
        strategy, name, initial, trainable: see `DistributedVariable`.
    """

    def __init__(self, strategy: Replicated, name: str, initial: np.ndarray, *, trainable: bool) -> None:
        super().__init__(strategy, name, initial, trainable=trainable)
        self._copies = [device.put(np.array(initial)) for device in strategy.devices]

    @property
    def values(self) -> tuple[Array, ...]:
        return tuple(self._copies)

    def read(self) -> Array:
        replica = current_replica()
        if replica and replica.strategy is self.strategy:
            return self._copies[replica.local_replica]
        if self.trainable or len(self._copies) == 1:
            return self._copies[0]
        copies = [on_host(it) for it in self._copies]
        return np.asarray(np.mean(copies, axis=0), self.dtype) if self.dtype.kind == "f" else copies[0]

    def _set(self, value: np.ndarray) -> None:
        replica = current_replica()
        if replica and replica.strategy is self.strategy:
            self._copies[replica.local_replica] = replica.device.put(np.array(value, self.dtype))
            return
        self._copies = [device.put(np.array(value, self.dtype)) for device in self.strategy.devices]


def check_scope(strategy: Replicated, variable: DistributedVariable) -> None:
    """Raises WrongContext if a variable was made by another strategy.

    Args:
        strategy: the strategy that is to use it.
        variable: the variable.
    """
    if variable.strategy is not strategy:
        made = type(variable.strategy).__name__
        place = f"in the scope of another {made}" if made == type(strategy).__name__ else f"in the scope of a {made}"
        outside = "outside of any scope" if variable.strategy.is_default else place
        raise errors.WrongContext(
            f"variable {variable.name} was made {outside}, but a {type(strategy).__name__} uses it; "
            "make the model and the optimizer within `with strategy.scope():`"
        )


__all__ = [
    "DistributedVariable",
    "MirroredVariable",
    "PerReplica",
    "check_scope",
    "part_of",
    "rebuilt",
    "regrouped",
]
