"""Copies: the lock groups of this server that have a backup or get one, on request of the coordinator."""

import threading
from collections.abc import Callable

from shoal import errors
from shoal.v1 import parameter_server_pb2 as pb
from shoal_server.calling_server import CallingServer
from shoal_server.replication.copy_pace import CopyPace
from shoal_server.replication.primary_link import PrimaryLink
from shoal_server.shards import CopyState, ShardStore


class Copies:
    """The connections to backups.

    Args:
        store: the shards.
        identity: returns who this server is in its calls to the other servers of a job.
        on_broken: called on any thread when a complete copy was lost.
        pace: bounds the bytes a second of all copies; None means no bound.
    """

    def __init__(
        self,
        store: ShardStore,
        identity: Callable[[str], CallingServer],
        on_broken: Callable[[], object] = bool,
        pace: CopyPace | None = None,
    ) -> None:
        self._store, self._identity, self._on_broken = store, identity, on_broken
        self._pace = pace or CopyPace()
        self._lock = threading.Lock()  # guards _by_group; nothing is called under it
        self._by_group: dict[tuple[str, int], PrimaryLink] = {}  # by job and number of the group

    def add(self, request: pb.AddBackupRequest) -> pb.AddBackupReply:
        """Begins to copy a group to another server, unless that was done, and returns how far the copy is.

        Raises:
            Moved: this server is not the primary, or the term is over.
            StaleGeneration, UnknownJob, UnknownShard: this server does not have the group.
            ShoalError: the copy has failed. The next call begins another one.
        """
        group = self._store.hosted.group(request.job, request.generation, [request.group])
        group.check_term(request.term)
        key, identity = (request.job, request.group), self._identity(request.job)
        with self._lock:
            link = self._by_group.get(key)
            if link and link.log.term > request.term:
                raise errors.Moved(f"{request.job}: there is a later decision about lock group {request.group}")
            decision = request.term, request.backup.server
            if link and ((link.log.term, link.log.server) != decision or link.group is not group):
                link = None  # of an earlier decision, or of a group that was split
            made = None
            if link is None:
                made = self._by_group[key] = link = PrimaryLink(group, request, identity, self._on_broken, self._pace)
        if made:
            made.start()
        if link.failure and link.log.state is not CopyState.BROKEN:
            with self._lock:
                if self._by_group.get(key) is link:
                    del self._by_group[key]
            raise type(link.failure)(link.failure.message, **link.failure.details)
        return pb.AddBackupReply(complete=link.log.complete, copied_bytes=link.copied_bytes, bytes=group.nbytes)

    def drop(self, request: pb.DropBackupRequest) -> None:
        """Continues without the backup of a group.

        Raises:
            Moved: this server is not the primary, or the term is over.
            StaleGeneration, UnknownJob, UnknownShard: this server does not have the group.
        """
        group = self._store.hosted.group(request.job, request.generation, [request.group])
        group.end_copy(request.term)
        with self._lock:
            link = self._by_group.get((request.job, request.group))
            if link and link.log.term >= request.term:
                return
            self._by_group.pop((request.job, request.group), None)
        if link:
            link.log.end()  # also if the copy has not begun

    def drop_copy(self, request: pb.DropCopyRequest) -> None:
        """Frees this server's copy of a group, if it is of an earlier term: a backup, or that of a former primary."""
        key = request.job, request.group
        self._store.drop_copy(request.job, request.generation, request.group, request.term)
        with self._lock:
            link = self._by_group.get(key)
            if link and link.log.term < request.term:
                self._by_group.pop(key).close()

    def forget(self, job: str) -> None:
        """Forgets the connections of a job whose shards were dropped. Their groups have closed them."""
        with self._lock:
            links = [self._by_group.pop(key) for key in [key for key in self._by_group if key[0] == job]]
        for link in links:
            link.close()

    def close(self) -> None:
        """Ends all connections."""
        with self._lock:
            links, self._by_group = [*self._by_group.values()], {}
        for link in links:
            link.close()


__all__ = ["Copies"]
