"""Shard store: the shards that a server hosts, by job."""

import threading
from collections.abc import Callable, Iterable, Sequence

from shoal import errors
from shoal._memory.buffers import BufferPool
from shoal._wire import ShardLayout
from shoal_server.shards.commit_gate import CommitGate
from shoal_server.shards.shard import JobShardConfig, Shard

# Buffer-pool limits: bytes retained, and seconds before they are released. Reused memory saves the next push its page
# faults, which cost more than its copy.
_POOL_BYTES, _POOL_KEEP_S = 4 << 30, 3.0


class ShardStore:
    """All shards of one server.

    Args:
        on_apply: called with the seconds that each update of a shard took.

    Attributes:
        memory: buffer pool for gradients and copies of values.
    """

    def __init__(self, on_apply: Callable[[float], None] = lambda _: None) -> None:
        self.memory = BufferPool(_POOL_BYTES, _POOL_KEEP_S)
        self._on_apply = on_apply
        # Held while shards are allocated, so that a repeated call finds the first call's shards.
        self._creating = threading.Lock()
        self._lock = threading.Lock()  # guards _jobs and _allocating; taken after _creating
        self._allocating = ""  # the job that `create` allocates now; "" after that job was dropped
        self._jobs: dict[str, tuple[JobShardConfig, dict[int, Shard]]] = {}
        self._gates: dict[str, CommitGate] = {}  # by job, while it is hosted

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
        """
        with self._creating:
            with self._lock:
                held = self._jobs.get(config.name)
                self._allocating = config.name
            if held and held[0].generation > config.generation:
                raise self._stale(config.name, config.generation, held[0].generation)
            existing = held[1] if held and held[0].generation == config.generation else {}
            # Allocated outside _lock: filling gigabytes takes seconds, and other jobs must not wait.
            fresh = {
                layout.shard: Shard(config, layout, self._on_apply, self.memory)
                for layout in layouts
                if layout.shard not in existing
            }
            shards = existing | fresh
            with self._lock:
                if self._allocating != config.name:
                    raise errors.UnknownJob(f"job {config.name!r} was dropped while its shards were being created")
                self._jobs[config.name] = (config, shards)
                replaced = held is not None and held[0].generation < config.generation
                commit_gate = self._gates.pop(config.name, None) if replaced else None
                self._gates.setdefault(config.name, CommitGate())
        if held and replaced:
            self._close(held[1].values(), commit_gate)
        return sum(shard.nbytes for shard in shards.values())

    def drop(self, job: str) -> None:
        """Frees a job's shards, if there are any."""
        with self._lock:
            held = self._jobs.pop(job, None)
            commit_gate = self._gates.pop(job, None)
            if self._allocating == job:
                self._allocating = ""
        if held:
            self._close(held[1].values(), commit_gate)

    def clear(self) -> None:
        """Frees all shards, after the cluster has declared this server lost."""
        with self._lock:
            held, self._jobs, self._allocating = self._jobs, {}, ""
            gates, self._gates = self._gates, {}
        for job, (_, shards) in held.items():
            self._close(shards.values(), gates.get(job))

    def shards(self, job: str, indices: Sequence[int], generation: int) -> list[Shard]:
        """Returns some shards of a job.

        Args:
            job: name of the job.
            indices: numbers of the shards, without repeats; at least one.
            generation: generation of the placement that the caller knows.

        Raises:
            UnknownJob, UnknownShard: this server does not host them.
            StaleGeneration: it hosts them at another generation.
            BadRequest: no shard is named, or one is named twice.
        """
        if not indices or len(set(indices)) != len(indices):
            raise errors.BadRequest(f"shards {list(indices)} of {job}: name at least one shard, and each only once")
        config, held = self._known(job)
        if config.generation != generation:
            raise self._stale(job, generation, config.generation)
        missing = [index for index in indices if index not in held]
        if missing:
            raise errors.UnknownShard(f"this server does not host shards {missing} of {job}; it has {sorted(held)}")
        return [held[index] for index in indices]

    def commit_gate(self, job: str) -> CommitGate:
        """Returns the gate that a job's commits pass.

        Raises:
            UnknownJob: the job has no shards here.
        """
        with self._lock:
            commit_gate = self._gates.get(job)
        if commit_gate is None:
            self._known(job)
            raise errors.UnknownJob(f"job {job!r} was dropped from this server")
        return commit_gate

    def config(self, job: str, generation: int) -> JobShardConfig:
        """Returns the configuration that a job's shards share.

        Raises:
            UnknownJob: this server does not host the job.
            StaleGeneration: it hosts the job at another generation.
        """
        config, _ = self._known(job)
        if config.generation != generation:
            raise self._stale(job, generation, config.generation)
        return config

    def all_shards(self, job: str) -> list[Shard]:
        """Returns the shards of a job, at any generation.

        Raises:
            UnknownJob: the job has no shards here.
        """
        return list(self._known(job)[1].values())

    def everything(self) -> list[Shard]:
        """Returns the shards of all jobs."""
        with self._lock:
            return [shard for _, shards in self._jobs.values() for shard in shards.values()]

    def load(self) -> tuple[int, int]:
        """Returns the number of shards, and their bytes."""
        shards = self.everything()
        return len(shards), sum(shard.nbytes for shard in shards)

    def queues(self) -> tuple[int, int]:
        """Returns, over all shards, the numbers of waiting pulls and of staged pushes."""
        queues = [shard.queues for shard in self.everything()]
        return sum(waiting for waiting, _ in queues), sum(staged for _, staged in queues)

    def _known(self, job: str) -> tuple[JobShardConfig, dict[int, Shard]]:
        with self._lock:
            held = self._jobs.get(job)
        if held is None:
            raise errors.UnknownJob(f"job {job!r} has no shards on this server; it may have ended or been dropped")
        return held

    @staticmethod
    def _stale(job: str, got: int, current: int) -> errors.StaleGeneration:
        return errors.StaleGeneration(
            f"{job} is at generation {current} here, the request at {got}; fetch the placement again",
            expected=current,
            got=got,
        )

    @staticmethod
    def _close(shards: Iterable[Shard], commit_gate: CommitGate | None) -> None:
        for shard in shards:
            shard.close()
        if commit_gate:
            commit_gate.close()  # after the shards, so that held commits find them closed
