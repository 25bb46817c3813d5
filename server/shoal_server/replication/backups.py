"""Backups: the lock groups that this server keeps for primaries on other servers."""

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

import numpy as np
import structlog
from google.protobuf.message import DecodeError

from shoal import errors
from shoal._security import AccessRole, Authorizer, CopyGrant, open_authorizer
from shoal._transport import Connection, send_error
from shoal._wire import ShardLayout, check_text
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1 import replica_pb2
from shoal_server.optimizers import compilation
from shoal_server.replication.backup_link import BackupLink
from shoal_server.replication.parked_link import ParkedLink
from shoal_server.replication.received import ReplicaMemory
from shoal_server.shards import GroupSplit, JobShardConfig, LockGroup, ShardStore

_log = structlog.get_logger(__name__)


class Backups:
    """The connections from primaries.

    Args:
        store: the shards; gets the backups.
        authorizer: checks that the callers are servers.
        on_broken: called on any thread when the connection from a primary has broken.
        memory: counts the bytes of gradients and inputs that the backups keep.
        incarnation: returns the incarnation of this server, for which the coordinator grants copies.
    """

    def __init__(
        self,
        store: ShardStore,
        authorizer: Authorizer | None = None,
        on_broken: Callable[[], object] = bool,
        memory: ReplicaMemory | None = None,
        incarnation: Callable[[], int] = int,
    ) -> None:
        self._memory, self._incarnation = memory or ReplicaMemory(), incarnation
        self._store, self._authorizer, self._on_broken = store, authorizer or open_authorizer(), on_broken
        # Guards _by_group and _parked. Taken alone or after the lock of a group. Only the locks of `HostedGroups` and
        # of parked connections are taken under it.
        self._lock = threading.Lock()
        self._by_group: dict[tuple[str, int], BackupLink] = {}  # by job and number of the group
        # The connections that wait for the split of a group, two at most, by its job and number, then by their part.
        self._parked: dict[tuple[str, int], dict[int, ParkedLink]] = {}

    def serve(self, lane: Connection, payload: memoryview, region: Callable[[int], np.ndarray]) -> None:
        """Serves one connection of a replica until it ends.

        Args:
            lane: the connection.
            payload: its first frame.
            region: returns the bytes of a region of the lane's segment, by its number, or raises BadRequest.

        Raises:
            BadFrame: the first frame cannot be read.
            BadRequest: it is not the hello of a replica.
            ShoalError: why it ended. The other end has received a refusal.
        """
        try:
            hello = replica_pb2.ReplicaHello.FromString(bytes(payload))
        except DecodeError as error:
            raise errors.BadFrame(f"a ReplicaHello cannot be read: {error}") from None
        try:
            self._check_caller(lane, hello)
            if hello.direction == replica_pb2.ReplicaHello.COPIES:
                follow = self._link_of(hello).answer_on(lane)
            elif hello.direction == replica_pb2.ReplicaHello.INPUTS:
                self._check_grant(hello)
                follow = partial(self._follow, self._accept(lane, hello, region))
            elif hello.direction == replica_pb2.ReplicaHello.PART:
                self._check_grant(hello)
                follow = partial(self._follow_parked, self._park(lane, hello, region))
            else:
                raise errors.BadRequest(
                    f"a ReplicaHello has the direction {hello.direction}; it must be INPUTS, COPIES or PART"
                )
        except errors.ShoalError as error:
            send_error(lane, error)
            raise
        follow()

    def promote(self, request: pb.PromoteRequest) -> int:
        """Makes a backup the primary, and the part that was split off it if the request names it. Returns its version.

        Raises:
            Moved: the copy is not complete, or the term is over.
            StaleGeneration, UnknownJob, UnknownShard: this server does not have the group.
        """
        version = self._promote(request, request.group, request.keeps_term)
        if request.split_off:  # if the group was split, that has been carried out by now
            for part in self._store.parts(request.job, request.group, request.split_off)[1:]:
                self._promote(request, part.number)
        return version

    def _promote(self, request: pb.PromoteRequest, number: int, keeps: int = 0) -> int:
        while True:
            with self._lock:
                group = self._store.hosted.numbered(request.job, request.generation, number)
                link = self._by_group.get((request.job, number))
            if link and link.group is group:
                group.check_term(request.term)
                group.keep_copy(keeps)  # inputs in progress may wait for another one
                link.stop()
                if not link.complete:
                    raise errors.Moved(f"{request.job}: this server has no complete copy of lock group {number}")
                if group.closed and self._is_divided(group):
                    continue  # the part with this number has a connection of its own
            return group.promote(request.term, keeps)

    def _is_divided(self, group: LockGroup) -> bool:
        job, number = group.config.name, group.number
        with suppress(errors.UnknownJob):
            return self._store.hosted.of_job(job).get(number, group) is not group
        return False

    def _check_caller(self, lane: Connection, hello: replica_pb2.ReplicaHello) -> None:
        identity = lane.identity
        if identity is None:
            return
        self._authorizer.check_participant(identity, hello.job, hello.server, hello.incarnation, reading=False)
        if identity.role is not AccessRole.PEER:
            raise errors.Forbidden(f"{identity.name!r} is no server, so it cannot keep a backup here", job=hello.job)

    def _check_grant(self, hello: replica_pb2.ReplicaHello) -> None:
        """Checks that the coordinator wants this copy. The second lane needs no grant: it names the first one."""
        group = hello.split_from if hello.direction == replica_pb2.ReplicaHello.PART else hello.group
        copy = CopyGrant(hello.job, hello.generation, group, hello.term, hello.server, hello.incarnation)
        self._authorizer.check_copy(copy, hello.grant, self._incarnation())

    def _link_of(self, hello: replica_pb2.ReplicaHello) -> BackupLink | ParkedLink:
        with self._lock:
            parked = [it for (job, _), parts in self._parked.items() if job == hello.job for it in parts.items()]
            links = [self._by_group.get((hello.job, hello.group)), *(it for part, it in parked if part == hello.group)]
        # Another server of the job must not take the answers over, or its primary would wait for them.
        about = hello.term, (hello.server, hello.incarnation)
        found = next((it for it in links if it and (it.term, it.primary) == about), None)
        if not found:
            raise errors.Moved(f"{hello.job}: this server has no copy of lock group {hello.group} at term {hello.term}")
        return found

    def _accept(
        self, lane: Connection, hello: replica_pb2.ReplicaHello, region: Callable[[int], np.ndarray]
    ) -> BackupLink:
        """Makes the memory of a backup. It replaces a backup of an earlier term."""
        config, layouts = _configuration(hello)
        with self._lock:
            earlier = self._by_group.get((hello.job, hello.group))
        if earlier and earlier.term == hello.term and earlier.primary[0] != hello.server:
            raise errors.Moved(
                f"{hello.job}: {earlier.primary[0]} is the primary of lock group {hello.group} at term {hello.term}, "
                f"and not {hello.server}"
            )
        group = self._store.add_backup(config, layouts, hello.term)
        try:
            if earlier:
                earlier.stop()
            link = BackupLink(group, lane, hello, self._store.memory, self._memory, region, self._divide)
            with self._lock:
                if group.closed:  # by a copy of a later term, which must stay the one that `promote` finds
                    raise errors.Moved(f"{hello.job}: the copy of term {hello.term} was replaced meanwhile")
                self._by_group[hello.job, hello.group] = link
        except errors.ShoalError:
            self._store.drop_backup(group)
            raise
        return link

    def _park(
        self, lane: Connection, hello: replica_pb2.ReplicaHello, region: Callable[[int], np.ndarray]
    ) -> ParkedLink:
        """Accepts a connection for a part of a group that the primary is about to split."""
        config, layouts = _configuration(hello)
        key = hello.job, hello.split_from

        def link_of(group: LockGroup, copies: Connection) -> BackupLink:
            return BackupLink(group, lane, hello, self._store.memory, self._memory, region, self._divide, copies)

        with self._lock:
            whole, waiting = self._by_group.get(key), self._parked.get(key, {})
            is_part = whole and whole.complete and all(layout.shard in whole.group for layout in layouts)
            if not whole or not is_part or whole.primary != (hello.server, hello.incarnation) or whole.group.closed:
                raise errors.Moved(f"{hello.job}: this server has no complete copy of lock group {hello.split_from}")
            if whole.group.config.generation != config.generation or hello.term < whole.term:
                raise errors.Moved(f"{hello.job}: term {hello.term} of lock group {hello.split_from} is over")
            if any(it.term > hello.term for it in waiting.values()):
                raise errors.Moved(f"{hello.job}: there is a later split of lock group {hello.split_from}")
            parked = ParkedLink(whole, hello, lane, link_of)
            kept = {part: it for part, it in waiting.items() if it.term == hello.term and part != hello.group}
            if len(kept) > 1:
                raise errors.BadRequest(f"{hello.job}: lock group {hello.split_from} can only be split into two parts")
            self._parked[key] = {**kept, hello.group: parked}
        _stop(it for it in waiting.values() if it not in kept.values())
        return parked

    def _follow_parked(self, parked: ParkedLink) -> None:
        try:
            link = parked.wait()
        finally:
            with self._lock:
                self._parked = {
                    key: left
                    for key, parts in self._parked.items()
                    if (left := {part: it for part, it in parts.items() if it is not parked})
                }
        self._follow(link)

    def _divide(self, whole: BackupLink, event: GroupSplit) -> None:
        """Makes two backups of one, as the primary did. Each continues with the connection that was opened for it."""
        group, unconnected = whole.group, list[LockGroup]()
        key = group.config.name, group.number

        def replace(rest: LockGroup, part: LockGroup) -> None:
            with self._lock:
                self._store.hosted.divide(group, rest, part)
                waiting = self._parked.pop(key, {})
                for each in (rest, part):
                    parked = waiting.pop(each.number, None)
                    link = parked.give(each) if parked and parked.term == event.term else None
                    if link:
                        self._by_group[each.config.name, each.number] = link
                    else:
                        self._by_group.pop((each.config.name, each.number), None)
                        unconnected.append(each)
            _stop(waiting.values())

        group.follow_split(event, replace)
        for each in unconnected:
            each.lose_primary("its connection had ended when its group was split")
        if unconnected:
            self._on_broken()

    def _follow(self, link: BackupLink) -> None:
        group = link.group
        try:
            link.run()
        except errors.ShoalError as error:
            if self._is_held(group) and link.complete:
                group.lose_primary(error.message)
            if any(not it.primary for it in group.broken_replicas):
                _log.warning("the primary of a backup is gone", job=group.config.name, reason=error.message)
                self._on_broken()
            raise
        finally:
            with self._lock:
                if self._by_group.get((group.config.name, group.number)) is link:
                    del self._by_group[group.config.name, group.number]
                parts = [it for parts in self._parked.values() for it in parts.values() if it.whole is link]
            _stop(parts)  # the group will not be split any more
            if not link.complete:
                self._store.drop_backup(group)

    def _is_held(self, group: LockGroup) -> bool:
        return group in self._store.hosted.all()


