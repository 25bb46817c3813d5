"""Shards: the pure state machine, its consistency mode, arenas and snapshots, and the lock around them.

`Shard` is the one door for change. Calls reach it through `shoal_server.serving`; checkpoints, through
`shoal_server.checkpoints`. It knows no RPC and no file.
"""

from shoal_server.shards.arena import Arena
from shoal_server.shards.commit_gate import MAX_PAUSE_S
from shoal_server.shards.events import AnswerPush, WorkerProgress
from shoal_server.shards.shard import Cut, JobShardConfig, Payload, Shard, Stamp
from shoal_server.shards.snapshot import Snapshot
from shoal_server.shards.store import ShardStore

__all__ = [
    "MAX_PAUSE_S",
    "AnswerPush",
    "Arena",
    "Cut",
    "JobShardConfig",
    "Payload",
    "Shard",
    "ShardStore",
    "Snapshot",
    "Stamp",
    "WorkerProgress",
]
