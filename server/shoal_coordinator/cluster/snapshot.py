"""What is kept of a cluster: the form in which it is written down, and from which another coordinator restores it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal_coordinator.cluster.membership import Member
from shoal_coordinator.job import JobSnapshot
from shoal_coordinator.messages import Effect


@dataclass(frozen=True, slots=True)
class ClusterCounters:
    """The cluster's id, and the last number given out of each kind. No number is ever given out twice.

    Attributes:
        cluster: drawn once in a cluster's life.
        generation: of placements.
        submissions: of jobs.
        assignments: of workers' parts in jobs.
        effects: of effects.
        incarnation: of members' lives.
    """

    cluster: str
    generation: int = 0
    submissions: int = 0
    assignments: int = 0
    effects: int = 0
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """A cluster as it was when it was last written down.

    Attributes:
        counts: its id and numbers.
        members: all that were remembered, in any order.
        jobs: by submission, in their order.
        effects: those that were pending_effects, in any order.
    """

    counts: ClusterCounters
    members: Sequence[Member] = ()
    jobs: Mapping[int, JobSnapshot] = field(default_factory=dict)
    effects: Sequence[Effect] = ()
