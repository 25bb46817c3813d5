"""All-reduce over the replicas of several processes."""

from collections.abc import Sequence

from shoal.program import Array
from shoal_distribute.collectives import Group, NcclSums, ReduceOp
from shoal_distribute.group_arrays import sums_of
from shoal_distribute.replica_context import ReplicaContext
from shoal_worker.arrays import on_host


def join_processes(
    group: Group,
    replica: ReplicaContext,
    op: ReduceOp,
    sums: Sequence[Array],
    replicas: int,
    nccl: NcclSums | None = None,
) -> list[Array]:
    """Returns the sum or the mean of arrays over all replicas of a group of processes. All replicas call it.

    Args:
        group: the group.
        replica: the calling replica.
        op: how the arrays are joined.
        sums: the sums over the replicas of this process, on the replica's device.
        replicas: number of replicas of all processes.
        nccl: joins arrays on GPUs; None means that the group joins them on the host.

    Returns:
        The joined arrays, on the replica's device.
    """
    joined: list[Array] = []
    if replica.local_replica == 0:
        by_nccl = nccl and all(nccl.takes(it.dtype) for it in sums)
        joined = _nccl_sums(nccl, sums) if nccl and by_nccl else [*sums_of(group, [on_host(it) for it in sums])]
        if op is ReduceOp.MEAN:
            joined = [it * it.dtype.type(1 / replicas) for it in joined]
    # If the collective raises, this replica leaves, and the others do not wait.
    return [replica.device.put(it) for it in replica.exchange("an all-reduce of all processes", joined)[0]]


def _nccl_sums(nccl: NcclSums, sums: Sequence[Array]) -> list[Array]:
    for number, array in enumerate(sums):
        nccl.add(str(number), array)
    return list(nccl.finish().values())


__all__ = ["join_processes"]
