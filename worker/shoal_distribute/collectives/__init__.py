"""Collectives between ranks: all-reduce, reduce-scatter, all-gather, broadcast and barrier.

`group` has what users call. `mesh` has the connections, `ring` and `tree` the algorithms over them, and `schedule`
their plans, without I/O.
"""

from shoal_distribute.collectives.calls import ReduceOp
from shoal_distribute.collectives.group import Group

__all__ = ["Group", "ReduceOp"]
