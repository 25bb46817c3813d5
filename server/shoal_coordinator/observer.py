"""The observer of a coordinator: callbacks for its metrics, and its log of a restored cluster."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from shoal.status import Role
from shoal_coordinator.cluster import Cluster
from shoal_coordinator.messages import events

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Observer:
    """Callbacks for the coordinator's metrics. Any thread may call them, and never under the lock.

    Attributes:
        handled: Called with each handled event.
        refused: Called with the error code of each refused event.
        died: Called with the role of each member that is declared lost.
        performed: Called with the kind of each finished effect, and whether it succeeded.
        retried: Called for each repeated call to a server.
        written: Called for each write with the seconds that it took and the number of records.
    """

    handled: Callable[[events.ClusterEvent[Any]], None] = lambda _event: None
    refused: Callable[[str], None] = lambda _code: None
    died: Callable[[Role], None] = lambda _role: None
    performed: Callable[[str, bool], None] = lambda _effect, _done: None
    retried: Callable[[], None] = lambda: None
    written: Callable[[float, int], None] = lambda _seconds, _records: None


def log_restored(cluster: Cluster, now: float) -> None:
    """Logs what a coordinator has restored from its store."""
    listing = cluster.listing
    _log.info(
        "restored",
        cluster=cluster.counts.cluster,
        jobs=listing.job_states().total(),
        live=len(listing.live_jobs(now)),
        to_do=len(cluster.pending_effects),
    )


__all__ = ["Observer", "log_restored"]
