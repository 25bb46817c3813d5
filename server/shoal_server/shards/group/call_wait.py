"""Call wait: the wait of one call for something that lasts. It holds no thread.

The call that goes on afterwards waits for the end, as for a ticket.
"""

import threading
import time
from collections.abc import Callable

from shoal import errors


class CallWait:
    """One wait of a call.

    Args:
        waiting: the waits that have not ended; this one adds and removes itself.
        limit_s: seconds after which `expire` ends it.
    """

    def __init__(self, waiting: "set[CallWait]", limit_s: float) -> None:
        self._waiting = waiting  # single operations of a set are atomic
        self._lock = threading.Lock()  # guards the rest; nothing is called under it
        self._ended = False
        self._error: errors.ShoalError | None = None
        self._on_end: Callable[[], object] | None = None
        self._expires_at = time.monotonic() + limit_s
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
            ShoalError: why it may not.
        """
        if self._error:
            raise self._error

    def withdraw(self) -> None:
        """Ends the wait, because the call is over."""
        if self._end(self._refusal()):
            self._stop()

    def expire(self, now: float) -> None:
        """Ends the wait with an error if it has taken too long.

        Args:
            now: the time of `time.monotonic`.
        """
        if now >= self._expires_at:
            self.withdraw()

    def _refusal(self) -> errors.ShoalError:
        """Returns the error of a call whose wait has taken too long."""
        raise NotImplementedError

    def _stop(self) -> None:
        """Tells the owner of what the call waits for that it does not wait any more."""
        raise NotImplementedError

    def _end(self, error: errors.ShoalError | None) -> bool:
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


__all__ = ["CallWait"]
