"""The observer of a coordinator: callbacks for its metrics, and its log of jobs and members."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from shoal.events import StateChanged
from shoal.status import Role
from shoal_coordinator.cluster import Cluster
from shoal_coordinator.messages import events

_log = structlog.get_logger(__name__)

# Numbers of forgotten jobs that are kept, so that the others are not looked through at each event.
_SPARE_SEEN = 1_000


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


class ClusterLog:
    """The coordinator's log of what happens to jobs and members.

    Args:
        cluster: The cluster. `lines` reads it, with the lock.
        restored_at: When the cluster was restored from its store, in seconds of Unix time; None if it is new.
    """

    def __init__(self, cluster: Cluster, restored_at: float | None = None) -> None:
        self._cluster = cluster
        # By submission: the number of the latest event that was looked at. The log has those before a restart.
        self._seen = {submission: job.log.last for submission, job in cluster.submitted.items()}
        self._draining: dict[str, int] = {}  # incarnations of members that drain: they repeat the request
        if restored_at is not None:
            listing = cluster.listing
            _log.info(
                "restored",
                cluster=cluster.counts.cluster,
                jobs=listing.job_states().total(),
                live=listing.live_jobs,
                to_do=len(cluster.pending_effects),
            )

    def lines(self, submissions: Iterable[int]) -> list[Callable[[], None]]:
        """Returns functions that log the new states of these jobs; call them without the lock."""
        found: list[Callable[[], None]] = []
        for submission in submissions:
            if (job := self._cluster.submitted.get(submission)) is None:
                continue
            for event in job.log.after(self._seen.get(submission, 0)):
                if isinstance(event, StateChanged):
                    found.append(partial(_log_state, job.ref.name, event))
            self._seen[submission] = job.log.last
        if len(self._seen) > 2 * len(self._cluster.submitted) + _SPARE_SEEN:
            self._seen = {it: last for it, last in self._seen.items() if it in self._cluster.submitted}
        return found

    def handled(self, event: events.ClusterEvent[Any]) -> None:
        """Logs a member that drains or leaves. Any thread may call this without the lock."""
        match event:
            case events.DrainRequested(member, incarnation) if self._draining.get(member) != incarnation:
                self._draining[member] = incarnation
                _log.info("member drains", member=member, incarnation=incarnation)
            case events.DrainOrdered(member, order):
                _log.info("a user drains a server", member=member, stay=order.stay, force=order.force)
            case events.MemberLeft(member, incarnation):
                self._draining.pop(member, None)
                _log.info("member left", member=member, incarnation=incarnation)


def _log_state(job: str, event: StateChanged) -> None:
    reason = {"reason": event.reason.partition("\n")[0]} if event.reason else {}  # without a traceback
    _log.info(f"job {event.state.value}", job=job, **reason)


__all__ = ["ClusterLog", "Observer"]
