"""References to jobs and servers within the coordinator."""

from typing import NamedTuple

from shoal._wire import Placement


class JobRef(NamedTuple):
    """One submission of a job name. A name can be reused; `submission` is unique in the cluster."""

    name: str
    submission: int


class ServerRef(NamedTuple):
    """A server and its address."""

    member: str
    address: str


def servers_of(placement: Placement) -> tuple[ServerRef, ...]:
    """Returns the servers of a placement, each once, in order."""
    return tuple(sorted({ServerRef(shard.server, shard.address) for shard in placement.shards}))


__all__ = ["JobRef", "ServerRef", "servers_of"]
