"""Shards of a server: the pure state machine, its consistency modes, slabs and snapshots, and the locks around them.

`LockGroup` is the only way to change a shard's state. Calls reach it through `shoal_server.serving`, and checkpoints
through `shoal_server.checkpoints`. This package knows neither RPCs nor files.
"""

from shoal_server.shards.commit_gate import MAX_PAUSE_S
from shoal_server.shards.input_log import CopyState, InputLog
from shoal_server.shards.lock_group import LockGroup
from shoal_server.shards.machine.events import AnswerPush, LockGroupEvent, WorkerProgress
from shoal_server.shards.machine.norm_exchange import NormOutbox
from shoal_server.shards.machine.replica_inputs import decode as decode_input
from shoal_server.shards.machine.replica_inputs import encode as encode_input
from shoal_server.shards.pending_copy import CopyStart
from shoal_server.shards.reader_memory import ValueReader
from shoal_server.shards.reading import Reading
from shoal_server.shards.selection import Selection
from shoal_server.shards.shard import Arena, JobShardConfig, Peer, Shard, Stamp
from shoal_server.shards.snapshot import Cut, ShardSnapshot
from shoal_server.shards.store import ShardStore
from shoal_server.shards.stored_shards import Payload

__all__ = [
    "MAX_PAUSE_S",
    "AnswerPush",
    "Arena",
    "CopyStart",
    "CopyState",
    "Cut",
    "InputLog",
    "JobShardConfig",
    "LockGroup",
    "LockGroupEvent",
    "NormOutbox",
    "Payload",
    "Peer",
    "Reading",
    "Selection",
    "Shard",
    "ShardSnapshot",
    "ShardStore",
    "Stamp",
    "ValueReader",
    "WorkerProgress",
    "decode_input",
    "encode_input",
]
