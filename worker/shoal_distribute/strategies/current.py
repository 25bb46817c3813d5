"""The strategy in use: that of the innermost scope or of the replica that runs, otherwise the default strategy."""

import functools
from typing import cast

from shoal_distribute.replica_context import ReplicaContext, current_replica, entered_strategies
from shoal_distribute.strategies.base import Strategy
from shoal_distribute.strategies.mirrored import DefaultStrategy


@functools.cache
def default_strategy() -> DefaultStrategy:
    """Returns the strategy that is in use outside of any scope."""
    return DefaultStrategy()


def get_strategy() -> Strategy:
    """Returns the strategy whose scope or replica this is; the default strategy outside of all."""
    replica, scopes = current_replica(), entered_strategies()
    if replica:
        return cast(Strategy, replica.strategy)
    return cast(Strategy, scopes[-1]) if scopes else default_strategy()


def has_strategy() -> bool:
    """Returns whether another strategy than the default one is in use."""
    return not get_strategy().is_default


def get_replica_context() -> ReplicaContext | None:
    """Returns the replica that runs; None in cross-replica context: in a scope, outside of `run`.

    Outside of any scope, it is the one replica of the default strategy.
    """
    if (replica := current_replica()) or entered_strategies():
        return replica
    return default_strategy().only_replica


def in_cross_replica_context() -> bool:
    """Returns whether this is cross-replica context: see `get_replica_context`."""
    return get_replica_context() is None


__all__ = ["default_strategy", "get_replica_context", "get_strategy", "has_strategy", "in_cross_replica_context"]
