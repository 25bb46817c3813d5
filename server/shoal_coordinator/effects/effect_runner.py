"""Performs what the cluster machine decides: calls to parameter servers, in order for each job, with retries.

The shell's other half: `shoal_coordinator.coordinator` feeds events to the machine, and here its effects are carried
out, whose outcomes are events again. An effect is over when its outcome has been taken in, so what was performed by a
coordinator that died before that is performed again by the next one: the first of each job name at most.
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

# Jobs whose effects are performed at the same time; and whose checkpoints are waited for, which takes as long as the
# storage does. That of one job may hang: whatever waits for it is slow, so that no job's training does.
_THREADS, _SLOW_THREADS = 8, 8
_SLOW = (ScanCheckpoints, CommitCheckpoint)
# Effects of one job name that may wait.
_MAX_QUEUED = 100_000
# Checkpoints that are traced at a time.
_OPEN_CHECKPOINTS = 64
# Allocating and filling shards of many GB takes a while.
_CREATE_TIMEOUT_S = 120.0

# After which errors of an effect its job goes back. A server that answers one of `SHARDS_LOST` is there, without the
# job's shards: so after any effect. One that nobody can reach, or that is not called any more since its lease ran out
# (`Cancelled`), is as bad where the job cannot go on without the effect. A checkpoint it can do without: that one
# fails, the next may not, and whether the server is dead is for its lease to say.
_AWAY = (*errors.SHARDS_LOST, errors.Unreachable, errors.Cancelled)

Report = events.EffectOutcome | events.WorkerFenced


class EffectHost(Protocol):
    """What performing needs of the coordinator; called from the threads here, with no lock held."""

    def report(self, outcome: Report) -> None:
        """Takes an outcome in, and returns when it will not be forgotten."""
        ...

    def held(self, event: CutHeld) -> HoldResult:
        """The coordinator's own part of a cut."""
        ...

    def wanted(self, effect: int, server: ServerRef) -> bool:
        """Whether a server lives, and what it is to do was not given up."""
        ...


class EffectRunner:
    """Threads that perform effects.

    Args:
        machine: decides.
        count: told of each effect that was performed: its kind, and whether it was.
        folder: of checkpoints; None: the cluster has none.
        on_retry: told of each call to a server that is repeated.
    """

    def __init__(
        self,
        machine: EffectHost,
        count: Callable[[str, bool], None] = lambda _kind, _done: None,
        folder: CheckpointStorage | None = None,
        on_retry: Callable[[], None] = lambda: None,
    ) -> None:
        self._machine, self._count, self._on_retry = machine, count, on_retry
        self._catalogue = Catalogue(folder) if folder else None
        self._lock = threading.Lock()  # guards _queues; no other lock is taken under it
        # By job name, so that a name that is used again waits for what is left of its earlier job; and whether it is
        # slow. A queue is here exactly as long as a thread is at work on it.
        self._queues: dict[tuple[str, bool], deque[Effect]] = {}
        self._checkpoint_traces = _tracing.Traces("checkpoint", _OPEN_CHECKPOINTS)
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="effects")
        self._slow_pool = ThreadPoolExecutor(_SLOW_THREADS, thread_name_prefix="checkpoints")

    def submit(self, effects: Sequence[Effect]) -> None:
        """Puts effects in line and returns at once."""
        with self._lock:
            for effect in effects:
                if self._stopped.is_set():
                    return
                slow = isinstance(effect, _SLOW)
                line = effect.job.name, slow
                if line not in self._queues:
                    self._queues[line] = deque()
                    (self._slow_pool if slow else self._pool).submit(self._drain, line)
                if len(self._queues[line]) < _MAX_QUEUED:
                    self._queues[line].append(effect)
                else:  # only the servers' silence for hours gets here, which the job did not survive
                    _log.error("too many effects are waiting; this one has to for a restart", effect=repr(effect))

    def stop(self) -> None:
        """Gives up what is not done and waits for the threads."""
        with self._lock:
            self._stopped.set()
        for pool in (self._pool, self._slow_pool):
            pool.shutdown(wait=True, cancel_futures=True)
        self._checkpoint_traces.close()

    def _drain(self, line: tuple[str, bool]) -> None:
        while True:
            with self._lock:
                queue = self._queues[line]
                if self._stopped.is_set() or not queue:
                    del self._queues[line]
                    return
                effect = queue.popleft()
            try:
                self._perform(effect)
            except errors.ShoalError as error:  # nothing is taken in any more: what follows is the next coordinator's
                _log.warning("outcome not taken in", effect=type(effect).__name__, job=line[0], reason=error.message)
                with self._lock:
                    del self._queues[line]
                return
            except Exception:  # a defect, after which the job's other effects still have their turn
                _log.exception("outcome lost", effect=repr(effect))

    def _perform(self, effect: Effect) -> None:
        kind, done = type(effect).__name__, True
        outcome: events.EffectOutcome
        try:
            with self._traced(effect, kind):
                outcome = self._outcome(effect)
            _log.info("performed", effect=kind, job=effect.job.name)
        except Exception as error:
            done = False
            if self._stopped.is_set():
                return
            text = error.message if isinstance(error, errors.ShoalError) else f"{type(error).__name__}: {error}"
            _log.warning("could not perform", effect=kind, job=effect.job.name, reason=text)
            match effect:
                case DropShards():
                    outcome = events.EffectDone(effect=effect.number)
                case ScanCheckpoints() | TakeCut() | CommitCheckpoint():
                    lost = isinstance(error, errors.SHARDS_LOST)
                    outcome = events.CheckpointFailed(effect.job, text, lost, effect=effect.number)
                case CreateShards() if isinstance(error, errors.StorageFailed):
                    outcome = events.RestoreDeferred(effect.job, text, effect=effect.number)
                case _:
                    lost = isinstance(error, _AWAY)
                    outcome = events.EffectFailed(effect.job, f"{_doing(effect)}: {text}", lost, effect=effect.number)
        if not done or isinstance(effect, CommitCheckpoint):
            self._checkpoint_traces.end(_checkpoint_of(effect))
        self._count(kind, done)
        self._machine.report(outcome)

    def _traced(self, effect: Effect, kind: str) -> _tracing.Span:
        """A span of this effect: a checkpoint's are of one trace, each other begins its own."""
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
                return checkpoint_commit.count(effect, self._checkpoints)
            case TakeCut():
                held = CutHeld(effect.job)
                return checkpoint_cut.take_cut(effect, calls, lambda: self._machine.held(held))
            case CommitCheckpoint():
                return checkpoint_commit.write(effect, calls, self._checkpoints)
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
        """Fenced everywhere before it is released anywhere: what is committed then is known, and grows no more."""
        fence = pb.FenceWorkerRequest(job=effect.job.name, worker=effect.worker, incarnation=effect.incarnation)
        fenced = [calls.call(server, "FenceWorker", fence) for server in effect.servers]
        committed = max((reply.committed_steps for reply in fenced), default=0)
        # Kept, for a coordinator that comes after this one could ask only those that have not released it yet.
        self._machine.report(events.WorkerFenced(effect.number, committed))
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
            return not self._stopped.is_set() and self._machine.wanted(effect.number, server)

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
            return f"worker {effect.worker} could not be taken out"
