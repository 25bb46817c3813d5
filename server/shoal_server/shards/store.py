"""Shard store: the shards that a server hosts, by job."""

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from shoal import errors
from shoal._limits import catalogue
from shoal._memory.buffers import BufferPool
from shoal._wire import ShardLayout
from shoal.status import BrokenReplica, UndeliveredNorm
from shoal_server.shards.group import InputLog, LockGroup
from shoal_server.shards.hosted_groups import HostedGroups
from shoal_server.shards.machine.norm_exchange import NormOutbox
from shoal_server.shards.values import JobShardConfig, ReaderMemory, needed_bytes

# Buffer-pool limits: bytes retained, and seconds before they are released. Reused memory saves the next push its page
# faults, which cost more than its copy.
_POOL_BYTES, _POOL_KEEP_S = 4 << 30, 3.0


class ShardStore:
    """All shards of one server.

    The store makes lock groups, splits them and closes them. `hosted` finds them.

    Args:
        on_apply: called with the seconds that each update of a group took.
        most_bytes: limit of the bytes of all values and slots; None means no limit.
        norms_of: returns what sends the squares of a job's steps to the other servers of the job.
        most_reader_bytes: limit of the bytes of values that readers use; None means no limit.

    Attributes:
        hosted: the lock groups. Only the store changes which ones there are.
        memory: buffer pool for gradients and copies of values.
        readers: the bytes of values that readers use.
    """

    def __init__(
        self,
        on_apply: Callable[[float], None] = lambda _: None,
        most_bytes: int | None = None,
        norms_of: Callable[[JobShardConfig], NormOutbox] | None = None,
        most_reader_bytes: int | None = None,
    ) -> None:
        self.memory, self.readers = BufferPool(_POOL_BYTES, _POOL_KEEP_S), ReaderMemory(most_reader_bytes)
        self._on_apply, self._most_bytes, self._norms_of = on_apply, most_bytes, norms_of
        # Held while shards are allocated, so that a repeated call finds the first call's shards.
        self._creating = threading.Lock()
        self.hosted = HostedGroups()

    def create(self, config: JobShardConfig, layouts: Iterable[ShardLayout]) -> int:
        """Creates shards of a job, as one lock group. Shards that exist at this generation stay.

        Args:
            config: the job's configuration.
            layouts: layouts of the shards.

        Returns:
            Bytes that the job's shards take here.

        Raises:
            StaleGeneration: the job is hosted at a later generation.
            UnknownJob: the job was dropped meanwhile.
            BadRequest: new shards at a generation that has begun to train.
            LimitExceeded: the shards would exceed the limit of bytes. Nothing has been allocated.
        """
        layouts = tuple(layouts)
        with self._creating:
            held = self.hosted.begin(config)
            present = {number: group for number, group in held.items() if group.config.generation == config.generation}
            layouts = [layout for layout in layouts if not any(layout.shard in group for group in present.values())]
            self._check_bytes(config, layouts, present.values())
            # Other jobs do not wait meanwhile: filling gigabytes takes seconds.
            if not present:
                norms = self._norms_of(config) if self._norms_of and config.peers else None
                group = LockGroup(config, layouts, self._on_apply, self.memory, norms=norms, readers=self.readers)
                present = {group.number: group}
            elif layouts:
                next(iter(present.values())).add(layouts)
            ended, now = self.hosted.add(config, present)
        for earlier in ended:
            earlier.close()
        return sum(group.nbytes for group in now.values())

    def drop(self, job: str) -> None:
        """Frees a job's shards, if there are any."""
        for group in self.hosted.remove_job(job):
            group.close()

    def clear(self) -> None:
        """Frees all shards, after the cluster has declared this server lost."""
        for group in self.hosted.remove_all():
            group.close()

    def split(
        self,
        job: str,
        generation: int,
        number: int,
        shards: Sequence[int],
        term: int,
        is_wanted: Callable[[], bool] = lambda: True,
        keeps: int = 0,
        logs: Sequence[InputLog] = (),
    ) -> None:
        """Makes two lock groups of one.

        Args:
            job: name of the job.
            generation: generation of the placement.
            number: number of the group, which keeps it.
            shards: the shards that leave the group. The smallest one is the number of the new group.
            term: number of the coordinator's decision.
            is_wanted: returns whether the caller still waits.
            keeps: the term of the backup that both groups keep; 0 if there is none.
            logs: the logs of both groups if there is one.

        Raises:
            BadRequest: the group cannot be split in this way.
            Moved: this server is not the primary, or there is a later decision.
            Overloaded: there was no moment between two steps.
            Cancelled: the caller does not wait any more.
            UnknownJob, UnknownShard, StaleGeneration: this server does not have the group.
        """
        group = self.hosted.numbered(job, generation, number)
        group.split(shards, term, partial(self.hosted.divide, group), is_wanted, keeps, logs)

    def parts(self, job: str, number: int, shards: Sequence[int]) -> Sequence[LockGroup]:
        """Returns the two groups of a group that was split here: the one with its number, and the one of these shards.

        Args:
            job: name of the job.
            number: number of the group.
            shards: the shards that left the group.

        Returns:
            None of them if the group was not split in this way.

        Raises:
            UnknownJob: this server does not host the job.
        """
        groups = self.hosted.of_job(job)
        rest, part = groups.get(number), groups.get(min(shards))
        if not rest or not part or any(shard in rest for shard in shards):
            return ()
        return (rest, part) if {shard.layout.shard for shard in part.shards} == set(shards) else ()

    def add_backup(self, config: JobShardConfig, layouts: Iterable[ShardLayout], term: int) -> LockGroup:
        """Creates the backup of a lock group, without its values. It replaces a backup of an earlier term.

        Args:
            config: the job's configuration.
            layouts: layouts of the group's shards.
            term: the term of the primary.

        Returns:
            The backup.

        Raises:
            Moved: this server is the primary, or the term is over.
            StaleGeneration: the job is hosted at a later generation.
            UnknownJob: the job was dropped meanwhile.
            LimitExceeded: the shards would exceed the limit of bytes. Nothing has been allocated.
        """
        layouts = tuple(layouts)
        number = min(layout.shard for layout in layouts)
        with self._creating:
            held = self.hosted.begin(config)
            replaced = [it for key, it in held.items() if key == number or it.config.generation < config.generation]
            kept = {key: it for key, it in held.items() if it not in replaced}
            for group in replaced:
                if group.config.generation == config.generation:
                    group.check_replaceable(term)
            self._check_bytes(config, layouts, kept.values())
            group = LockGroup(config, layouts, self._on_apply, self.memory, readers=self.readers, follows=term)
            ended, _ = self.hosted.add(config, {number: group})
        for earlier in ended:
            earlier.close()
        return group

    def drop_copy(self, job: str, generation: int, number: int, term: int) -> None:
        """Frees the copy of a lock group, if there is one of an earlier term. Calls that wait are sent to the primary.

        Args:
            job: name of the job.
            generation: generation of the placement.
            number: number of the group.
            term: the term of the copies on other servers.
        """
        try:
            group = self.hosted.numbered(job, generation, number)
        except (errors.UnknownJob, errors.UnknownShard, errors.StaleGeneration):
            return
        if group.leave(term):
            self.drop_backup(group)

    def drop_backup(self, group: LockGroup) -> None:
        """Frees a backup, or the copy of a former primary."""
        with self._creating:  # no call that creates shards may put it back
            self.hosted.remove(group)
        group.close()

    def load(self) -> tuple[int, int]:
        """Returns the number of shards, and their bytes."""
        groups = self.hosted.all()
        return sum(len(group.shards) for group in groups), sum(group.nbytes for group in groups)

    def queues(self) -> tuple[int, int, int]:
        """Returns, over all jobs, the numbers of waiting pulls, staged pushes, and pushes that wait for a permit."""
        pulls, staged, pushes = zip((0, 0, 0), *(group.queues for group in self.hosted.all()), strict=True)
        return sum(pulls), sum(staged), sum(pushes)

    def broken_replicas(self) -> list[BrokenReplica]:
        """Returns the lock groups whose other copy this server does not reach any more."""
        return [broken for group in self.hosted.all() for broken in group.broken_replicas]

    def undelivered_norms(self) -> list[UndeliveredNorm]:
        """Returns the norms of steps of all jobs that other servers have not taken for some seconds, oldest first."""
        found = (norm for group in self.hosted.all() for norm in group.undelivered_norms)
        return sorted(found, key=lambda norm: -norm.seconds)

    def _check_bytes(
        self, config: JobShardConfig, layouts: Iterable[ShardLayout], present: Iterable[LockGroup]
    ) -> None:
        """Checks that new shards do not exceed the limit. Those of earlier generations, which they replace, are free.

        Args:
            config: the job's configuration.
            layouts: layouts of the new shards.
            present: the groups of the job that stay.
        """
        if self._most_bytes is None:
            return
        others = sum(group.nbytes for group in self.hosted.all() if group.config.name != config.name)
        others += sum(group.nbytes for group in present)
        needed = needed_bytes(config, layouts)
        if others + needed > self._most_bytes:
            raise catalogue.SHARD_BYTES.refusal(
                f"the shards of {config.name} need {needed} bytes here, and other shards have {others}",
                "add servers, or give this one more memory",
                limit=self._most_bytes,
            )
