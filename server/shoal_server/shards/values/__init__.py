"""Values of the shards of a lock group: slabs with their optimizer slots, their updates, and their readers.

`StoredShards` has the shards and the slabs that hold their values, `Updates` carries out what the state machine decides
about them, and a `Reading` is one reader's use of them. This package knows no tickets and no other server. The lock of
the lock group guards the values, so only `shoal_server.shards` and its package `group` use this package.
"""

from shoal_server.shards.values.reader_memory import ReaderMemory, ValueReader
from shoal_server.shards.values.reading import Reading
from shoal_server.shards.values.selection import Selection, Selections
from shoal_server.shards.values.shard import Arena, JobShardConfig, Peer, Shard, Stamp
from shoal_server.shards.values.snapshot import Cut, ShardSnapshot, Snapshot
from shoal_server.shards.values.stored_shards import Payload, StoredShards, needed_bytes
from shoal_server.shards.values.updates import Updates

__all__ = [
    "Arena",
    "Cut",
    "JobShardConfig",
    "Payload",
    "Peer",
    "ReaderMemory",
    "Reading",
    "Selection",
    "Selections",
    "Shard",
    "ShardSnapshot",
    "Snapshot",
    "Stamp",
    "StoredShards",
    "Updates",
    "ValueReader",
    "needed_bytes",
]
