"""Confirmation: the wait of one answer until the backup has all inputs that the answer depends on.

It holds no thread. The call that has to give the answer waits for it, as for a ticket.
"""

import time
from collections.abc import Callable

from shoal import errors
from shoal_server.shards.group.input_log import COPY_WAIT_S, InputLog


class Confirmation:
    """The wait of one answer.

    Args:
        log: the log of the backup.
        waiting: the confirmations that wait; this one adds and removes itself.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self, log: InputLog, waiting: "set[Confirmation]", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log, self._waiting = log, waiting  # single operations of a set are atomic
        # Set once, and then _on_end is called. `on_end` sets that first, and then looks at _ended, so no lock is needed.
        # If two threads end the wait at the same time, either outcome is right.
        self._ended = False
        self._error: errors.Moved | None = None
        self._on_end: Callable[[], object] | None = None
        self._expires_at = clock() + COPY_WAIT_S
        waiting.add(self)
        self._withdraw = log.when_copied(log.number, self._give, self._refuse)

    @property
    def waits(self) -> bool:
        """Whether the answer has to wait."""
        return not self._ended

    def on_end(self, call: Callable[[], object]) -> None:
        """Calls a function when the wait ends: on any thread, and at once if it has ended. May call it twice."""
        self._on_end = call
        if self._ended:
            call()

    def check(self) -> None:
        """Checks that the answer may be given, after the end of the wait.

        Raises:
            Moved: the backup has not confirmed it in time, or the group was closed.
        """
        if self._error:
            raise self._error

    def withdraw(self) -> None:
        """Ends the wait, because nobody waits for the answer any more."""
        if not self._ended:
            self._withdraw()
            self._refuse()

    def expire(self, now: float) -> None:
        """Ends the wait with an error if it has taken too long.

        Args:
            now: the time of the clock.
        """
        if now >= self._expires_at:
            self.withdraw()

    def _give(self) -> None:
        self._end(None)

    def _refuse(self) -> None:
        self._end(self._log.unconfirmed())

    def _end(self, error: errors.Moved | None) -> None:
        if self._ended:
            return
        self._error, self._ended = error, True
        self._waiting.discard(self)
        if call := self._on_end:
            call()


__all__ = ["Confirmation"]
