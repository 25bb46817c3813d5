"""The lock group: a job's shards on one server behind one lock, as a primary or a backup, until it is split or closed.

`LockGroup` is the only way to change a shard's state. It passes events to the state machine of the package `machine`,
and carries out the effects on `shoal_server.shards.values` and on the tickets of waiting calls. `InputLog` is what a
primary keeps for its backup; `shoal_server.replication` sends it. `shoal_server.shards` decides which groups exist, and
exports what other packages may use.
"""

from shoal_server.shards.group.backup_wait import Confirmation
from shoal_server.shards.group.call_wait import CallWait
from shoal_server.shards.group.commit_gate import MAX_PAUSE_S
from shoal_server.shards.group.input_log import CopyState, InputLog
from shoal_server.shards.group.lock_group import LockGroup
from shoal_server.shards.group.pending_copy import CopyStart
from shoal_server.shards.group.pending_split import check_parts

__all__ = [
    "MAX_PAUSE_S",
    "CallWait",
    "Confirmation",
    "CopyStart",
    "CopyState",
    "InputLog",
    "LockGroup",
    "check_parts",
]
