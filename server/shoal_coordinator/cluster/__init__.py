"""The cluster machine: members, jobs, scheduling, placement, draining and pending effects. Pure: no clock, no I/O.

`Cluster.handle(event, now)` is the only way to change its state. `job` holds the state machine of one job, and
`effects` carries out the effects. The shell, `persistence` and the packages above them may import this package. It
imports only two packages of the coordinator: `job` and `messages`.
"""

from shoal_coordinator.cluster.dead_members import DEAD_KEPT_S
from shoal_coordinator.cluster.expiry_breaker import ExpiryHold
from shoal_coordinator.cluster.heartbeat_interval import interval_told_s
from shoal_coordinator.cluster.job_limits import JobLimits
from shoal_coordinator.cluster.listing import (
    PAGE_SIZE,
    CheckpointAge,
    ListedJob,
    job_before,
    listed,
    member_after,
    most_ended,
    page_size,
    token_after_job,
    token_after_member,
)
from shoal_coordinator.cluster.machine import Cluster
from shoal_coordinator.cluster.member import Member
from shoal_coordinator.cluster.policy import ClusterPolicy
from shoal_coordinator.cluster.shards import Candidate, EvenPlacement, PlacementPolicy, assign_shards, plan_shards
from shoal_coordinator.cluster.snapshot import ClusterCounters, ClusterSnapshot

__all__ = [
    "DEAD_KEPT_S",
    "PAGE_SIZE",
    "Candidate",
    "CheckpointAge",
    "Cluster",
    "ClusterCounters",
    "ClusterPolicy",
    "ClusterSnapshot",
    "EvenPlacement",
    "ExpiryHold",
    "JobLimits",
    "ListedJob",
    "Member",
    "PlacementPolicy",
    "assign_shards",
    "interval_told_s",
    "job_before",
    "listed",
    "member_after",
    "most_ended",
    "page_size",
    "plan_shards",
    "token_after_job",
    "token_after_member",
]
