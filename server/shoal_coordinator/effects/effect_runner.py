"""The effect runner: threads that carry out the cluster machine's effects, in order for each job, with retries.

`shoal_coordinator.coordinator` feeds events to the machine and passes its effects to this module. The machine receives
the outcome of an effect as an event, and the effect ends when the machine has handled this event. If the coordinator
dies before that, the next one repeats the effect.

Each job has a queue of effects, and others for its slow effects. The effects of a queue run one after the other.
There is one exception: consecutive admissions in a queue share their calls to servers, and so do consecutive removals
of workers. So when a coordinator dies, most pending effects have not begun. Only the first effect of each queue, or
the first such group, can have been carried out in whole or in part.

There are several pools of threads: effects that wait for different things run in different pools (`_Pool`), so they do
not wait for each other. The thread for a queue comes from the pool of the first effect in the queue. A server that does
not answer blocks only the threads of the effects that call it.
"""

import enum
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import structlog

from shoal import _tracing, errors
from shoal._checkpoint import Catalogue, CheckpointStorage, no_storage_message
from shoal_coordinator.effects import checkpoint_commit, checkpoint_cut, copy_effects, shard_effects, worker_effects
from shoal_coordinator.effects.effect_queues import queue_of, take_batch
from shoal_coordinator.effects.failures import failure_of, loses_shards
from shoal_coordinator.effects.parallel_calls import ServerSilent
from shoal_coordinator.effects.server_calls import ServerCalls
from shoal_coordinator.effects.server_channels import CredentialsFor, ServerChannels, no_credentials
from shoal_coordinator.effects.storage_reads import StorageReads, TimedCatalogue
from shoal_coordinator.messages import (
    AddBackup,
    AdmitWorker,
    CheckpointPublished,
    CommitCheckpoint,
    CreateShards,
    CutHeld,
    DropBackup,
    DropCopy,
    DropShards,
    Effect,
    HoldResult,
    JobRef,
    ProbeServer,
    Promote,
    RemoveWorker,
    ScanCheckpoints,
    ServerRef,
    SetLearningRate,
    SplitGroup,
    TakeCut,
    events,
    servers_of,
)

_log = structlog.get_logger(__name__)


class _Pool(enum.Enum):
    """The pools of threads, by what their effects wait for."""

    WORKERS = "workers"  # servers that answer at once: workers enter and leave, shards are dropped
    SILENT = "silent"  # servers that have not answered for some time
    CREATION = "creation"  # servers that allocate shards
    RESTORE = "restore"  # servers that read checkpoints
    CUT = "cut"  # servers that wait for commits to end
    STORAGE = "storage"  # checkpoint storage
    COPIES = "copies"  # servers that copy shards to others
    SPLITS = "splits"  # servers that wait for the end of a step
    PROBES = "probes"  # servers that may be dead


# Threads of each pool; they only wait, so there may be many. The storage of one job may hang, and so may a server.
_THREADS = {
    _Pool.WORKERS: 8,
    _Pool.SILENT: 32,
    _Pool.CREATION: 32,
    _Pool.RESTORE: 32,
    _Pool.CUT: 16,
    _Pool.STORAGE: 8,
    _Pool.COPIES: 32,
    _Pool.SPLITS: 16,
    _Pool.PROBES: 16,
}
# Seconds after which an effect of the pool WORKERS that waits for a server runs again, from its beginning, in the pool
# SILENT. The effects of that pool are safe to repeat at any point.
PATIENCE_S = 2.0
# The number of effects that may wait for one job name.
_MAX_QUEUED = 100_000
# The number of checkpoints that are traced at the same time.
_OPEN_CHECKPOINTS = 64

EffectReport = events.EffectOutcome | events.WorkerFenced
_Result = events.EffectOutcome | Exception


