"""The cluster machine: members, the table of jobs, scheduling, placement, draining, and effects that are outstanding.

`Cluster.handle(event, now)` is the one door for change. Pure: no clock, no I/O, no thread. What happens within one
job is in `job`; effects are performed in `effects`. The shell, `persistence` and what is above them may import it; of
the coordinator it imports `job` and `messages` alone.
"""

from shoal_coordinator.cluster.machine import Cluster
from shoal_coordinator.cluster.membership import DEAD_KEPT_S, Member
from shoal_coordinator.cluster.placement import Candidate, EvenPlacement, PlacementPolicy, assign_shards, plan_shards
from shoal_coordinator.cluster.policy import ClusterPolicy
from shoal_coordinator.cluster.snapshot import ClusterCounters, ClusterSnapshot

__all__ = [
    "DEAD_KEPT_S",
    "Candidate",
    "Cluster",
    "ClusterCounters",
    "ClusterPolicy",
    "ClusterSnapshot",
    "EvenPlacement",
    "Member",
    "PlacementPolicy",
    "assign_shards",
    "plan_shards",
]
