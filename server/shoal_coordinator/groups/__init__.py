"""Groups of ranks: which processes are in a generation, when it ends, and which ones form the next one.

`rank_group` has the rules for one group, as a state machine without I/O. `registry` has the groups by name, for any
thread. Nothing is stored: after a restart of the coordinator, the ranks tell what they know.
"""

from shoal_coordinator.groups.rank_group import RankCandidate, RankGeneration, RankGroup, RankHeartbeat
from shoal_coordinator.groups.registry import GroupRegistry

__all__ = ["GroupRegistry", "RankCandidate", "RankGeneration", "RankGroup", "RankHeartbeat"]
