"""Replication: the connections by which the backups of lock groups stay the same as their primaries.

`copies` has the primary's side, `backups` the other one. docs/decisions/0082 explains the design, and `replica.proto`
has the contract. Only `shoal_server.serving` and `shoal_server.process` import from here.
"""

from shoal_server.replication.backups import Backups
from shoal_server.replication.copies import Copies
from shoal_server.replication.copy_pace import CopyPace
from shoal_server.replication.splits import Splits

__all__ = ["Backups", "Copies", "CopyPace", "Splits"]
