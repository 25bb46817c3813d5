"""Shards of a server: the pure state machine, its consistency modes, arenas and snapshots, and the locks around them.

`Shard` is the only way to change a shard's state. Calls reach it through `shoal_server.serving`, checkpoints through
`shoal_server.checkpoints`. This package knows neither RPCs nor files.
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
