"""Placement of the shards of jobs, their copies, and their moves from server to server. Pure.

`placement` plans where the shards of a job begin, and `rebalance` which of them should move when servers come. `copies`
of lock groups are made by `CopyKeeper`, in different `zones` if possible. It also decides about failovers. `Rebalancer`
moves shards to servers that have fewer, and `DrainCoordinator` moves them off servers that are about to leave; both do
this by copies.
"""

from shoal_coordinator.cluster.shards.copy_keeper import CopyKeeper, held_bytes
from shoal_coordinator.cluster.shards.draining import DrainCoordinator
from shoal_coordinator.cluster.shards.norm_watch import NormWatch
from shoal_coordinator.cluster.shards.placement import (
    Candidate,
    EvenPlacement,
    PlacementPolicy,
    ShardPlan,
    assign_shards,
    candidates_for_one_server,
    plan_shards,
)
from shoal_coordinator.cluster.shards.rebalance import SMALLEST_MOVE_BYTES
from shoal_coordinator.cluster.shards.rebalancer import Rebalancer

__all__ = [
    "SMALLEST_MOVE_BYTES",
    "Candidate",
    "CopyKeeper",
    "DrainCoordinator",
    "EvenPlacement",
    "NormWatch",
    "PlacementPolicy",
    "Rebalancer",
    "ShardPlan",
    "assign_shards",
    "candidates_for_one_server",
    "held_bytes",
    "plan_shards",
]
