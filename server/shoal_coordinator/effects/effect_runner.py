"""The effect runner: threads that carry out the cluster machine's effects, in order for each job, with retries.

`shoal_coordinator.coordinator` feeds events to the machine and passes its effects to this module. The machine receives
the outcome of an effect as an event, and the effect ends when the machine has handled this event. If the coordinator
dies before that, the next one repeats the effect. Each job has a queue of effects, and another one for its slow
effects. The effects of a queue run one after the other. So when a coordinator dies, only the first pending effect of
each queue can have been carried out already, in whole or in part.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import structlog

from shoal import _tracing, errors
from shoal._checkpoint import Catalogue, CheckpointStorage, no_storage_message
from shoal.v1 import parameter_server_pb2 as pb
from shoal_coordinator.effects import checkpoint_commit, checkpoint_cut, checkpoint_restore
from shoal_coordinator.effects.server_calls import ServerCalls
from shoal_coordinator.messages import (
    AdmitWorker,
    CheckpointPublished,
    CommitCheckpoint,
    CreateShards,
    CutHeld,
    DropShards,
    Effect,
    HoldResult,
    RemoveWorker,
    ScanCheckpoints,
    ServerRef,
    TakeCut,
    events,
    servers_of,
)

_log = structlog.get_logger(__name__)

# Threads for effects, and threads for the slow effects, which wait for the checkpoint storage. The storage of one job
# may hang, and must not delay the other effects of any job.
_THREADS, _SLOW_THREADS = 8, 8
_SLOW = (ScanCheckpoints, CommitCheckpoint)
# The number of effects that may wait for one job name.
_MAX_QUEUED = 100_000
# The number of checkpoints that are traced at the same time.
_OPEN_CHECKPOINTS = 64
# Allocating and filling shards of many GB takes a while.
_CREATE_TIMEOUT_S = 120.0

# The errors of an effect after which its job restarts. A server that returns one of `SHARDS_LOST` is alive but lacks
# the job's shards; the job restarts after any effect. The other two errors mean that the server cannot be reached, or
# that its heartbeat timeout has expired (`Cancelled`). The job then restarts only if it cannot continue without the
# effect. It can continue without a checkpoint.
_AWAY = (*errors.SHARDS_LOST, errors.Unreachable, errors.Cancelled)

Report = events.EffectOutcome | events.WorkerFenced


class EffectHost(Protocol):
    """The coordinator as the effect runner needs it. The runner's threads call it without a lock."""

    def report(self, outcome: Report) -> None:
        """Handles an outcome, and returns when it is durable."""
        ...

    def published(self, event: CheckpointPublished) -> bool:
        """Records a complete checkpoint, and returns when that is durable, and whether older ones may be removed."""
        ...

    def held(self, event: CutHeld) -> HoldResult:
        """Returns the coordinator's own part of a cut."""
        ...

    def wanted(self, effect: int, server: ServerRef) -> bool:
        """Returns whether a server is alive and the effect is still pending."""
        ...


