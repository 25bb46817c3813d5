"""Repeated calls: which failed calls of a participant are made again, when, and on which server.

The callers make the calls. `group_connections` moves the connections to where this module finds the lock groups.
"""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

from shoal import errors
from shoal._security import Credentials
from shoal._training.failover import WITHOUT_PRIMARY, AttemptBackoff, Locator, shortened
from shoal._training.group_connections import GroupConnections
from shoal._transport import ServerConnection

T = TypeVar("T")

# A call that takes longer may wait for a server that was lost without a word: seconds until the coordinator is asked,
# and the pause between two questions, at least and at most. Between them, a part of the time that the call has taken:
# a server is declared lost after a few seconds, and a call that waits for other workers may take much longer.
_LATE_S, _LONGEST_PAUSE_S, _PART = 1.0, 4.0, 0.25
# A server that refuses a call as moved after these seconds has waited for the backup: for example, because a copy of a
# large group is being made. If the coordinator says that it is the primary, the call is repeated without a limit.
_WAITED_S = 10.0


@dataclass(slots=True)
class _Failures:
    """The failed attempts of one call.

    Attributes:
        connection: connection to the lock group.
        waits: whether the call waits for other workers.
        backoff: the pauses before the next attempts.
        renewed: whether the server has refused a ticket.
        silent_at: when the group first had no server that answers; None means that it has one.
        waited_s: seconds of the last attempt.
    """

    connection: ServerConnection
    waits: bool
    backoff: AttemptBackoff
    renewed: bool = False
    silent_at: float | None = None
    waited_s: float = 0.0


class _TimedCall:
    """A call in progress, for the time of a `with` statement.

    Args:
        begun: when the calls in progress began.
    """

    __slots__ = ("_begun",)

    def __init__(self, begun: dict["_TimedCall", float]) -> None:
        self._begun = begun

    def __enter__(self) -> None:
        self._begun[self] = time.monotonic()

    def __exit__(self, *_: object) -> None:
        del self._begun[self]


_NOT_WATCHED = nullcontext()


