"""Shards of a server: the pure state machine, its consistency modes, arenas and snapshots, and the locks around them.

`LockGroup` is the only way to change a shard's state. Calls reach it through `shoal_server.serving`, and checkpoints
through `shoal_server.checkpoints`. This package knows neither RPCs nor files.
"""

from shoal_server.shards.arena import Arena
from shoal_server.shards.commit_gate import MAX_PAUSE_S
from shoal_server.shards.events import AnswerPush, WorkerProgress
from shoal_server.shards.lock_group import LockGroup
from shoal_server.shards.selection import Selection
from shoal_server.shards.shard import JobShardConfig, Payload, Shard, Stamp
from shoal_server.shards.snapshot import Cut, Reading, Snapshot
from shoal_server.shards.store import ShardStore

__all__ = [
    "MAX_PAUSE_S",
    "AnswerPush",
    "Arena",
    "Cut",
    "JobShardConfig",
    "LockGroup",
    "Payload",
    "Reading",
    "Selection",
    "Shard",
    "ShardStore",
    "Snapshot",
    "Stamp",
    "WorkerProgress",
]
