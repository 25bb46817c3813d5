"""Shard store: the shards that a server hosts, by job."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from shoal import errors
from shoal._limits import catalogue
from shoal._memory.buffers import BufferPool
from shoal._wire import ShardLayout
from shoal.status import BrokenReplica, UndeliveredNorm
from shoal_server.shards.lock_group import LockGroup
from shoal_server.shards.machine.norm_exchange import NormOutbox
from shoal_server.shards.pending_split import check_parts
from shoal_server.shards.reader_memory import ReaderMemory
from shoal_server.shards.shard import JobShardConfig
from shoal_server.shards.stored_shards import needed_bytes

T = TypeVar("T")

# Buffer-pool limits: bytes retained, and seconds before they are released. Reused memory saves the next push its page
# faults, which cost more than its copy.
_POOL_BYTES, _POOL_KEEP_S = 4 << 30, 3.0


class ShardStore:
    """All shards of one server.

    A job has one lock group here, or several: after the loss of another server, this one also has the groups whose
    backups it had. A group is named by its job and the smallest index of its shards.

    Args:
        on_apply: called with the seconds that each update of a group took.
        most_bytes: limit of the bytes of all values and slots; None means no limit.
        norms_of: returns what sends the squares of a job's steps to the other servers of the job.
        most_reader_bytes: limit of the bytes of values that readers use; None means no limit.

    Attributes:
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
        self._lock = threading.Lock()  # guards _groups and _allocating; taken after _creating
        self._allocating = ""  # the job that `create` allocates now; "" after that job was dropped
        # By job, then by number. The inner mappings are replaced, not changed, so that they are read without the lock.
        self._groups: dict[str, Mapping[int, LockGroup]] = {}

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
            with self._lock:
                held = self._groups.get(config.name, {})
                self._allocating = config.name
            present = {number: group for number, group in held.items() if group.config.generation == config.generation}
            if any(group.config.generation > config.generation for group in held.values()):
                raise self._stale(config.name, config.generation, next(iter(held.values())).config.generation)
            layouts = [layout for layout in layouts if not any(layout.shard in group for group in present.values())]
            self._check_bytes(config, layouts, present.values())
            # Allocated outside _lock: filling gigabytes takes seconds, and other jobs must not wait.
            if not present:
                norms = self._norms_of(config) if self._norms_of and config.peers else None
                group = LockGroup(config, layouts, self._on_apply, self.memory, norms=norms, readers=self.readers)
                present = {group.number: group}
            elif layouts:
                next(iter(present.values())).add(layouts)
            ended, now = self._replace(config, present)
        for earlier in ended:
            earlier.close()
        return sum(group.nbytes for group in now.values())

    def _replace(
        self, config: JobShardConfig, added: Mapping[int, LockGroup]
    ) -> tuple[list[LockGroup], Mapping[int, LockGroup]]:
        """Adds groups to a job, unless the job was dropped meanwhile. They replace those of earlier generations.

        Groups that were split meanwhile are not put back: their parts stay.

        Args:
            config: the job's configuration.
            added: the groups. Those that were there before the call began may be among them.

        Returns:
            The groups that were replaced, and those that the job has now.

        Raises:
            UnknownJob: the job was dropped.
        """
        with self._lock:
            if self._allocating != config.name:
                raise errors.UnknownJob(f"job {config.name!r} was dropped while its shards were being created")
            held = self._groups.get(config.name, {})
            kept = {key: it for key, it in held.items() if it.config.generation == config.generation}
            now = kept | {key: it for key, it in added.items() if not it.closed}
            self._groups[config.name] = now
        return [it for key, it in held.items() if now.get(key) is not it], now

    def drop(self, job: str) -> None:
        """Frees a job's shards, if there are any."""
        with self._lock:
            held = self._groups.pop(job, {})
            if self._allocating == job:
                self._allocating = ""
        for group in held.values():
            group.close()

    def clear(self) -> None:
        """Frees all shards, after the cluster has declared this server lost."""
        with self._lock:
            held, self._groups, self._allocating = self._groups, {}, ""
        for groups in held.values():
            for group in groups.values():
                group.close()

    def split(self, job: str, generation: int, number: int, shards: Sequence[int], term: int) -> None:
        """Makes two lock groups of one. A repetition has no effect.

        Args:
            job: name of the job.
            generation: generation of the placement.
            number: number of the group, which keeps it.
            shards: the shards that leave the group. The smallest one is the number of the new group.
            term: number of the coordinator's decision.

        Raises:
            BadRequest: the group cannot be split in this way.
            Moved: this server is not the primary, or there is a later decision.
            Overloaded: there was no moment between two steps.
            UnknownJob, UnknownShard, StaleGeneration: this server does not have the group.
        """
        check_parts(job, number, shards)
        group = self.held(job, generation, number)
        if self._is_split(job, number, shards, term):
            return

        def replace(rest: LockGroup, part: LockGroup) -> None:
            with self._lock:
                held = self._groups.get(job, {})
                if held.get(number) is not group:
                    raise errors.UnknownJob(f"job {job!r} was dropped while its lock group {number} was being split")
                self._groups[job] = {**held, number: rest, part.number: part}

        try:
            group.split(shards, term, replace)
        except errors.Moved:
            if not self._is_split(job, number, shards, term):  # by another call
                raise

    def _is_split(self, job: str, number: int, shards: Sequence[int], term: int) -> bool:
        groups = self._of_job(job)
        rest, part = groups.get(number), groups.get(min(shards))
        if not rest or not part or min(rest.term, part.term) < term or any(shard in rest for shard in shards):
            return False
        return {shard.layout.shard for shard in part.shards} == set(shards)

    def group(self, job: str, generation: int, shards: Sequence[int] = ()) -> LockGroup:
        """Returns the lock group of some shards.

        Args:
            job: name of the job.
            generation: generation of the placement that the caller knows.
            shards: numbers of the shards, all in one group. Empty means the only group of the job.

        Raises:
            UnknownJob: this server does not host the job.
            UnknownShard: it does not host the shards.
            Moved: it has some of the shards, or has them in several groups: the caller knows an earlier grouping.
            StaleGeneration: it hosts the job at another generation.
        """
        groups = self._of_job(job)
        first = next(iter(groups.values()))
        if first.config.generation != generation:
            raise self._stale(job, generation, first.config.generation)
        if len(groups) == 1:
            return first  # `select` checks the shards
        found = [group for group in groups.values() if all(shard in group for shard in shards)]
        if found and shards:
            return min(found, key=lambda group: group.follows)  # a backup may be of an earlier grouping
        known = any(shard in group for group in groups.values() for shard in shards)
        raise (errors.Moved if known else errors.UnknownShard)(
            f"this server has the lock groups {sorted(groups)} of {job}, none of which has the shards {list(shards)}; "
            "fetch the placement again"
        )

    def groups_of(self, job: str, generation: int | None = None) -> list[LockGroup]:
        """Returns the lock groups of a job of which this server is the primary, in order of their numbers.

        Args:
            job: name of the job.
            generation: generation of the placement that the caller knows; None means any.

        Raises:
            UnknownJob: the job has no shards here.
            Moved: it has only backups here.
            StaleGeneration: they are of another generation.
        """
        groups = [group for _, group in sorted(self._of_job(job).items()) if not group.follows]
        if not groups:
            raise errors.Moved(f"this server has only backups of shards of {job}; fetch the placement again")
        if generation is not None and groups[0].config.generation != generation:
            raise self._stale(job, generation, groups[0].config.generation)
        return groups

    def on_groups(self, job: str, call: Callable[[list[LockGroup]], T], generation: int | None = None) -> T:
        """Makes a call that concerns all lock groups of a job here. If one is split meanwhile, repeats it.

        Args:
            job, generation: as for `groups_of`.
            call: called with the groups. It is safe to repeat.

        Returns:
            The result of the call.

        Raises:
            ShoalError: from `groups_of` or the call.
        """
        while True:
            groups = self.groups_of(job, generation)
            try:
                return call(groups)
            except errors.Moved:
                now = self.groups_of(job, generation)
                if now == groups or _shards_of(now) != _shards_of(groups):
                    raise

    def held(self, job: str, generation: int, number: int) -> LockGroup:
        """Returns a lock group, which may be a backup.

        Args:
            job: name of the job.
            generation: generation of the placement.
            number: number of the group.

        Raises:
            UnknownJob, UnknownShard: this server does not have it.
            StaleGeneration: it has the job at another generation.
        """
        group = self._of_job(job).get(number)
        if group is None:
            raise errors.UnknownShard(f"this server does not have lock group {number} of {job}")
        if group.config.generation != generation:
            raise self._stale(job, generation, group.config.generation)
        return group

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
            with self._lock:
                held = dict(self._groups.get(config.name, {}))
                self._allocating = config.name
            if any(group.config.generation > config.generation for group in held.values()):
                raise self._stale(config.name, config.generation, next(iter(held.values())).config.generation)
            replaced = [it for key, it in held.items() if key == number or it.config.generation < config.generation]
            kept = {key: it for key, it in held.items() if it not in replaced}
            for group in replaced:
                if group.config.generation == config.generation:
                    group.check_replaceable(term)
            self._check_bytes(config, layouts, kept.values())
            group = LockGroup(config, layouts, self._on_apply, self.memory, readers=self.readers, follows=term)
            ended, _ = self._replace(config, {number: group})
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
            group = self.held(job, generation, number)
        except (errors.UnknownJob, errors.UnknownShard, errors.StaleGeneration):
            return
        if group.leave(term):
            self.drop_backup(group)

    def drop_backup(self, group: LockGroup) -> None:
        """Frees a backup, or the copy of a former primary."""
        job = group.config.name
        with self._creating, self._lock:  # no call that creates shards may put it back
            kept = {key: it for key, it in self._groups.get(job, {}).items() if it is not group}
            if kept:
                self._groups[job] = kept
            else:
                self._groups.pop(job, None)
        group.close()

    def _of_job(self, job: str) -> Mapping[int, LockGroup]:
        with self._lock:
            groups = self._groups.get(job)
        if not groups:
            raise errors.UnknownJob(f"job {job!r} has no shards on this server; it may have ended or been dropped")
        return groups

    def groups(self) -> list[LockGroup]:
        """Returns the lock groups of all jobs, with the backups."""
        with self._lock:
            return [group for groups in self._groups.values() for group in groups.values()]

    def load(self) -> tuple[int, int]:
        """Returns the number of shards, and their bytes."""
        groups = self.groups()
        return sum(len(group.shards) for group in groups), sum(group.nbytes for group in groups)

    def queues(self) -> tuple[int, int, int]:
        """Returns, over all jobs, the numbers of waiting pulls, staged pushes, and pushes that wait for a permit."""
        pulls, staged, pushes = zip((0, 0, 0), *(group.queues for group in self.groups()), strict=True)
        return sum(pulls), sum(staged), sum(pushes)

    def broken_replicas(self) -> list[BrokenReplica]:
        """Returns the lock groups whose other copy this server does not reach any more."""
        return [broken for group in self.groups() if (broken := group.broken_replica)]

    def undelivered_norms(self) -> list[UndeliveredNorm]:
        """Returns the norms of steps of all jobs that other servers have not taken for some seconds, oldest first."""
        found = (norm for group in self.groups() for norm in group.undelivered_norms)
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
        others = sum(group.nbytes for group in self.groups() if group.config.name != config.name)
        others += sum(group.nbytes for group in present)
        needed = needed_bytes(config, layouts)
        if others + needed > self._most_bytes:
            raise catalogue.SHARD_BYTES.refusal(
                f"the shards of {config.name} need {needed} bytes here, and other shards have {others}",
                "add servers, or give this one more memory",
                limit=self._most_bytes,
            )

    @staticmethod
    def _stale(job: str, got: int, current: int) -> errors.StaleGeneration:
        return errors.StaleGeneration(
            f"{job} has generation {current} on this server, but the request has {got}; fetch the placement again",
            expected=current,
            got=got,
        )


def _shards_of(groups: Iterable[LockGroup]) -> set[int]:
    return {shard.layout.shard for group in groups for shard in group.shards}