class RepeatedCalls:
    """Makes calls of one participant to lock groups, and repeats those that failed if that may help.

    Args:
        connections: the connections of the participant.
        locator: finds out where the lock groups are.
        retry_for_s: seconds for which calls to a server that does not answer are repeated.
        on_retry: called on any thread for each repeated call.
        credentials: what this process presents to the servers.
        reads_only: whether the participant is a reader, which itself repeats calls that an overloaded server refuses.
    """

    def __init__(
        self,
        connections: GroupConnections,
        locator: Locator,
        *,
        retry_for_s: float,
        on_retry: Callable[[], None],
        credentials: Credentials,
        reads_only: bool,
    ) -> None:
        self._connections, self._locator, self._credentials = connections, locator, credentials
        self._retry_for_s, self.on_retry, self._reads_only = retry_for_s, on_retry, reads_only
        self._begun: dict[_TimedCall, float] = {}  # when the calls in progress began
        self._watching = False

    def retrying(self, connection: ServerConnection, call: Callable[[], T], *, waits: bool = False) -> T:
        """Repeats a call while its server does not answer, and once with another ticket if the server refuses this one.

        If the lock group has moved to another server, its connection moves, and the call is repeated there. If the
        primary is lost and the job has a backup, the call is repeated until the backup is promoted. A participant's
        pull is also repeated while the server is overloaded, as when slow readers use its memory. A ticket is refused
        when the token that it was made for was revoked. The caller may have another token by then.

        Args:
            connection: connection to the lock group.
            call: the call, which must be safe to repeat.
            waits: the call waits for other workers, so it is repeated after its deadline.

        Returns:
            The result of the call.

        Raises:
            Unreachable: the server did not answer for `retry_for_s` seconds.
            StaleGeneration: the job has a placement of another generation, or with other lock groups.
            Unauthenticated: the server refuses a new ticket as well, or the coordinator gives none.
        """
        failures: _Failures | None = None  # made when it is needed: each pull and push comes here
        while True:
            moves, began = connection.moves, time.monotonic()
            try:
                with self.watched():
                    return call()
            except errors.ShoalError as error:
                failures = failures or _Failures(connection, waits, AttemptBackoff(time.monotonic()))
                failures.waited_s = time.monotonic() - began
                if not self._repeats(error, failures, moves):
                    raise

    @staticmethod
    def may_have_moved(error: errors.ShoalError) -> bool:
        """Returns whether another server may have these shards after an error. `retrying` finds out."""
        return isinstance(error, (errors.Moved, *WITHOUT_PRIMARY))

    def watched(self) -> AbstractContextManager[None]:
        """Looks for the moved lock group of a call that takes long, in a job with backups; see `_watch`."""
        if not self._connections.replicated:
            return _NOT_WATCHED
        if not self._watching:
            self._watching = True
            threading.Thread(target=self._watch, name="failover", daemon=True).start()
        return _TimedCall(self._begun)

    def _is_lost(self, error: errors.ShoalError) -> bool:
        """Returns whether an error says that another server has these shards, or soon will."""
        return isinstance(error, errors.Moved) or (self._connections.replicated and isinstance(error, WITHOUT_PRIMARY))

    def _repeats(self, error: errors.ShoalError, failures: _Failures, moves: int) -> bool:
        """Waits until it is time to repeat a call, if that may help. Returns whether to repeat it.

        Args:
            error: the error of the last attempt.
            failures: the failed attempts.
            moves: how often the connection had been moved when the last attempt began.

        Raises:
            Unreachable, StaleGeneration: as for `retrying`.
        """
        connection = failures.connection
        if isinstance(error, errors.DeadlineExceeded) and failures.waits:
            return True  # a pull at its deadline waits for other workers
        if isinstance(error, errors.Overloaded):
            if not failures.waits or self._reads_only:  # a reader decides itself
                return False
            self.on_retry()
            time.sleep(failures.backoff.next(time.monotonic(), moves=False))
            return True
        if isinstance(error, errors.Unauthenticated):
            if failures.renewed:
                return False
            failures.renewed = True
            self._credentials.discard_token()
            connection.reopen()
            return True
        silent, lost = isinstance(error, errors.Unreachable | errors.DeadlineExceeded), self._is_lost(error)
        if not silent and not lost:  # a server that has handed its shards over may not know the job any more
            return isinstance(error, WITHOUT_PRIMARY) and self._follow(connection, moves, replaced=False)
        if self._follow(connection, moves, replaced=lost or self._connections.replicated):
            return True
        now = time.monotonic()
        waits = isinstance(error, errors.Moved) and failures.waited_s > _WAITED_S and self._locator.knows
        failures.silent_at = now if failures.silent_at is None or waits else failures.silent_at
        if now - failures.silent_at + failures.backoff.at_most > self._retry_for_s:
            if silent or isinstance(error, errors.Moved):
                raise self._unreachable(connection, error) from None
            return False
        self.on_retry()
        time.sleep(failures.backoff.next(now, moves=lost or self._connections.replicated))
        return True

    def _unreachable(self, connection: ServerConnection, error: errors.ShoalError) -> errors.Unreachable:
        within = f" within {self._retry_for_s:g} s" if self._retry_for_s else ""
        return errors.Unreachable(
            f"a server of {self._connections.placement.job} at {connection.address} did not answer{within} "
            f"({error.message}); check that it is running and that the address is right",
            address=connection.address,
        )

    def _follow(self, connection: ServerConnection, moves: int, *, replaced: bool) -> bool:
        """Finds out where a lock group is after a failed call, and moves connections to where it is.

        Args:
            connection: connection to the lock group.
            moves: how often the connection had been moved when the failed call began.
            replaced: whether to raise StaleGeneration if the placement was replaced. Otherwise the caller waits for the
                server, which may answer again.

        Returns:
            Whether the connection has moved since.

        Raises:
            StaleGeneration: the job has a placement of another generation, or with other lock groups, or its variables
                are not on servers.
        """
        if connection.moves == moves:
            found, gone = self._locator.ask(self._connections.placement, time.monotonic())
            if found is not None:
                self._connections.move(found)
            newer = found is not None and found.generation > self._connections.placement.generation
            if self._connections.is_regrouped or (replaced and (gone or newer)):
                self.on_retry()  # raises if the job has ended
                known = self._connections.placement
                raise errors.StaleGeneration(
                    f"job {known.job} is no longer on the servers, or in the lock groups, of its generation "
                    f"{known.generation}; fetch its placement again",
                    job=known.job,
                )
        return connection.moves != moves

    def _watch(self) -> None:
        """Asks where the lock groups are while a call takes long.

        A server that was stopped or cut off closes no connection, so its calls would wait for as long as it is away.
        """
        pause = _LATE_S
        while not self._connections.closed.wait(shortened(pause)):
            now = time.monotonic()
            taken_s = now - min(self._begun.copy().values(), default=now)
            pause = min(max(_LATE_S, _PART * taken_s), _LONGEST_PAUSE_S)
            if taken_s < _LATE_S:
                continue
            found, _ = self._locator.ask(self._connections.placement, now)
            if found is not None:
                self._connections.move(found)


__all__ = ["RepeatedCalls"]
