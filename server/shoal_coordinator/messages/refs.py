"""What jobs and servers are called within the coordinator."""

from typing import NamedTuple

from shoal._wire import Placement


class JobRef(NamedTuple):
    """One submission of a job name, which may be used again; the number is the cluster's own count."""

    name: str
    submission: int


class ServerRef(NamedTuple):
    """A server and where to reach it."""

    member: str
    address: str


def servers_of(placement: Placement) -> tuple[ServerRef, ...]:
    """Who holds the shards of a placement, each once, in order."""
    return tuple(sorted({ServerRef(shard.server, shard.address) for shard in placement.shards}))


__all__ = ["JobRef", "ServerRef", "servers_of"]
