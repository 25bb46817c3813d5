"""Hosted groups: the lock groups that a server hosts, by job, and the errors of callers that know other groups.

`ShardStore` makes the groups and closes them.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from shoal import errors
from shoal_server.shards.group import LockGroup
from shoal_server.shards.values import JobShardConfig

T = TypeVar("T")


class HostedGroups:
    """The lock groups of a server: primaries and backups, by job and by number.

    A job has one lock group here, or several: after the loss of another server, this one also has the groups whose
    backups it had. A group is named by its job and the smallest index of its shards.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _groups and _allocating; no lock is taken under it
        self._allocating = ""  # the job whose groups are being created; "" after that job was removed
        # By job, then by number. The inner mappings are replaced, not changed, so that they are read without the lock.
        self._groups: dict[str, Mapping[int, LockGroup]] = {}

    def all(self) -> list[LockGroup]:
        """Returns the lock groups of all jobs, with the backups."""
        with self._lock:
            return [group for groups in self._groups.values() for group in groups.values()]

    def of_job(self, job: str) -> Mapping[int, LockGroup]:
        """Returns the lock groups of a job by their numbers, with the backups.

        Raises:
            UnknownJob: this server does not host the job.
        """
        with self._lock:
            groups = self._groups.get(job)
        if not groups:
            raise errors.UnknownJob(f"job {job!r} has no shards on this server; it may have ended or been dropped")
        return groups

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
        groups = self.of_job(job)
        first = next(iter(groups.values()))
        if first.config.generation != generation:
            raise _stale(job, generation, first.config.generation)
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
        groups = [group for _, group in sorted(self.of_job(job).items()) if not group.follows]
        if not groups:
            raise errors.Moved(f"this server has only backups of shards of {job}; fetch the placement again")
        if generation is not None and groups[0].config.generation != generation:
            raise _stale(job, generation, groups[0].config.generation)
        return groups

    def on_groups(self, job: str, call: Callable[[list[LockGroup]], T], generation: int | None = None) -> T:
        """Makes a call that concerns all lock groups of a job here. Repeats it if they have changed meanwhile.

        One may have been split, or have moved to another server. The coordinator makes the call there, too.

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
                if self.groups_of(job, generation) == groups:
                    raise

    def numbered(self, job: str, generation: int, number: int) -> LockGroup:
        """Returns a lock group by its number. It may be a backup.

        Args:
            job: name of the job.
            generation: generation of the placement.
            number: number of the group.

        Raises:
            UnknownJob, UnknownShard: this server does not have it.
            StaleGeneration: it has the job at another generation.
        """
        group = self.of_job(job).get(number)
        if group is None:
            raise errors.UnknownShard(f"this server does not have lock group {number} of {job}")
        if group.config.generation != generation:
            raise _stale(job, generation, group.config.generation)
        return group

    def begin(self, config: JobShardConfig) -> Mapping[int, LockGroup]:
        """Returns the lock groups that a job has before others are created for `add`. One caller at a time.

        Args:
            config: the job's configuration.

        Raises:
            StaleGeneration: the job is hosted at a later generation.
        """
        with self._lock:
            held = self._groups.get(config.name, {})
            self._allocating = config.name
        if any(group.config.generation > config.generation for group in held.values()):
            raise _stale(config.name, config.generation, next(iter(held.values())).config.generation)
        return held

    def add(
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

    def divide(self, group: LockGroup, rest: LockGroup, part: LockGroup) -> None:
        """Replaces a lock group by its two parts.

        Args:
            group: the group that was split.
            rest: the part that keeps its number.
            part: the part with the shards that left it.

        Raises:
            UnknownJob: the job was dropped.
        """
        job, number = group.config.name, group.number
        with self._lock:
            held = self._groups.get(job, {})
            if held.get(number) is not group:
                raise errors.UnknownJob(f"job {job!r} was dropped while its lock group {number} was being split")
            self._groups[job] = {**held, number: rest, part.number: part}

    def remove(self, group: LockGroup) -> None:
        """Removes a lock group, if it is still here."""
        job = group.config.name
        with self._lock:
            kept = {key: it for key, it in self._groups.get(job, {}).items() if it is not group}
            if kept:
                self._groups[job] = kept
            else:
                self._groups.pop(job, None)

    def remove_job(self, job: str) -> list[LockGroup]:
        """Removes the lock groups of a job, also those that are being created, and returns them."""
        with self._lock:
            if self._allocating == job:
                self._allocating = ""
            return [*self._groups.pop(job, {}).values()]

    def remove_all(self) -> list[LockGroup]:
        """Removes the lock groups of all jobs, also those that are being created, and returns them."""
        with self._lock:
            held, self._groups, self._allocating = self._groups, {}, ""
        return [group for groups in held.values() for group in groups.values()]


def _stale(job: str, got: int, current: int) -> errors.StaleGeneration:
    return errors.StaleGeneration(
        f"{job} has generation {current} on this server, but the request has {got}; fetch the placement again",
        expected=current,
        got=got,
    )


__all__ = ["HostedGroups"]
