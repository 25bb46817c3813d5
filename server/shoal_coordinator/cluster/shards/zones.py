"""Zones: where the backup of a lock group should be, so that it is not lost together with its primary (pure).

Servers of one zone may be lost together, for example because they run on one host. So the two copies of a group are in
different zones if the servers allow that.
"""

from collections.abc import Container, Mapping, Sequence

from shoal_coordinator.cluster.member import Member
from shoal_coordinator.cluster.shards.rebalance import Move


def server_for_backup(
    servers: Sequence[Member],
    zone: str,
    held: Mapping[str, int],
    *,
    failed: Container[str] = (),
    late: Container[str] = (),
    busy: Container[str] = (),
) -> Member | None:
    """Returns the server that should get a copy now; None if none can, or if it should wait.

    A copy waits while the servers of other zones are busy, but it does not wait for servers that are late.

    Args:
        servers: the servers that may get it.
        zone: the zone of the server that makes it; empty if the zone does not matter.
        held: bytes on each server, by member id.
        failed: the servers on which the latest copies of the group failed. Others are preferred.
        late: the servers that may be lost soon.
        busy: the servers that take no more copies now, with the late ones.
    """
    apart = [it for it in servers if it.zone != zone and it.id not in failed and it.id not in late]
    free = [it for it in apart or servers if it.id not in busy]
    return min(free, key=lambda it: (it.id in failed, it.zone == zone, held.get(it.id, 0), it.id), default=None)


def move_apart(
    groups: Mapping[int, tuple[str, str]], servers: Mapping[str, int], zones: Mapping[str, str]
) -> Move | None:
    """Returns which backup should move next to another zone than that of its primary; None if none can.

    Args:
        groups: the servers of the primary and of the backup of each lock group, by number.
        servers: the servers that may get a backup, by member id, with all bytes on them.
        zones: the zones of all these servers.
    """
    for group, (primary, backup) in sorted(groups.items()):
        apart = [it for it in servers if zones[it] != zones[primary]]
        if zones[backup] == zones[primary] and apart:
            return Move(group, min(apart, key=lambda it: (servers[it], it)))
    return None


def barred_servers(groups: Mapping[int, tuple[str, str]], zones: Mapping[str, str]) -> dict[int, frozenset[str]]:
    """Returns the servers to which the backup of each group must not move, if it moves for the sake of even shares.

    These are the server of its primary and, if the backup is in another zone now, all servers of the primary's zone.

    Args:
        groups: the servers of the primary and of the backup of each lock group, by number.
        zones: the zones of all servers.
    """
    within: dict[str, set[str]] = {}
    for server, zone in zones.items():
        within.setdefault(zone, set()).add(server)
    return {
        group: frozenset(within[zones[primary]] if zones[backup] != zones[primary] else {primary})
        for group, (primary, backup) in groups.items()
    }


__all__ = ["barred_servers", "move_apart", "server_for_backup"]
