"""What has happened to jobs since this coordinator began, for its metrics. Pure; kept in no store, as no counter is."""

from collections import Counter
from enum import StrEnum

from shoal.status import JobState


class RestartReason(StrEnum):
    """Why shards were given up."""

    LOST = "lost"  # their server is gone, or does not have them any more
    DRAINING = "leaving"  # their server said before that it was going, so the job was saved first


class JobCounters:
    """Counts that only grow, over jobs that are forgotten, too.

    Attributes:
        restarts: how often jobs went back to a checkpoint.
        ended: how many jobs ended, by their last state.
    """

    def __init__(self) -> None:
        self.restarts = Counter(dict.fromkeys(RestartReason, 0))
        self.ended = Counter({state: 0 for state in JobState if state.finished})

    def count_restart(self, loss: RestartReason) -> None:
        """Counts a job that goes back because of this loss."""
        self.restarts[loss] += 1

    def count_end(self, state: JobState) -> None:
        """Counts a job that ended in this state."""
        self.ended[state] += 1
