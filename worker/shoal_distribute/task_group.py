"""Groups of tasks: the group that a cluster resolver describes, such as the one in `TF_CONFIG`."""

import os
import socket
from collections.abc import Mapping

from shoal import _rpc
from shoal._system.listeners import loopback_addresses
from shoal_distribute.collectives import Group
from shoal_distribute.group_security import group_security
from shoal_distribute.resolver import ClusterResolver, RankedTasks, ranked_tasks


def open_group(
    resolver: ClusterResolver,
    *,
    generation: int = 0,
    within_s: float = 600.0,
    share: bool = True,
    environment: Mapping[str, str] = os.environ,
) -> Group | None:
    """Connects this process with the other tasks that train together. The chief is rank 0, then come the workers.

    Args:
        resolver: describes the tasks.
        generation: number of the group. Tasks of another generation are refused.
        within_s: seconds to wait for the other tasks. After two seconds, a line says which ones are missing.
        share: whether to use shared memory between tasks on one host.
        environment: the environment variables, for `group_security`.

    Returns:
        The group, or None if this process trains alone.

    Raises:
        BadRequest: this process is no rank, or see `group_security`.
        PortInUse: this process cannot listen at its port.
        RankLost, RanksDisagree: see `Group.open`.
    """
    tasks = ranked_tasks(resolver)
    if tasks is None:
        return None
    return open_ranks(tasks, generation=generation, within_s=within_s, share=share, environment=environment)


def open_ranks(
    tasks: RankedTasks,
    *,
    generation: int = 0,
    within_s: float = 600.0,
    share: bool = True,
    environment: Mapping[str, str] = os.environ,
) -> Group:
    """Connects this process with the other tasks of a list. The arguments and errors are those of `open_group`.

    Args:
        tasks: the tasks.
        generation, within_s, share, environment: see `open_group`.

    Returns:
        The group.
    """
    return Group.open(
        tasks.rank,
        tasks.addresses,
        security=group_security(tasks.addresses, environment),
        listening=listen_at(tasks.addresses[tasks.rank]),
        generation=generation,
        within_s=within_s,
        share=share,
    )


def listen_at(address: str) -> socket.socket:
    """Opens the listening socket of a task, whose connections `group_security` protects.

    A task that is on loopback listens there. Any other task listens at all interfaces, because its address in the list
    may be that of a service, or may be forwarded.

    Args:
        address: host:port of the task.

    Raises:
        PortInUse: this process cannot listen at the port.
    """
    host, port = _rpc.parse_address(address)
    everywhere = "[::]" if ":" in host else "0.0.0.0"  # noqa: S104 - see above; a secret or a certificate is required
    return _rpc.listen(host if loopback_addresses(host) else everywhere, port)


__all__ = ["listen_at", "open_group", "open_ranks"]
