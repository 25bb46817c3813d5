"""Replica context: what the code of one replica may ask while `Strategy.run` runs it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from shoal import errors
from shoal.program import Array
from shoal_distribute.collectives import ReduceOp
from shoal_distribute.devices import LogicalDevice
from shoal_distribute.rendezvous import Rendezvous
from shoal_worker.arrays import Namespace

# The replica context of each thread, and the strategies whose scopes it has entered.
_here = threading.local()


class Replicated(Protocol):
    """What replicas and variables use of their strategy, which is a `strategies.Strategy`."""

    devices: tuple[LogicalDevice, ...]
    is_default: bool
    first_replica: int
    keeps_split_variables: bool
    applies_constraints: bool

    @property
    def local_replicas(self) -> int:
        """See `Strategy.local_replicas`."""

    @property
    def num_replicas_in_sync(self) -> int:
        """See `Strategy.num_replicas_in_sync`."""

    def join(self, replica: "ReplicaContext", op: ReduceOp, arrays: list[Array]) -> list[Array]:
        """Returns the sum or the mean of arrays over all replicas of all processes.

        Args:
            replica: the calling replica.
            op: how the arrays are joined.
            arrays: this replica's arrays, on its device.

        Returns:
            The joined arrays, on the replica's device.
        """

    def merged(self, replica: "ReplicaContext", fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a function once for all replicas: see `ReplicaContext.merge_call`.

        Args:
            replica: the calling replica.
            fn: the function.
            args: its arguments, of this replica.
            kwargs: its arguments by name.

        Returns:
            This replica's part of the result.
        """


class ReplicaContext:
    """One replica during one call of `Strategy.run`. `get_replica_context` returns it.

    Args:
        strategy: the strategy that runs the replica.
        local_replica: the replica's number in this process.
        device: the replica's device.
        rendezvous: exchanges values with the other replicas of this process.

    Attributes:
        strategy: the strategy.
        local_replica: the replica's number in this process.
        replica_id_in_sync_group: the replica's number among those of all processes.
        device: the replica's device.
    """

    def __init__(
        self, strategy: Replicated, local_replica: int, device: LogicalDevice, rendezvous: Rendezvous | None
    ) -> None:
        self.strategy, self.local_replica, self.device = strategy, local_replica, device
        self.replica_id_in_sync_group = strategy.first_replica + local_replica
        self._rendezvous = rendezvous

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas in all processes."""
        return self.strategy.num_replicas_in_sync

    @property
    def xp(self) -> Namespace:
        """The namespace of the replica's arrays: NumPy or CuPy."""
        return self.device.xp

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Returns the values of all replicas of this process, in order. All must call it.

        Args:
            what: what the replicas do, in words.
            value: this replica's value.

        Raises:
            RanksDisagree: another replica makes another call, or has ended.
        """
        if self._rendezvous is None:
            return [value]
        return self._rendezvous.exchange(self.local_replica, what, value)

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: Any = None) -> Any:
        """Returns the sum or the mean of arrays over all replicas. All must call it.

        Args:
            reduce_op: how the values are joined: SUM or MEAN.
            value: an array or a number; or a tuple, list or dict of them. All replicas give the same structure, shapes
                and dtypes.
            options: accepted for TensorFlow's sake, and ignored.

        Raises:
            BadRequest: the op is unknown.
            RanksDisagree: see `exchange`.
        """
        del options
        arrays = [self.xp.asarray(it) for it in _leaves(value)]
        return _with_leaves(value, iter(self.strategy.join(self, reduce_op_of(reduce_op), arrays)))

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Returns the arrays of all replicas one after the other along an axis. All must call it.

        The arrays pass through the host, and no tape follows them.

        Args:
            value: an array; or a tuple, list or dict of them. All replicas give the same structure, dtypes, and shapes
                apart from this axis.
            axis: the axis.
            options: accepted for TensorFlow's sake, and ignored.

        Raises:
            InvalidShape: the arrays do not fit together, or have no such axis.
            RanksDisagree: see `exchange`.
        """
        del options

        def all_gather(strategy: Any, *leaves: Any) -> list[Array]:
            return [strategy.gather(it, axis) for it in leaves]

        gathered = self.merge_call(all_gather, tuple(self.xp.asarray(it) for it in _leaves(value)))
        return _with_leaves(value, (self.device.put(it) for it in gathered))

    def merge_call(self, fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Calls a function once for all replicas, with the values of each argument in a `PerReplica`.

        Args:
            fn: takes the strategy and the arguments.
            args: this replica's arguments.
            kwargs: this replica's arguments by name, a dict.

        Returns:
            This replica's part of the result: see `PerReplica`.

        Raises:
            RanksDisagree: see `exchange`.
        """
        return self.strategy.merged(self, fn, args, dict(kwargs or {}))


def reduce_op_of(op: ReduceOp | str) -> ReduceOp:
    """Returns the op, which may be given by its name.

    Raises:
        BadRequest: there is no such op.
    """
    try:
        return op if isinstance(op, ReduceOp) else ReduceOp(str(op).lower())
    except ValueError:
        raise errors.BadRequest(f"reduce op {op!r} is unknown; use ReduceOp.SUM or ReduceOp.MEAN") from None


def _leaves(tree: Any) -> list[Any]:
    """Returns the values of a tree. Those of a dict are in the order of its keys, which is the same in all replicas."""
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree, key=str) for leaf in _leaves(tree[key])]
    return [leaf for it in tree for leaf in _leaves(it)] if isinstance(tree, list | tuple) else [tree]


def _with_leaves(tree: Any, leaves: Iterator[Any]) -> Any:
    """Returns a tree of the same structure with other values, in the order of `_leaves`."""
    if isinstance(tree, dict):
        found = {key: _with_leaves(tree[key], leaves) for key in sorted(tree, key=str)}
        return {key: found[key] for key in tree}
    if not isinstance(tree, list | tuple):
        return next(leaves)
    parts = [_with_leaves(it, leaves) for it in tree]
    return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)


def entered_strategies() -> list[Replicated]:
    """Returns the strategies whose scopes this thread is in, the innermost last."""
    if not hasattr(_here, "scopes"):
        _here.scopes = []
    found: list[Replicated] = _here.scopes
    return found


def current_replica() -> ReplicaContext | None:
    """Returns the replica that this thread runs; None outside of `Strategy.run`."""
    return getattr(_here, "replica", None)


@contextmanager
def running(replica: ReplicaContext | None) -> Iterator[None]:
    """Makes this thread run a replica within the block; None means cross-replica context."""
    before, _here.replica = current_replica(), replica
    try:
        yield
    finally:
        _here.replica = before


__all__ = ["ReplicaContext", "Replicated", "current_replica", "entered_strategies", "reduce_op_of", "running"]
