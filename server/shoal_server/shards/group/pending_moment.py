"""Pending moment: the wait of a thread for a moment that a lock group chooses."""

import threading

from shoal import errors


class PendingMoment:
    """A change of a lock group that waits for its moment. The group ends it once, while another thread waits.

    Args:
        job: name of the job, for messages.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._ended = threading.Event()
        self._error: errors.ShoalError | None = None

    def refuse(self, error: errors.ShoalError) -> None:
        """Ends the wait with an error. Called with the lock of the group."""
        self._error = error
        self._ended.set()

    def _await_end(self, within_s: float) -> bool:
        """Waits for the end. Returns whether it has come in time.

        Raises:
            ShoalError: why the group has refused the change.
        """
        ended = self._ended.wait(within_s)
        if self._error:
            raise self._error
        return ended


__all__ = ["PendingMoment"]
