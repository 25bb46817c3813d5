"""Decisions of the cluster's state machine: their numbers, the calls that follow them, and the checks before them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from shoal_coordinator.cluster import Cluster
from shoal_coordinator.job_waits import Wake

# Raises an error if a caller may not cause an event in the present state of the cluster.
Check = Callable[[Cluster], None]


def allow(_: Cluster) -> None:
    """The check of an event that every caller may cause."""


@dataclass(slots=True)
class Decision:
    """A decision of the machine: its number, and what follows without the lock.

    Attributes:
        number: The number of decisions so far.
        wakes: Functions to call without the lock. Each wakes a worker that need not wait any longer, or logs a change.
    """

    number: int = 0
    wakes: list[Wake] = field(default_factory=list)


__all__ = ["Check", "Decision", "allow"]
