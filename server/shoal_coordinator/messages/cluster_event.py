"""The base of the cluster's events."""

from typing import Generic, TypeVar

R = TypeVar("R")


class ClusterEvent(Generic[R]):
    """Something that happened. `R` is the type of the reply."""

    __slots__ = ()


__all__ = ["ClusterEvent", "R"]
