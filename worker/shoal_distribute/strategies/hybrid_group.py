"""Hybrid groups: workers of a cluster with parameter servers that share a session, and how they reach each other."""

from dataclasses import dataclass, replace

from shoal import _rpc, errors
from shoal._system import check_count
from shoal_distribute.collectives import Group
from shoal_distribute.resolver import ClusterResolver, RankedTasks, ranked_tasks
from shoal_distribute.task_group import open_ranks


@dataclass(frozen=True, slots=True)
class HybridGroup:
    """The hybrid group of this worker.

    Attributes:
        group: the group; None if each worker is on its own.
        size: number of workers in each group.
        workers: number of workers in all groups.
        number: number of this group; None if it is not known.
    """

    group: Group | None
    size: int
    workers: int
    number: int | None = None

    @classmethod
    def of(cls, group: Group | None, workers: int) -> "HybridGroup":
        """Returns the hybrid group of an open group of ranks; None means that this worker is on its own.

        Raises:
            BadRequest: the workers cannot be divided into groups of this size.
        """
        size = group.ranks if group else 1
        _check_divides(size, workers)
        return cls(group, size, workers)

    def member_id(self, job: str) -> str:
        """Returns the member id of the group's session: always the same for a group that has a number."""
        return "" if self.number is None else f"{job}-group-{self.number}"


def open_hybrid_group(resolver: ClusterResolver, size: int, *, coordinator: bool) -> HybridGroup:
    """Connects this worker with the others of its group: each group has workers that follow each other in the list.

    Args:
        resolver: lists the workers.
        size: number of workers in a group.
        coordinator: whether the first worker is a chief, which runs the coordinator at its address. It then listens for
            its group at the next port.

    Returns:
        The group of this worker.

    Raises:
        BadRequest: no addresses are known, or the workers cannot be divided into groups of this size.
        PortInUse: this process cannot listen at its port.
        RankLost: another worker of the group did not come.
    """
    check_count("group_size", size, 1)
    tasks = ranked_tasks(resolver)
    if tasks is None:
        raise errors.BadRequest(
            f"group_size is {size}, but nothing says where the workers listen for each other; list them in TF_CONFIG, "
            "or give a resolver"
        )
    _check_divides(size, len(tasks.addresses))
    if coordinator:
        host, port = _rpc.parse_address(tasks.addresses[0])
        tasks = replace(tasks, addresses=(f"{host}:{port + 1}", *tasks.addresses[1:]))
    first = tasks.rank - tasks.rank % size
    members = RankedTasks(tasks.rank - first, tasks.addresses[first : first + size])
    return HybridGroup(open_ranks(members), size, len(tasks.addresses), first // size)


def _check_divides(size: int, workers: int) -> None:
    if workers % size:
        raise errors.BadRequest(
            f"{workers} workers cannot be divided into groups of {size}; all groups have the same size"
        )


__all__ = ["HybridGroup", "open_hybrid_group"]
