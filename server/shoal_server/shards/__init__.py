"""Shards of a server: the lock groups that it hosts, with the state machine, the values and the locks of each.

`ShardStore` makes the groups, `store.hosted` finds them, and `LockGroup` is the only way to change a shard's state.
Calls reach it through `shoal_server.serving`, a primary's inputs through `shoal_server.replication`, and checkpoints
through `shoal_server.checkpoints`. These import what this module exports; the packages `group`, `values` and `machine`
are internal. This package knows neither RPCs nor files.
"""

from shoal_server.shards.group import (
    MAX_PAUSE_S,
    CallWait,
    Confirmation,
    CopyStart,
    CopyState,
    InputLog,
    LockGroup,
    check_parts,
)
from shoal_server.shards.machine.events import AnswerPush, GroupSplit, LockGroupEvent
from shoal_server.shards.machine.norm_exchange import NormOutbox
from shoal_server.shards.machine.replica_inputs import decode as decode_input
from shoal_server.shards.machine.replica_inputs import encode as encode_input
from shoal_server.shards.machine.worker_progress import WorkerProgress
from shoal_server.shards.store import ShardStore
from shoal_server.shards.values import (
    Arena,
    Cut,
    JobShardConfig,
    Payload,
    Peer,
    Reading,
    Selection,
    Shard,
    ShardSnapshot,
    Stamp,
    ValueReader,
)

__all__ = [
    "MAX_PAUSE_S",
    "AnswerPush",
    "Arena",
    "CallWait",
    "Confirmation",
    "CopyStart",
    "CopyState",
    "Cut",
    "GroupSplit",
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
    "check_parts",
    "decode_input",
    "encode_input",
]
