"""The shards that a server hosts, by job."""

import threading
from collections.abc import Callable, Iterable, Sequence

from shoal import errors
from shoal._memory.buffers import BufferPool
from shoal._wire import ShardLayout
from shoal_server.shards.commit_gate import CommitGate
from shoal_server.shards.shard import JobShardConfig, Shard

# Of memory that was used for gradients and is free: the most that is kept, and for how long. What is kept saves the
# next push its page faults, which cost more than its copy.
_SPARE_BYTES, _SPARE_S = 4 << 30, 3.0


class ShardStore:
    """All shards of one server.

    Args:
        on_apply: told the seconds that each update of any shard took.

    Attributes:
        memory: for gradients and copies of values.
    """

    def __init__(self, on_apply: Callable[[float], None] = lambda _: None) -> None:
        self.memory = BufferPool(_SPARE_BYTES, _SPARE_S)
        self._on_apply = on_apply
        self._creating = threading.Lock()  # held while shards are allocated: a repeated call finds what the first made
        self._lock = threading.Lock()  # guards _jobs and _allocating; taken after _creating
        self._allocating = ""  # the job that `create` is at work on; "" once that was dropped
        self._jobs: dict[str, tuple[JobShardConfig, dict[int, Shard]]] = {}
        self._gates: dict[str, CommitGate] = {}  # as long as the job is there

    def create(self, terms: JobShardConfig, layouts: Iterable[ShardLayout]) -> int:
        """Hosts shards of a job, and says how many bytes they take. Those there already, at this generation, stay.

        Raises:
            StaleGeneration: the job is hosted at a later generation.
            UnknownJob: it was dropped meanwhile.
        """
        with self._creating:
            with self._lock:
                held = self._jobs.get(terms.name)
                self._allocating = terms.name
            if held and held[0].generation > terms.generation:
                raise self._stale(terms.name, terms.generation, held[0].generation)
            existing = held[1] if held and held[0].generation == terms.generation else {}
            # Allocated outside _lock: filling gigabytes takes seconds, and other jobs go on meanwhile.
            fresh = {
                layout.shard: Shard(terms, layout, self._on_apply, self.memory)
                for layout in layouts
                if layout.shard not in existing
            }
            shards = existing | fresh
            with self._lock:
                if self._allocating != terms.name:
                    raise errors.UnknownJob(f"job {terms.name!r} was dropped while its shards were being created")
                self._jobs[terms.name] = (terms, shards)
                replaced = held is not None and held[0].generation < terms.generation
                gate = self._gates.pop(terms.name, None) if replaced else None
                self._gates.setdefault(terms.name, CommitGate())
        if held and replaced:
            self._close(held[1].values(), gate)
        return sum(shard.nbytes for shard in shards.values())

    def drop(self, job: str) -> None:
        """Frees a job's shards, if there are any."""
        with self._lock:
            held = self._jobs.pop(job, None)
            gate = self._gates.pop(job, None)
            if self._allocating == job:
                self._allocating = ""
        if held:
            self._close(held[1].values(), gate)

    def clear(self) -> None:
        """Frees everything: the cluster has given this server up."""
        with self._lock:
            held, self._jobs, self._allocating = self._jobs, {}, ""
            gates, self._gates = self._gates, {}
        for job, (_, shards) in held.items():
            self._close(shards.values(), gates.get(job))

    def shards(self, job: str, indices: Sequence[int], generation: int) -> list[Shard]:
        """Some shards of a job.

        Raises:
            UnknownJob, UnknownShard: this server does not host them.
            StaleGeneration: it does, but at another generation.
            BadRequest: none are named, or one twice.
        """
        if not indices or len(set(indices)) != len(indices):
            raise errors.BadRequest(f"shards {list(indices)} of {job}: name at least one, and each once")
        terms, held = self._known(job)
        if terms.generation != generation:
            raise self._stale(job, generation, terms.generation)
        missing = [index for index in indices if index not in held]
        if missing:
            raise errors.UnknownShard(f"this server does not host shards {missing} of {job}; it has {sorted(held)}")
        return [held[index] for index in indices]

    def gate(self, job: str) -> CommitGate:
        """What commits of a job pass.

        Raises:
            UnknownJob: it has no shards here.
        """
        with self._lock:
            gate = self._gates.get(job)
        if gate is None:
            self._known(job)
            raise errors.UnknownJob(f"job {job!r} was dropped from this server")
        return gate

    def terms(self, job: str, generation: int) -> JobShardConfig:
        """What a job's shards have in common.

        Raises:
            UnknownJob: this server does not host it.
            StaleGeneration: it does, but at another generation.
        """
        terms, _ = self._known(job)
        if terms.generation != generation:
            raise self._stale(job, generation, terms.generation)
        return terms

    def all_shards(self, job: str) -> list[Shard]:
        """The shards of a job, at whatever generation.

        Raises:
            UnknownJob: there are none here.
        """
        return list(self._known(job)[1].values())

    def everything(self) -> list[Shard]:
        """The shards of all jobs."""
        with self._lock:
            return [shard for _, shards in self._jobs.values() for shard in shards.values()]

    def load(self) -> tuple[int, int]:
        """How many shards there are, and their bytes."""
        shards = self.everything()
        return len(shards), sum(shard.nbytes for shard in shards)

    def queues(self) -> tuple[int, int]:
        """Over all shards: pulls that wait for their mode, and pushes that wait to be committed."""
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
    def _close(shards: Iterable[Shard], gate: CommitGate | None) -> None:
        for shard in shards:
            shard.close()
        if gate:
            gate.close()  # after them: what was held back finds them gone
