"""Collectives between ranks: all-reduce, reduce-scatter, all-gather, broadcast and barrier.

`group` has what users call. `buckets` overlaps its calls with computation, and `nccl` is the same between GPUs. `times`
says how long the calls take. `meeting` connects the ranks, and `shared_hosts` finds those that share memory. Arrays
take one of three ways (`way`): `connections`, `shared_blocks` on one host, or both, in `host_rings`. `mesh` has the
connections, `ring` and `tree` the algorithms over them, and `schedule` their plans, without I/O. `watch` sees when a
rank fails.
"""

from shoal.status import GroupTimings, RankTimes, StageTimes, StragglerRank
from shoal_distribute.collectives.buckets import Buckets
from shoal_distribute.collectives.calls import ReduceOp
from shoal_distribute.collectives.group import Group
from shoal_distribute.collectives.nccl import NcclSums, open_nccl, start_sums
from shoal_distribute.collectives.options import BUCKET_BYTES, CommunicationImplementation, CommunicationOptions
from shoal_distribute.collectives.times import TimesBoard

__all__ = [
    "BUCKET_BYTES",
    "Buckets",
    "CommunicationImplementation",
    "CommunicationOptions",
    "Group",
    "GroupTimings",
    "NcclSums",
    "RankTimes",
    "ReduceOp",
    "StageTimes",
    "StragglerRank",
    "TimesBoard",
    "open_nccl",
    "start_sums",
]