class EffectRunner:
    """The threads that carry out effects.

    Args:
        host: The coordinator.
        count: Called after each effect with its kind and whether it succeeded.
        storage: The checkpoint storage. None means that the cluster has none.
        on_retry: Called for each repeated call to a server.
    """

    def __init__(
        self,
        host: EffectHost,
        count: Callable[[str, bool], None] = lambda _kind, _done: None,
        storage: CheckpointStorage | None = None,
        on_retry: Callable[[], None] = lambda: None,
    ) -> None:
        self._host, self._count, self._on_retry = host, count, on_retry
        self._catalogue = Catalogue(storage) if storage else None
        self._lock = threading.Lock()  # guards _queues; no other lock is taken under it
        # The keys are the job's name and whether the effects are slow. A new job of the same name waits for the effects
        # of the earlier one. A queue exists exactly as long as a thread works on it.
        self._queues: dict[tuple[str, bool], deque[Effect]] = {}
        self._checkpoint_traces = _tracing.Traces("checkpoint", _OPEN_CHECKPOINTS)
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="effects")
        self._slow_pool = ThreadPoolExecutor(_SLOW_THREADS, thread_name_prefix="checkpoints")

    def submit(self, effects: Sequence[Effect]) -> None:
        """Appends effects to the queues of their jobs and returns at once."""
        with self._lock:
            for effect in effects:
                if self._stopped.is_set():
                    return
                slow = isinstance(effect, _SLOW)
                key = effect.job.name, slow
                if key not in self._queues:
                    self._queues[key] = deque()
                    (self._slow_pool if slow else self._pool).submit(self._drain, key)
                if len(self._queues[key]) < _MAX_QUEUED:
                    self._queues[key].append(effect)
                else:  # happens only if servers are silent for hours, by when the job has failed
                    _log.error("effect queue full; effect deferred until a restart", effect=repr(effect))

    def stop(self) -> None:
        """Drops queued effects and waits for the threads. Unfinished effects stay pending for the next coordinator."""
        with self._lock:
            self._stopped.set()
        for pool in (self._pool, self._slow_pool):
            pool.shutdown(wait=True, cancel_futures=True)
        self._checkpoint_traces.close()

    def _drain(self, key: tuple[str, bool]) -> None:
        while True:
            with self._lock:
                queue = self._queues[key]
                if self._stopped.is_set() or not queue:
                    del self._queues[key]
                    return
                effect = queue.popleft()
            try:
                self._perform(effect)
            except errors.ShoalError as error:  # the coordinator has stopped; the next one repeats the effects
                _log.warning("outcome refused", effect=type(effect).__name__, job=key[0], reason=error.message)
                with self._lock:
                    del self._queues[key]
                return
            except Exception:  # a defect; continue with the job's other effects
                _log.exception("outcome lost", effect=repr(effect))

    def _perform(self, effect: Effect) -> None:
        kind, done = type(effect).__name__, True
        outcome: events.EffectOutcome
        try:
            with self._traced(effect, kind):
                outcome = self._outcome(effect)
            _log.info("effect done", effect=kind, job=effect.job.name)
        except Exception as error:
            done = False
            if self._stopped.is_set():
                return
            text = error.message if isinstance(error, errors.ShoalError) else f"{type(error).__name__}: {error}"
            _log.warning("effect failed", effect=kind, job=effect.job.name, reason=text)
            match effect:
                case DropShards():
                    outcome = events.EffectDone(effect=effect.number)
                case ScanCheckpoints() | TakeCut() | CommitCheckpoint():
                    shards_lost = isinstance(error, errors.SHARDS_LOST)
                    outcome = events.CheckpointFailed(effect.job, text, shards_lost, effect=effect.number)
                case CreateShards() if isinstance(error, errors.StorageFailed):
                    outcome = events.RestoreDeferred(effect.job, text, effect=effect.number)
                case _:
                    shards_lost = isinstance(error, _AWAY)
                    outcome = events.EffectFailed(
                        effect.job, f"{_doing(effect)}: {text}", shards_lost, effect=effect.number
                    )
        if not done or isinstance(effect, CommitCheckpoint):
            self._checkpoint_traces.end(_checkpoint_of(effect))
        self._count(kind, done)
        self._host.report(outcome)

    def _traced(self, effect: Effect, kind: str) -> _tracing.Span:
        """Returns a span of this effect. Effects of one checkpoint share a trace; any other effect begins its own."""
        if checkpoint := _checkpoint_of(effect):
            return self._checkpoint_traces.span(checkpoint, kind, job=effect.job.name)
        return _tracing.root(kind, job=effect.job.name)

    def _outcome(self, effect: Effect) -> events.EffectOutcome:
        calls = self._calls(effect)
        match effect:
            case CreateShards():
                return self._create_shards(effect, calls)
            case AdmitWorker():
                return self._admit_worker(effect, calls)
            case RemoveWorker():
                self._remove_worker(effect, calls)
            case DropShards():
                self._drop_shards(effect, calls)
            case ScanCheckpoints():
                return checkpoint_commit.scan(effect, self._checkpoints)
            case TakeCut():
                held = CutHeld(effect.job)
                return checkpoint_cut.take_cut(effect, calls, lambda: self._host.held(held))
            case CommitCheckpoint():
                return checkpoint_commit.commit(effect, calls, self._checkpoints, self._host.published)
        return events.EffectDone(effect=effect.number)

    @property
    def _checkpoints(self) -> Catalogue:
        if self._catalogue is None:
            raise no_storage_message("this coordinator")
        return self._catalogue

    def _create_shards(self, effect: CreateShards, calls: ServerCalls) -> events.EffectOutcome:
        def create() -> None:
            for server in servers_of(effect.placement):
                calls.call(server, "CreateShards", _creation(effect, server), timeout_s=_CREATE_TIMEOUT_S)

        if not effect.sources:
            create()
            return events.ShardsCreated(effect.job, effect=effect.number)
        restored = checkpoint_restore.restore(effect, create, calls, self._checkpoints)
        return events.ShardsCreated(effect.job, restored, effect=effect.number)

    def _admit_worker(self, effect: AdmitWorker, calls: ServerCalls) -> events.EffectOutcome:
        request = pb.AdmitWorkerRequest(
            job=effect.job.name, worker=effect.worker, incarnation=effect.incarnation, rank=effect.rank
        )
        steps = [calls.call(server, "AdmitWorker", request).step for server in effect.servers]
        return events.WorkerAdmitted(effect.job, effect.assignment, max(steps, default=0), effect=effect.number)

    def _remove_worker(self, effect: RemoveWorker, calls: ServerCalls) -> None:
        job, worker, incarnation = effect.job.name, effect.worker, effect.incarnation
        committed = effect.committed_steps
        if committed is None:
            committed = self._fence_worker(effect, calls)
        release = pb.ReleaseWorkerRequest(job=job, worker=worker, incarnation=incarnation, committed_steps=committed)
        for server in effect.servers:
            calls.call(server, "ReleaseWorker", release)

    def _fence_worker(self, effect: RemoveWorker, calls: ServerCalls) -> int:
        """Fences a worker on all servers and returns its committed steps.

        No server releases the worker before all have fenced it, so the number is final.
        """
        fence = pb.FenceWorkerRequest(job=effect.job.name, worker=effect.worker, incarnation=effect.incarnation)
        fenced = [calls.call(server, "FenceWorker", fence) for server in effect.servers]
        committed = max((reply.committed_steps for reply in fenced), default=0)
        # The number must be durable: a later coordinator could ask only servers that have not yet released the worker.
        self._host.report(events.WorkerFenced(effect.number, committed))
        return committed

    def _drop_shards(self, effect: DropShards, calls: ServerCalls) -> None:
        failures = []
        for server in effect.servers:
            try:
                calls.call(server, "DropShards", pb.DropShardsRequest(job=effect.job.name))
            except errors.ShoalError as error:
                failures.append(error.message)
        if failures:
            raise errors.Unreachable("; ".join(failures))

    def _calls(self, effect: Effect) -> ServerCalls:
        def wanted(server: ServerRef) -> bool:
            return not self._stopped.is_set() and self._host.wanted(effect.number, server)

        return ServerCalls(wanted, self._stopped.wait, self._on_retry)


def _creation(effect: CreateShards, server: ServerRef) -> pb.CreateShardsRequest:
    placement, spec = effect.placement, effect.spec
    return pb.CreateShardsRequest(
        job=placement.job,
        generation=placement.generation,
        variables=[variable.to_proto(name) for name, variable in placement.variables.items()],
        shards=[shard.layout.to_proto() for shard in placement.shards if shard.server == server.member],
        optimizer=spec.optimizer.to_proto(),
        consistency=spec.consistency.to_proto(),
        seed=spec.seed,
    )


def _checkpoint_of(effect: Effect) -> str:
    match effect:
        case TakeCut():
            return f"{effect.job.name}/{effect.checkpoint}"
        case CommitCheckpoint():
            return f"{effect.job.name}/{effect.cut.number}"
    return ""


def _doing(effect: CreateShards | AdmitWorker | RemoveWorker) -> str:
    match effect:
        case CreateShards():
            return "its shards could not be created"
        case AdmitWorker():
            return f"worker {effect.worker} could not be admitted"
        case RemoveWorker():
            return f"worker {effect.worker} could not be removed"
