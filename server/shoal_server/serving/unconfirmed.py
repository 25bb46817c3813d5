"""Unconfirmed replies: replies that wait for the backup of a lock group, and the end of waits that take too long.

They take no thread of a pool: a lane waits in its own thread, and a gRPC call has none while it waits.
"""

import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from shoal import _rpc, errors
from shoal_server.shards import Confirmation, LockGroup

R = TypeVar("R")
S = TypeVar("S")


class UnconfirmedReply(_rpc.LaterReply, Generic[R]):
    """A reply that may be sent when the backups have what it depends on. See `shoal._rpc.LaterReply`.

    Args:
        confirmations: what it waits for, one after the other; at least one.
        reply: returns the reply, or raises an error instead.
        again: called with the error if a group was closed or its backup did not confirm the reply. Returns another
            reply, or raises an error.
    """

    def __init__(
        self,
        confirmations: Sequence[Confirmation],
        reply: Callable[[], R],
        again: "Callable[[errors.Moved], R | UnconfirmedReply[R]] | None" = None,
    ) -> None:
        self._confirmations, self._reply, self._again = confirmations, reply, again

    @property
    def waits(self) -> bool:
        """Whether the reply has to wait."""
        return any(confirmation.waits for confirmation in self._confirmations)

    def on_end(self, call: Callable[[], object]) -> None:
        """Calls a function when the wait ends: on any thread, and at once if it has ended. May call it twice."""

        def ended() -> None:
            if not self.waits:
                call()

        for confirmation in self._confirmations:
            confirmation.on_end(ended)

    def withdraw(self) -> None:
        """Ends the wait, because the caller is gone."""
        for confirmation in self._confirmations:
            confirmation.withdraw()

    def then(self, change: Callable[[R], S]) -> "UnconfirmedReply[S]":
        """Returns this reply with a change that is made before it is sent."""
        return UnconfirmedReply(self._confirmations, lambda: change(self._reply()))

    def finish(self) -> "R | UnconfirmedReply[R]":
        """Returns the reply, after the end of the wait.

        Raises:
            Moved: a backup has not confirmed it in time, or its group was closed.
            ShoalError: from the functions that return a reply.
        """
        try:
            for confirmation in self._confirmations:
                confirmation.check()
        except errors.Moved as error:
            if self._again:
                return self._again(error)
            raise
        return self._reply()


class Unconfirmed:
    """The answers of a server that wait for backups. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: set[Confirmation] = set()

    def confirmation(self, group: LockGroup) -> Confirmation | None:
        """Returns what an answer of a group has to wait for, as `LockGroup.confirmation`."""
        return group.confirmation(self._waiting)

    def reply(
        self,
        groups: Sequence[LockGroup],
        reply: Callable[[], R],
        again: Callable[[errors.Moved], R | UnconfirmedReply[R]] | None = None,
    ) -> R | UnconfirmedReply[R]:
        """Returns the reply of a call that has concerned some groups, or one that has to wait.

        Args:
            groups: the groups.
            reply: returns the reply.
            again: as for `UnconfirmedReply`.

        Raises:
            Moved: a group was closed before its backup had all inputs.
        """
        confirmations = [it for group in groups if (it := group.confirmation(self._waiting))]
        return UnconfirmedReply(confirmations, reply, again) if confirmations else reply()

    def end_late(self) -> None:
        """Refuses the answers that have waited for too long. The server calls it periodically."""
        now = self._clock()
        for confirmation in [*self._waiting]:
            confirmation.expire(now)


__all__ = ["Unconfirmed", "UnconfirmedReply"]
