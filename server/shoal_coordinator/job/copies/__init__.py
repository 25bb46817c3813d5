"""The copies of one job's lock groups: who is the primary, who the backup, and what they know. Pure: no I/O.

A lock group has the shards that share a server in a placement (docs/decisions/0082). `GroupCopies` is the state of one
group, and `CopyTable` that of all groups of a job, with the placement that follows from it. `CopyMachine` decides.
"""

from shoal_coordinator.job.copies.copy_machine import CopyMachine
from shoal_coordinator.job.copies.copy_table import CopyTable
from shoal_coordinator.job.copies.group_copies import GroupCopies

__all__ = ["CopyMachine", "CopyTable", "GroupCopies"]
