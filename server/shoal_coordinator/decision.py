"""What follows from one event of the cluster's state machine, besides its result."""

from dataclasses import dataclass, field

from shoal_coordinator.job_waits import Wake


@dataclass(slots=True)
class Decision:
    """A decision of the machine: its number, and whom to wake.

    Attributes:
        number: The number of decisions so far.
        wakes: Functions to call without the lock. Each wakes a worker that need not wait any longer.
    """

    number: int = 0
    wakes: list[Wake] = field(default_factory=list)


__all__ = ["Decision"]
