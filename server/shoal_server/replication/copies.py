"""Copies: the lock groups of this server that have a backup or get one, on request of the coordinator.

A group has two of them while its backup moves. A backup has one of its own before it becomes the primary.
"""

import threading
from collections.abc import Callable, Iterable, Sequence

from shoal import errors
from shoal.v1 import parameter_server_pb2 as pb
from shoal_server.calling_server import CallingServer
from shoal_server.replication.copy_pace import CopyPace
from shoal_server.replication.part_link import PartLink
from shoal_server.replication.primary_link import PrimaryLink
from shoal_server.shards import CopyState, LockGroup, ShardStore


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
        # By job and number of the group, then by the term in which the copy was begun.
        self._by_group: dict[tuple[str, int], dict[int, PrimaryLink]] = {}

    def add(self, request: pb.AddBackupRequest) -> pb.AddBackupReply:
        """Begins to copy a group to another server, unless that was done, and returns how far the copy is.

        Raises:
            Moved: this server is not the primary, or the backup if the request says so; or the term is over.
            StaleGeneration, UnknownJob, UnknownShard: this server does not have the group.
            ShoalError: the copy has failed. The next call begins another one.
        """
        group = self._group(request)
        group.check_term(request.term)
        key, identity = (request.job, request.group), self._identity(request.job)
        with self._lock:
            links = self._by_group.get(key, {})
            if max(links, default=0) > request.term:
                raise errors.Moved(f"{request.job}: there is a later decision about lock group {request.group}")
            link = links.get(request.term)
            if link and (link.log.server != request.backup.server or link.group is not group):
                link = None  # of a group that was split
            made = None
            if link is None:
                made = link = PrimaryLink(group, request, identity, self._on_broken, self._pace)
                kept = {term: it for term, it in links.items() if term == request.keeps_term}
                self._by_group[key] = {**kept, request.term: link}
        if made:
            made.start()
        if link.failure and link.log.state is not CopyState.BROKEN:
            with self._lock:
                if self._by_group.get(key, {}).get(request.term) is link:
                    del self._by_group[key][request.term]
            raise type(link.failure)(link.failure.message, **link.failure.details)
        return pb.AddBackupReply(complete=link.log.complete, copied_bytes=link.copied_bytes, bytes=group.nbytes)

    def drop(self, request: pb.DropBackupRequest) -> None:
        """Continues without the backup of a group, or only with the one that the request names.

        Raises:
            Moved: this server is not the primary, or the backup if the request says so; or the term is over; or there
                is no such copy.
            StaleGeneration, UnknownJob, UnknownShard: this server does not have the group.
        """
        self._group(request).end_copy(request.term, request.keeps_term, as_backup=request.as_backup)
        for link in self._take_earlier(request, request.keeps_term):
            link.log.end()  # also if the copy has not begun

    def drop_copy(self, request: pb.DropCopyRequest) -> None:
        """Frees this server's copy of a group, if it is of an earlier term: a backup, or that of a former primary."""
        self._store.drop_copy(request.job, request.generation, request.group, request.term)
        for link in self._take_earlier(request):
            link.close()

    def open_parts(self, group: LockGroup, request: pb.SplitGroupRequest) -> Sequence[PartLink]:
        """Opens the connections of the two parts of a group to its backup, before it is split.

        Args:
            group: the group.
            request: the split, which names the backup.

        Returns:
            The connection of the part that keeps the group's number, and that of the other one.

        Raises:
            BadRequest: the group has no such backup, or its server does not accept the connections.
        """
        with self._lock:
            link = self._by_group.get((request.job, request.group), {}).get(request.keeps_term)
        where = f"{request.job}: lock group {request.group} cannot be split with its backup"
        if link is None or link.group is not group:
            raise errors.BadRequest(f"{where}: it has no backup of term {request.keeps_term}")
        leave = sorted(request.shards)
        rest = [shard.layout.shard for shard in group.shards if shard.layout.shard not in leave]
        about = request, link.backup, self._identity(request.job), self._on_broken
        opened: list[PartLink] = []
        try:
            for shards in (rest, leave):
                opened.append(PartLink(group, shards, *about))
                opened[-1].open()
        except errors.ShoalError as error:
            close_all(opened)
            raise errors.BadRequest(f"{where} on {link.backup.server}: {error.message}; repeat the call") from None
        return opened

    def add_parts(self, job: str, opened: Sequence[PartLink], parts: Sequence[LockGroup]) -> None:
        """Keeps the connections of the parts of a group that was split.

        Args:
            job: name of the job.
            opened: the connections.
            parts: the groups.
        """
        with self._lock:
            for link, part in zip(opened, parts, strict=True):
                link.group = part
                self._by_group[job, part.number] = {link.log.term: link}

    def _group(self, request: pb.AddBackupRequest | pb.DropBackupRequest) -> LockGroup:
        return self._store.hosted.numbered(request.job, request.generation, request.group)

    def _take_earlier(
        self, request: pb.DropBackupRequest | pb.DropCopyRequest, keeps: int | None = None
    ) -> list[PrimaryLink]:
        """Forgets the connections of a group that are of earlier terms than a request, except one. Returns them."""
        key = request.job, request.group
        with self._lock:
            links = self._by_group.get(key, {})
            taken = {term: it for term, it in links.items() if term < request.term and term != keeps}
            if left := {term: it for term, it in links.items() if term not in taken}:
                self._by_group[key] = left
            else:
                self._by_group.pop(key, None)
        return [*taken.values()]

    def forget(self, job: str) -> None:
        """Forgets the connections of a job whose shards were dropped. Their groups have closed them."""
        with self._lock:
            taken = [self._by_group.pop(key) for key in [key for key in self._by_group if key[0] == job]]
        close_all(link for links in taken for link in links.values())

    def close(self) -> None:
        """Ends all connections."""
        with self._lock:
            taken, self._by_group = [*self._by_group.values()], {}
        close_all(link for links in taken for link in links.values())


def close_all(links: Iterable[PrimaryLink]) -> None:
    """Ends some connections."""
    for link in links:
        link.close()


__all__ = ["Copies", "close_all"]
