"""All-reduce over the replicas of several processes."""

from collections.abc import Sequence

import numpy as np

from shoal.program import Array
from shoal_distribute.collectives import Group, ReduceOp
from shoal_distribute.group_arrays import sums_of
from shoal_distribute.replica_context import ReplicaContext
from shoal_worker.arrays import on_host


def join_processes(
    group: Group, replica: ReplicaContext, op: ReduceOp, sums: Sequence[Array], replicas: int
) -> list[Array]:
    """Returns the sum or the mean of arrays over all replicas of a group of processes. All replicas call it.

    Args:
        group: the group.
        replica: the calling replica.
        op: how the arrays are joined.
        sums: the sums over the replicas of this process, on the replica's device.
        replicas: number of replicas of all processes.

    Returns:
        The joined arrays, on the replica's device.
    """
    joined: list[np.ndarray] = []
    if replica.local_replica == 0:
        joined = sums_of(group, [on_host(it) for it in sums])
        if op is ReduceOp.MEAN:
            joined = [it * it.dtype.type(1 / replicas) for it in joined]
    # If the collective raises, this replica leaves, and the others do not wait.
    return [replica.device.put(it) for it in replica.exchange("an all-reduce of all processes", joined)[0]]


__all__ = ["join_processes"]
