"""Old view: a participant that keeps asking the servers of one placement, whatever they answer."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import shoal
from shoal._rpc import CoordinatorClient, TicketSource
from shoal._training.parameters import ParameterClient
from shoal._wire.placement import Placement
from support.clusters.presented import as_admin


@contextmanager
def old_view(client: shoal.Client, old: Placement, worker: str = "", step: int = 0) -> Iterator[ParameterClient]:
    """Yields a client of the servers of a placement. It does not repeat calls, and does not follow shards that move.

    Args:
        client: a client of the cluster.
        old: the placement.
        worker: the session in whose name it calls; "" for a reader.
        step: step of the session.
    """
    members = {member.member: member.incarnation for member in client.status().members}
    incarnation = members[worker] if worker else 0
    options: dict[str, Any] = {"worker": worker, "incarnation": incarnation, "step": step}
    with closing(CoordinatorClient(client.address, credentials=as_admin(client.address))) as coordinator:
        presented = TicketSource.of(coordinator, old.job, worker, incarnation).credentials
        with ParameterClient(old, refresh=lambda: old, retry_for_s=0.0, credentials=presented, **options) as view:
            yield view


__all__ = ["old_view"]
