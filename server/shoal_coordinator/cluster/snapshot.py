"""Snapshot of a cluster: its stored form, from which a restarted coordinator restores it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal_coordinator.cluster.member import Member
from shoal_coordinator.messages import Effect, JobSnapshot


@dataclass(frozen=True, slots=True)
class ClusterCounters:
    """The cluster's id, and the last number given to each kind of object. No number is used twice.

    Attributes:
        cluster: id of the cluster, generated once.
        generation: last number of a placement.
        submissions: last number of a job submission.
        assignments: last number of an assignment.
        effects: last number of an effect.
        incarnation: last incarnation of a member.
    """

    cluster: str
    generation: int = 0
    submissions: int = 0
    assignments: int = 0
    effects: int = 0
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """A cluster at the last write to the store.

    Attributes:
        counts: the cluster's id and numbers.
        members: all remembered members, in any order.
        jobs: all remembered jobs by submission, in order.
        effects: the pending effects, in any order.
    """

    counts: ClusterCounters
    members: Sequence[Member] = ()
    jobs: Mapping[int, JobSnapshot] = field(default_factory=dict)
    effects: Sequence[Effect] = ()
