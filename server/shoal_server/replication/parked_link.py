"""Parked link: the receiving end of the connection of a part, until the group that it is a part of is split."""

import threading
from collections.abc import Callable
from contextlib import suppress

from shoal import errors
from shoal._transport import Connection, Frame
from shoal.v1 import replica_pb2
from shoal_server.replication.backup_link import BackupLink, accept_copies
from shoal_server.shards import LockGroup


class ParkedLink:
    """A connection that waits for the split of a group. Nothing is received before.

    Args:
        whole: the connection of the group.
        hello: the primary's hello.
        lane: the lane on which the primary will send.
        link_of: returns the link of the part, given its group and the lane on which this end sends.

    Attributes:
        whole, term, primary: as for `BackupLink`.
    """

    def __init__(
        self,
        whole: BackupLink,
        hello: replica_pb2.ReplicaHello,
        lane: Connection,
        link_of: Callable[[LockGroup, Connection], BackupLink],
    ) -> None:
        self.whole, self.term, self.primary = whole, hello.term, (hello.server, hello.incarnation)
        self._lane, self._link_of = lane, link_of
        self._changed = threading.Condition()  # guards the rest; no lock of a group or of `Backups` is taken under it
        self._copies: Connection | None = None
        self._link: BackupLink | None = None
        self._ended = False

    def wait(self) -> BackupLink:
        """Tells the primary that the connection is accepted, and waits for the split. Returns the link of the part.

        Raises:
            Unreachable: the connection ended before.
        """
        with suppress(errors.ShoalError):
            self._lane.send(Frame.END)
        with self._changed:
            self._changed.wait_for(lambda: self._link or self._ended)
            if self._link:
                return self._link
        raise errors.Unreachable(f"{self._lane.peer} ended the connection of a part before the group was split")

    def answer_on(self, copies: Connection) -> Callable[[], None]:
        """As `BackupLink.answer_on`. If the lane ends before the split, the connection does."""
        with self._changed:
            follow = accept_copies(copies, self._copies, ended=self._ended)
            self._copies = copies

        def follow_to_end() -> None:
            try:
                follow()
            finally:
                self.stop()

        return follow_to_end

    def give(self, group: LockGroup) -> BackupLink | None:
        """Continues as the connection of a group. Called with the lock of the group that was split.

        Returns:
            The link; None if the connection has ended.
        """
        with self._changed:
            if not self._ended and self._copies:
                self._link = self._link_of(group, self._copies)
            self._ended = True
            self._changed.notify_all()
            return self._link

    def stop(self) -> None:
        """Ends the connection, if the group was not split."""
        with self._changed:
            parked, self._ended = not self._link, True
            self._changed.notify_all()
        if parked:
            self._lane.close()
            if self._copies:
                self._copies.close()


__all__ = ["ParkedLink"]
