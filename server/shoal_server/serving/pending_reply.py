"""Pending reply: a reply that waits for a backup, or for the end of a cut; and all such waits of a server.

It takes no thread of a pool: a lane waits in its own thread, and a gRPC call has none while it waits.
"""

import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from shoal import _rpc, errors
from shoal_server.shards import CallWait, Confirmation, LockGroup, Payload

R = TypeVar("R")
S = TypeVar("S")


class PendingReply(_rpc.LaterReply, Generic[R]):
    """A reply that is not known yet, because its call waits.

    Args:
        waits: what it waits for, at least one wait.
        finish: called after the end of all waits. It checks them, and returns the reply or a pending one, or raises an
            error.
        dropped: called instead if the call ends before that.
    """

    def __init__(
        self,
        waits: Sequence[CallWait],
        finish: "Callable[[], R | PendingReply[R]]",
        dropped: Callable[[], object] = bool,
    ) -> None:
        self._waits, self._finish, self._dropped = waits, finish, dropped

    @property
    def waits(self) -> bool:
        """Whether the reply has to wait."""
        return any(wait.waits for wait in self._waits)

    def on_end(self, call: Callable[[], object]) -> None:
        """Calls a function when the wait ends: on any thread, and at once if it has ended. May call it twice."""

        def ended() -> None:
            if not self.waits:
                call()

        for wait in self._waits:
            wait.on_end(ended)

    def withdraw(self) -> None:
        """Ends the wait, because the call is over. Then `finish` is not called."""
        for wait in self._waits:
            wait.withdraw()
        self._dropped()

    def finish(self) -> "R | PendingReply[R]":
        """Returns the reply, after the end of the wait; or another one that waits.

        Raises:
            Moved: a backup has not confirmed it in time, or its group was closed.
            ShoalError: the error of the call.
        """
        return self._finish()

    def then(self, change: Callable[[R], S]) -> "PendingReply[S]":
        """Returns this reply with a change that is made before it is sent."""

        def finish() -> "S | PendingReply[S]":
            reply = self._finish()
            return reply.then(change) if isinstance(reply, PendingReply) else change(reply)

        return PendingReply(self._waits, finish, self._dropped)


class CallWaits:
    """The waits of a server's calls. Thread-safe.

    Attributes:
        all: the waits that have not ended.
    """

    def __init__(self) -> None:
        self.all: set[CallWait] = set()

    def confirmation(self, group: LockGroup) -> Confirmation | None:
        """Returns what an answer of a group has to wait for, as `LockGroup.confirmation`."""
        return group.confirmation(self.all)

    def sending(self, group: LockGroup, payload: Payload | None) -> CallWait | None:
        """Returns what a push has to wait for before it is staged, as `LockGroup.send_gradient`."""
        return None if payload is None else group.send_gradient(payload, self.all)

    def reply(
        self,
        groups: Sequence[LockGroup],
        reply: Callable[[], R],
        again: Callable[[errors.Moved], R | PendingReply[R]] | None = None,
    ) -> R | PendingReply[R]:
        """Returns the reply of a call that has concerned some groups, or one that has to wait.

        Args:
            groups: the groups.
            reply: returns the reply.
            again: called with the error if a backup has not confirmed the reply, or a group was closed. Returns another
                reply, or raises an error.

        Raises:
            Moved: a group was closed before its backup had all inputs.
        """
        confirmations = [it for group in groups if (it := self.confirmation(group))]

        def finish() -> R | PendingReply[R]:
            try:
                for confirmation in confirmations:
                    confirmation.check()
            except errors.Moved as error:
                if again:
                    return again(error)
                raise
            return reply()

        return PendingReply(confirmations, finish) if confirmations else reply()

    def end_late(self) -> None:
        """Ends the waits that have taken too long. The server calls it periodically."""
        now = time.monotonic()
        for wait in [*self.all]:
            wait.expire(now)


__all__ = ["CallWaits", "PendingReply"]
