"""Counters of what has happened to jobs since the coordinator started, for its metrics. They are not stored."""

from collections import Counter
from enum import StrEnum

from shoal.status import JobState


class RestartReason(StrEnum):
    """Why a job gave up its shards and restarted."""

    LOST = "lost"  # the server is gone, or no longer has them
    DRAINING = "draining"  # the server was draining, so the job was saved first


class QuarantineReason(StrEnum):
    """Why a worker got no assignment of a job for a while."""

    CRASHED = "crashed"  # its trainer was killed several times in a row
    HUNG = "hung"  # its trainer was restarted several times because others waited for it


class JobCounters:
    """Monotonic counts over all jobs, including those that are forgotten.

    Attributes:
        restarts: restarts of jobs, by reason.
        ended: ended jobs, by final state.
        quarantined: quarantines of workers, by reason.
        hung: trainers that were restarted because others waited for them.
        failovers: losses of servers after which a job continued with its backups.
    """

    def __init__(self) -> None:
        self.restarts = Counter(dict.fromkeys(RestartReason, 0))
        self.quarantined = Counter(dict.fromkeys(QuarantineReason, 0))
        self.hung = self.failovers = 0
        self.ended = Counter({state: 0 for state in JobState if state.finished})

    def count_restart(self, reason: RestartReason) -> None:
        """Counts a restart."""
        self.restarts[reason] += 1

    def count_end(self, state: JobState) -> None:
        """Counts a job that ended in this state."""
        self.ended[state] += 1
