"""Waits for a backup: of an answer, until the backup has what it depends on, and of a gradient, until it is sent.

They hold no thread. The call that has to go on afterwards waits for the end, as for a ticket.
"""

import threading
import time
from collections.abc import Callable

from shoal import errors
from shoal_server.shards.group.input_log import COPY_WAIT_S, InputLog
from shoal_server.shards.values import Payload


class BackupWait:
    """One wait for a backup.

    Args:
        log: the log of the backup.
        waiting: the waits that have not ended; this one adds and removes itself.
    """

    def __init__(self, log: InputLog, waiting: "set[BackupWait]") -> None:
        self._log, self._waiting = log, waiting  # single operations of a set are atomic
        self._lock = threading.Lock()  # guards the rest; nothing is called under it
        self._ended = False
        self._error: errors.Moved | None = None
        self._on_end: Callable[[], object] | None = None
        self._expires_at = time.monotonic() + COPY_WAIT_S
        self._stop: Callable[[], object] = bool  # tells the log that nobody waits any more
        waiting.add(self)

    @property
    def waits(self) -> bool:
        """Whether the call has to wait."""
        return not self._ended

    def on_end(self, call: Callable[[], object]) -> None:
        """Calls a function when the wait ends: on any thread, and at once if it has ended."""
        with self._lock:
            ended = self._ended
            self._on_end = call
        if ended:
            call()

    def check(self) -> None:
        """Checks that the call may go on, after the end of the wait.

        Raises:
            Moved: the wait took too long, or the group was closed.
        """
        if self._error:
            raise self._error

    def withdraw(self) -> None:
        """Ends the wait, because the call is over."""
        if self._end(self._log.unconfirmed()):
            self._stop()

    def expire(self, now: float) -> None:
        """Ends the wait with an error if it has taken too long.

        Args:
            now: the time of `time.monotonic`.
        """
        if now >= self._expires_at:
            self.withdraw()

    def _end(self, error: errors.Moved | None) -> bool:
        """Ends the wait. Returns False if it had ended before."""
        with self._lock:
            if self._ended:
                return False
            self._error, self._ended = error, True
            call = self._on_end
        self._waiting.discard(self)
        if call:
            call()
        return True


class Confirmation(BackupWait):
    """The wait of an answer, until the backup has all inputs that there are now.

    Args:
        log: the log of the backup.
        waiting: as for `BackupWait`.
    """

    def __init__(self, log: InputLog, waiting: set[BackupWait]) -> None:
        super().__init__(log, waiting)
        self._stop = log.when_copied(log.number, self._give, self._refuse)

    def _give(self) -> None:
        self._end(None)

    def _refuse(self) -> None:
        self._end(self._log.unconfirmed())


class SendingGradient(BackupWait):
    """The wait of a push, until its arrays are sent to the backup. Then the push can be staged.

    Args:
        log: the log of the backup.
        payload: the arrays of the push. They do not change before the end of the wait.
        waiting: as for `BackupWait`.
    """

    def __init__(self, log: InputLog, payload: Payload, waiting: set[BackupWait]) -> None:
        super().__init__(log, waiting)
        self._payload = payload
        self._stop = log.begin_gradient(payload, self._sent)

    def _sent(self) -> None:
        if not self._end(None):
            self._log.drop_gradient(self._payload)


__all__ = ["BackupWait", "Confirmation", "SendingGradient"]
