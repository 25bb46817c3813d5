"""Pending cut: a cut that may wait until the open step has closed."""

import threading
from collections.abc import Callable

from shoal import errors
from shoal_server.shards.values import Cut

# Seconds for which a cut waits for the norms of other servers. The coordinator waits 5 s for the answer.
NORM_WAIT_S = 3.0


class PendingCut:
    """A cut. The lock group ends it once, with `take` or `refuse`, while another thread waits for it.

    Args:
        job: name of the job.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._changed = threading.Condition()  # guards the rest; taken after the group's lock
        self._cut: Cut | None = None
        self._error: errors.ShoalError | None = None

    def take(self, cut: Callable[[], Cut]) -> None:
        """Ends the wait with a cut, which is only made if somebody still waits for it."""
        with self._changed:
            if not self._error:
                self._cut = cut()
                self._changed.notify_all()

    def refuse(self, error: errors.ShoalError) -> None:
        """Ends the wait with an error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def abandon(self, error: errors.ShoalError) -> None:
        """Refuses the cut, and ends its snapshots if it was taken, because nobody waits for it any more."""
        self.refuse(error)
        for snapshot in self._cut.snapshots if self._cut else ():
            snapshot.end_saving()

    def wait(self, within_s: float) -> Cut:
        """Waits for the cut.

        Args:
            within_s: seconds to wait at most.

        Raises:
            ShoalError: the cut was refused.
            Overloaded: the open step has not closed in time. The cut is then never taken.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._cut or self._error, within_s)
            if self._cut:
                return self._cut
            self._error = self._error or errors.Overloaded(
                f"{self._job}: the norms of a step did not arrive from the other servers within {within_s:g} s; take "
                "the cut again later"
            )
            raise self._error


__all__ = ["NORM_WAIT_S", "PendingCut"]
