"""Splits: makes two lock groups of one on request of the coordinator, with a copy of each on the backup's server."""

from collections.abc import Callable, Sequence

from shoal import errors
from shoal.v1 import parameter_server_pb2 as pb
from shoal_server.replication.copies import Copies, close_all
from shoal_server.shards import LockGroup, ShardStore, check_parts


class Splits:
    """The splits of the lock groups of one server.

    Args:
        store: the shards.
        copies: the connections to backups.
    """

    def __init__(self, store: ShardStore, copies: Copies) -> None:
        self._store, self._copies = store, copies

    def split(self, request: pb.SplitGroupRequest, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Makes two lock groups of one. A repetition has no effect.

        If the group has a backup, it returns when this has split its copy, too. If the group was split in an earlier
        term, which another coordinator or primary may not know, its parts continue without a backup.

        Args:
            request: the group, and the shards that leave it.
            is_wanted: returns whether the caller still waits.

        Raises:
            BadRequest: the group cannot be split in this way, or not with its backup.
            Moved: this server is not the primary, or there is a later decision.
            Overloaded: there was no moment between two steps.
            Cancelled: the caller does not wait any more.
            UnknownJob, UnknownShard, StaleGeneration: this server does not have the group.
        """
        check_parts(request.job, request.group, request.shards)
        group = self._store.hosted.numbered(request.job, request.generation, request.group)
        if not self._parts(request):
            try:
                self._divide(group, request, is_wanted)
            except errors.Moved:
                if not self._parts(request):  # by another call
                    raise
        self._settle(self._parts(request), request)

    def _parts(self, request: pb.SplitGroupRequest) -> Sequence[LockGroup]:
        return self._store.parts(request.job, request.group, request.shards)

    def _divide(self, group: LockGroup, request: pb.SplitGroupRequest, is_wanted: Callable[[], bool]) -> None:
        group.check_term(request.term)
        opened = self._copies.open_parts(group, request) if request.keeps_term else ()
        try:
            about = request.job, request.generation, request.group, request.shards, request.term
            self._store.split(*about, is_wanted, request.keeps_term, [link.log for link in opened])
        except BaseException:
            close_all(opened)
            raise
        if opened and (parts := self._parts(request)):  # they may be gone again
            self._copies.add_parts(request.job, opened, parts)

    def _settle(self, parts: Sequence[LockGroup], request: pb.SplitGroupRequest) -> None:
        """Makes two parts what the request wants. Those of later terms stay as they are."""
        for part in parts:
            job, generation, number, term = request.job, request.generation, part.number, request.term
            if part.term < request.term:
                self._copies.drop(pb.DropBackupRequest(job=job, generation=generation, group=number, term=term))
            elif part.term == request.term and request.keeps_term:
                self._await_backup(part, request)

    def _await_backup(self, part: LockGroup, request: pb.SplitGroupRequest) -> None:
        """Waits until the backup has split its copy, so that each part has a complete copy there."""
        log = next((log for log in part.logs if log.term == request.term), None)
        if log is None or not log.settle(0):
            why = (log.failure or "it is late") if log else "the connection has ended"
            raise errors.BadRequest(
                f"{request.job}: the backup of lock group {part.number} has not confirmed its split: {why}; repeat the "
                "call, or end the backup with DropBackup"
            )


__all__ = ["Splits"]