def _configuration(hello: replica_pb2.ReplicaHello) -> tuple[JobShardConfig, list[ShardLayout]]:
    """Returns the configuration and the shards that a hello names.

    Raises:
        UnequalKernels: the kernels of the primary are others.
        BadRequest: they are not those of its group.
    """
    if hello.kernels != compilation.processor():
        raise errors.UnequalKernels(
            f"the kernels of {hello.server} are for {hello.kernels}, and those of this server for "
            f"{compilation.processor()}; their results may differ, so one cannot be the backup of the other. "
            "Use servers with the same kind of processor, or Shoal's image, whose kernels are for processor levels"
        )
    check_text("the name of the job", hello.job)
    check_text("the name of a server", hello.server)
    config = JobShardConfig.from_proto(hello.config)
    layouts = [ShardLayout.from_proto(shard, config.variables) for shard in hello.config.shards]
    number = min((layout.shard for layout in layouts), default=-1)
    if (config.name, config.generation, number) != (hello.job, hello.generation, hello.group):
        raise errors.BadRequest(
            f"the configuration of a replica is not that of lock group {hello.group} of job {hello.job}"
        )
    return config, layouts


def _stop(parked: Iterable[ParkedLink]) -> None:
    for each in [*parked]:
        each.stop()


__all__ = ["Backups"]
