"""Shard store: the shards that a server hosts, by job."""

import threading
from collections.abc import Callable, Iterable

from shoal import errors
from shoal._limits import catalogue
from shoal._memory.buffers import BufferPool
from shoal._wire import ShardLayout
from shoal.status import UndeliveredNorm
from shoal_server.shards.lock_group import LockGroup
from shoal_server.shards.machine.norm_exchange import NormOutbox
from shoal_server.shards.reader_memory import ReaderMemory
from shoal_server.shards.shard import JobShardConfig
from shoal_server.shards.stored_shards import needed_bytes

# Buffer-pool limits: bytes retained, and seconds before they are released. Reused memory saves the next push its page
# faults, which cost more than its copy.
_POOL_BYTES, _POOL_KEEP_S = 4 << 30, 3.0


class ShardStore:
    """All shards of one server, a lock group for each job.

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
        self._groups: dict[str, LockGroup] = {}  # by job

    def create(self, config: JobShardConfig, layouts: Iterable[ShardLayout]) -> int:
        """Creates shards of a job. Shards that exist at this generation stay.

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
                held = self._groups.get(config.name)
                self._allocating = config.name
            if held and held.config.generation > config.generation:
                raise self._stale(config.name, config.generation, held.config.generation)
            self._check_bytes(config, layouts, held)
            # Allocated outside _lock: filling gigabytes takes seconds, and other jobs must not wait.
            if held and held.config.generation == config.generation:
                group = held
                group.add(layouts)
            else:
                norms = self._norms_of(config) if self._norms_of and config.peers else None
                group = LockGroup(config, layouts, self._on_apply, self.memory, norms=norms, readers=self.readers)
            with self._lock:
                if self._allocating != config.name:
                    raise errors.UnknownJob(f"job {config.name!r} was dropped while its shards were being created")
                self._groups[config.name] = group
        if held and held is not group:
            held.close()
        return group.nbytes

    def drop(self, job: str) -> None:
        """Frees a job's shards, if there are any."""
        with self._lock:
            held = self._groups.pop(job, None)
            if self._allocating == job:
                self._allocating = ""
        if held:
            held.close()

    def clear(self) -> None:
        """Frees all shards, after the cluster has declared this server lost."""
        with self._lock:
            held, self._groups, self._allocating = self._groups, {}, ""
        for group in held.values():
            group.close()

    def group(self, job: str, generation: int) -> LockGroup:
        """Returns a job's shards.

        Args:
            job: name of the job.
            generation: generation of the placement that the caller knows.

        Raises:
            UnknownJob: this server does not host the job.
            StaleGeneration: it hosts the job at another generation.
        """
        group = self.group_at_any_generation(job)
        if group.config.generation != generation:
            raise self._stale(job, generation, group.config.generation)
        return group

    def group_at_any_generation(self, job: str) -> LockGroup:
        """Returns a job's shards, at any generation.

        Raises:
            UnknownJob: the job has no shards here.
        """
        with self._lock:
            group = self._groups.get(job)
        if group is None:
            raise errors.UnknownJob(f"job {job!r} has no shards on this server; it may have ended or been dropped")
        return group

    def groups(self) -> list[LockGroup]:
        """Returns the lock groups of all jobs."""
        with self._lock:
            return [*self._groups.values()]

    def load(self) -> tuple[int, int]:
        """Returns the number of shards, and their bytes."""
        groups = self.groups()
        return sum(len(group.shards) for group in groups), sum(group.nbytes for group in groups)

    def queues(self) -> tuple[int, int, int]:
        """Returns, over all jobs, the numbers of waiting pulls, staged pushes, and pushes that wait for a permit."""
        pulls, staged, pushes = zip((0, 0, 0), *(group.queues for group in self.groups()), strict=True)
        return sum(pulls), sum(staged), sum(pushes)

    def undelivered_norms(self) -> list[UndeliveredNorm]:
        """Returns the norms of steps of all jobs that other servers have not taken for some seconds, oldest first."""
        found = (norm for group in self.groups() for norm in group.undelivered_norms)
        return sorted(found, key=lambda norm: -norm.seconds)

    def _check_bytes(self, config: JobShardConfig, layouts: Iterable[ShardLayout], held: LockGroup | None) -> None:
        """Checks that new shards do not exceed the limit. Those that they replace do not count."""
        if self._most_bytes is None:
            return
        others = sum(group.nbytes for group in self.groups() if group is not held)
        if held and held.config.generation == config.generation:
            others += held.nbytes
            present = {shard.layout.shard for shard in held.shards}
            layouts = [layout for layout in layouts if layout.shard not in present]
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