class EffectHost(Protocol):
    """The coordinator as the effect runner needs it. The runner's threads call it without a lock."""

    def report(self, outcome: EffectReport) -> None:
        """Handles an outcome, and returns when it is durable."""
        ...

    def report_all(self, outcomes: Sequence[EffectReport]) -> None:
        """Handles outcomes as one event, and returns when they are durable."""
        ...

    def published(self, event: CheckpointPublished) -> bool:
        """Records a complete checkpoint. When that is durable, returns whether older ones may be removed."""
        ...

    def held(self, event: CutHeld) -> HoldResult:
        """Returns the coordinator's own part of a cut."""
        ...

    def wanted(self, effect: int, server: ServerRef) -> bool:
        """Returns whether a server is alive and the effect is still pending."""
        ...

    def is_live(self, job: JobRef) -> bool:
        """Returns whether a job has not ended."""
        ...

    def incarnation(self, server: ServerRef) -> int:
        """Returns the incarnation of a live server at this address, or 0."""
        ...


class EffectRunner:
    """The threads that carry out effects.

    Args:
        host: The coordinator.
        count: Called after each effect with its kind and whether it succeeded.
        storage: The checkpoint storage. None means that the cluster has none.
        on_retry: Called for each repeated call to a server.
        reads: Limits the time that restores wait for the storage.
        saves: Limits the time that scans and commits of checkpoints wait for the storage.
        credentials_for: Returns what the coordinator presents to a server, by its member id.
        grant_for: Signs the copies that servers make.
    """

    def __init__(
        self,
        host: EffectHost,
        count: Callable[[str, bool], None] = lambda _kind, _done: None,
        storage: CheckpointStorage | None = None,
        on_retry: Callable[[], None] = lambda: None,
        reads: StorageReads | None = None,
        saves: StorageReads | None = None,
        credentials_for: CredentialsFor = no_credentials,
        grant_for: copy_effects.GrantFor = copy_effects.no_grant,
    ) -> None:
        # Separate, because a job may be restored while an effect of an earlier checkpoint still runs.
        self._reads, self._saves = reads or StorageReads(), saves or StorageReads()
        self._host, self._count, self._on_retry, self._grant_for = host, count, on_retry, grant_for
        self._catalogue = Catalogue(storage) if storage else None
        self._channels = ServerChannels(host.incarnation, credentials_for=credentials_for)
        self._lock = threading.Lock()  # guards _queues and _patient; no other lock is taken under it
        # The keys are those of `queue_of`. A new job of the same name waits for the effects of the earlier one. A queue
        # exists exactly as long as a thread works on it.
        self._queues: dict[tuple[str, str], deque[Effect]] = {}
        self._patient: set[int] = set()  # effects that have moved to the pool SILENT
        self._checkpoint_traces = _tracing.Traces("checkpoint", _OPEN_CHECKPOINTS)
        self._stopped = threading.Event()
        self._pools = {
            kind: ThreadPoolExecutor(threads, thread_name_prefix=f"effects-{kind.value}")
            for kind, threads in _THREADS.items()
        }

    def submit(self, effects: Sequence[Effect]) -> None:
        """Appends effects to the queues of their jobs and returns at once."""
        with self._lock:
            for effect in effects:
                if self._stopped.is_set():
                    return
                key = queue_of(effect)
                if key not in self._queues:
                    self._queues[key] = deque()
                    pool = self._pool_for(effect)
                    self._pools[pool].submit(self._drain, key, pool)
                if len(self._queues[key]) < _MAX_QUEUED:
                    self._queues[key].append(effect)
                else:  # only if servers are silent for hours; the job has failed by then
                    _log.error("effect queue full; effect deferred until a restart", effect=repr(effect))

    def keep_channels(self, live: Mapping[ServerRef, int]) -> None:
        """Closes the channels to servers that are gone.

        Args:
            live: The incarnations of the live servers.
        """
        self._channels.keep_only(live)

    def stop(self) -> None:
        """Drops queued effects and waits for the threads. Unfinished effects stay pending for the next coordinator."""
        with self._lock:
            self._stopped.set()
        for pool in self._pools.values():
            pool.shutdown(wait=True, cancel_futures=True)
        self._channels.close()
        self._checkpoint_traces.close()

    def _pool_for(self, effect: Effect) -> _Pool:
        """Returns the pool in which an effect runs. Called with the lock."""
        match effect:
            case ScanCheckpoints() | CommitCheckpoint():
                return _Pool.STORAGE
            case TakeCut():
                return _Pool.CUT
            case CreateShards() if effect.sources:
                return _Pool.RESTORE
            case AddBackup():
                return _Pool.COPIES
            case SplitGroup():
                return _Pool.SPLITS
            case ProbeServer():
                return _Pool.PROBES
        servers = servers_of(effect.placement) if isinstance(effect, CreateShards) else effect.servers
        if effect.number in self._patient or self._channels.any_silent(servers):
            return _Pool.SILENT
        return _Pool.CREATION if isinstance(effect, CreateShards) else _Pool.WORKERS

    def _drain(self, key: tuple[str, str], pool: _Pool) -> None:
        while True:
            with self._lock:
                queue = self._queues[key]
                if self._stopped.is_set() or not queue:
                    del self._queues[key]
                    return
                needed = self._pool_for(queue[0])
                if needed is not pool:
                    self._pools[needed].submit(self._drain, key, needed)
                    return
                batch = take_batch(queue)
            try:
                self._perform(batch, pool)
            except ServerSilent as silent:
                _log.warning("waiting for a server", effect=type(batch[0]).__name__, job=key[0], server=str(silent))
                with self._lock:
                    queue.extendleft(reversed(batch))
                    self._patient.update(effect.number for effect in batch)
                continue
            except errors.ShoalError as error:  # the coordinator has stopped; the next one repeats the effects
                _log.warning("outcome refused", effect=type(batch[0]).__name__, job=key[0], reason=error.message)
                with self._lock:
                    del self._queues[key]
                return
            except Exception:  # a defect; continue with the job's other effects
                _log.exception("outcome lost", effects=len(batch), first=repr(batch[0]))
            with self._lock:
                self._patient.difference_update(effect.number for effect in batch)

    def _perform(self, batch: list[Effect], pool: _Pool) -> None:
        """Carries out effects that share their calls, and reports their outcomes.

        Args:
            batch: The effects; replaced by what is left of them if `ServerSilent` is raised.
            pool: The pool of this thread.
        """
        first, kind = batch[0], type(batch[0]).__name__
        results: Sequence[_Result]
        try:
            with self._traced(first, kind):
                results = self._results(batch, pool)
        except ServerSilent:
            raise
        except Exception as error:
            if self._stopped.is_set():
                return
            results = [error] * len(batch)
        outcomes: list[events.EffectOutcome] = []
        for effect, result in zip(batch, results, strict=True):
            if isinstance(result, Exception) or isinstance(effect, CommitCheckpoint):
                self._checkpoint_traces.end(_checkpoint_of(effect))
            self._count(kind, not isinstance(result, Exception))
            outcomes.append(self._failure(effect, result) if isinstance(result, Exception) else result)
        if done := sum(not isinstance(result, Exception) for result in results):
            _log.debug("effect done", effect=kind, job=first.job.name, effects=done)
        if len(outcomes) == 1:
            self._host.report(outcomes[0])
        else:
            self._host.report_all(outcomes)

    def _failure(self, effect: Effect, error: Exception) -> events.EffectOutcome:
        """Returns the outcome of an effect that has failed."""
        text = error.message if isinstance(error, errors.ShoalError) else f"{type(error).__name__}: {error}"
        failure = failure_of(effect, error)
        where = {"servers": failure.servers} if failure.servers else {}
        _log.warning(failure.what, job=effect.job.name, **where, reason=text, advice=failure.advice)
        match effect:
            case DropShards() | DropCopy():
                return events.EffectDone(effect=effect.number)
            case ScanCheckpoints() | TakeCut() | CommitCheckpoint():
                shards_lost = isinstance(error, errors.SHARDS_LOST)
                return events.CheckpointFailed(effect.job, text, shards_lost, effect=effect.number)
            case CreateShards() if isinstance(error, errors.StorageFailed):
                return events.RestoreDeferred(effect.job, text, effect=effect.number)
        lost = loses_shards(effect, error)
        return events.EffectFailed(effect.job, f"{failure.what}: {text}", lost, effect=effect.number)

    def _traced(self, effect: Effect, kind: str) -> _tracing.Span:
        """Returns a span of this effect. Effects of one checkpoint share a trace; any other effect begins its own."""
        if checkpoint := _checkpoint_of(effect):
            return self._checkpoint_traces.span(checkpoint, kind, job=effect.job.name)
        return _tracing.root(kind, job=effect.job.name)

    def _results(self, batch: list[Effect], pool: _Pool) -> Sequence[_Result]:
        effect = batch[0]
        calls = self._calls(effect, PATIENCE_S if pool is _Pool.WORKERS else None)
        match effect:
            case AdmitWorker():
                return worker_effects.admit([it for it in batch if isinstance(it, AdmitWorker)], calls)
            case RemoveWorker():
                self._remove_workers(batch, calls)
                return [events.EffectDone(effect=it.number) for it in batch]
        return [self._outcome(effect, calls)]

    def _outcome(self, effect: Effect, calls: ServerCalls) -> events.EffectOutcome:
        match effect:
            case CreateShards():
                return shard_effects.create(
                    effect, calls, lambda: self._timed_catalogue(effect), lambda: self._host.is_live(effect.job)
                )
            case DropShards():
                shard_effects.drop(effect, calls)
            case SetLearningRate():
                shard_effects.set_learning_rate(effect, calls)
            case ScanCheckpoints():
                return checkpoint_commit.scan(effect, self._saving_catalogue(effect))
            case TakeCut():
                held = CutHeld(effect.job)
                return checkpoint_cut.take_cut(effect, calls, lambda: self._host.held(held))
            case AddBackup():
                return copy_effects.add_backup(effect, calls, self._stopped.wait, time.monotonic, self._grant(effect))
            case DropBackup() | Promote():
                return copy_effects.tell(effect, calls)
            case SplitGroup():
                return copy_effects.split(effect, calls, self._stopped.wait, lambda: self._grant(effect))
            case DropCopy():
                copy_effects.drop_copy(effect, calls)
            case ProbeServer():
                return copy_effects.probe(effect, calls)
            case CommitCheckpoint():
                return checkpoint_commit.commit(effect, calls, self._saving_catalogue(effect), self._host.published)
        return events.EffectDone(effect=effect.number)

    def _grant(self, effect: AddBackup | SplitGroup) -> str:
        return copy_effects.grant_of(effect, self._host.incarnation, self._grant_for)

    @property
    def _checkpoints(self) -> Catalogue:
        if self._catalogue is None:
            raise no_storage_message("this coordinator")
        return self._catalogue

    def _timed_catalogue(self, effect: CreateShards) -> Catalogue:
        def is_wanted() -> bool:
            return not self._stopped.is_set() and self._host.is_live(effect.job)

        return TimedCatalogue(self._checkpoints, self._reads, effect.job.name, is_wanted)

    def _saving_catalogue(self, effect: ScanCheckpoints | CommitCheckpoint) -> Catalogue:
        return TimedCatalogue(self._checkpoints, self._saves, effect.job.name, lambda: True)

    def _remove_workers(self, batch: list[Effect], calls: ServerCalls) -> None:
        def fenced(removals: Sequence[RemoveWorker]) -> None:
            # The numbers must be durable: a later coordinator could ask only servers that have not yet released the
            # workers. For the same reason they stay with the effects if these run again.
            known = [events.WorkerFenced(it.number, it.committed_steps or 0) for it in removals]
            if len(known) == 1:
                self._host.report(known[0])
            else:
                self._host.report_all(known)
            batch[:] = removals

        worker_effects.remove([it for it in batch if isinstance(it, RemoveWorker)], calls, fenced)

    def _calls(self, effect: Effect, patience_s: float | None) -> ServerCalls:
        def wanted(server: ServerRef) -> bool:
            return not self._stopped.is_set() and self._host.wanted(effect.number, server)

        return ServerCalls(self._channels, wanted, self._on_retry, patience_s)


def _checkpoint_of(effect: Effect) -> str:
    match effect:
        case TakeCut():
            return f"{effect.job.name}/{effect.checkpoint}"
        case CommitCheckpoint():
            return f"{effect.job.name}/{effect.cut.number}"
    return ""
