"""Performs what the cluster machine decides: calls to parameter servers, in order for each job, with retries.

The shell's other half: `shoal_coordinator.coordinator` feeds events to the machine, and here its effects are carried
out, whose outcomes are events again. An effect is over when its outcome has been taken in, so what was performed by a
coordinator that died before that is performed again by the next one: the first of each job name at most.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog

from shoal import _rpc, errors
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1.parameter_server_pb2_grpc import ParameterServerStub
from shoal_coordinator import events
from shoal_coordinator.events import AdmitWorker, CreateShards, DropShards, Effect, RemoveWorker, ServerRef

_log = structlog.get_logger(__name__)

# Jobs whose effects are performed at the same time.
_THREADS = 8
# Effects of one job name that may wait.
_MAX_QUEUED = 100_000
# One attempt, and all attempts of one call, in seconds. Allocating and filling shards of many GB takes a while.
_CALL_TIMEOUT_S, _CREATE_TIMEOUT_S, _RETRY_FOR_S = 5.0, 120.0, 20.0

Report = events.Outcome | events.WorkerFenced


class Performer:
    """Threads that perform effects.

    Args:
        report: takes the outcomes, and returns when they will not be forgotten; called from the threads here, with no
            lock held.
        count: told of each effect that was performed: its kind, and whether it was.
    """

    def __init__(
        self, report: Callable[[Report], None], count: Callable[[str, bool], None] = lambda _kind, _done: None
    ) -> None:
        self._report, self._count = report, count
        self._lock = threading.Lock()  # guards _queues; no other lock is taken under it
        # By job name, so that a name that is used again waits for what is left of its earlier job. A queue is here
        # exactly as long as a thread is at work on it.
        self._queues: dict[str, deque[Effect]] = {}
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="effects")

    def submit(self, effects: Sequence[Effect]) -> None:
        """Puts effects in line and returns at once."""
        with self._lock:
            for effect in effects:
                if self._stopped.is_set():
                    return
                name = effect.job.name
                if name not in self._queues:
                    self._queues[name] = deque()
                    self._pool.submit(self._drain, name)
                if len(self._queues[name]) < _MAX_QUEUED:
                    self._queues[name].append(effect)
                else:  # only the servers' silence for hours gets here, which the job did not survive
                    _log.error("too many effects are waiting; this one has to for a restart", effect=repr(effect))

    def stop(self) -> None:
        """Gives up what is not done and waits for the threads."""
        with self._lock:
            self._stopped.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _drain(self, name: str) -> None:
        while True:
            with self._lock:
                queue = self._queues[name]
                if self._stopped.is_set() or not queue:
                    del self._queues[name]
                    return
                effect = queue.popleft()
            try:
                self._perform(effect)
            except errors.ShoalError as error:  # nothing is taken in any more: what follows is the next coordinator's
                _log.warning("outcome not taken in", effect=type(effect).__name__, job=name, reason=error.message)
                with self._lock:
                    del self._queues[name]
                return
            except Exception:  # a defect, after which the job's other effects still have their turn
                _log.exception("outcome lost", effect=repr(effect))

    def _perform(self, effect: Effect) -> None:
        kind, done = type(effect).__name__, True
        outcome: events.Outcome
        try:
            outcome = self._outcome(effect)
            _log.info("performed", effect=kind, job=effect.job.name)
        except Exception as error:
            done = False
            if self._stopped.is_set():
                return
            text = error.message if isinstance(error, errors.ShoalError) else f"{type(error).__name__}: {error}"
            _log.warning("could not perform", effect=kind, job=effect.job.name, reason=text)
            if isinstance(effect, DropShards):
                outcome = events.EffectDone(effect=effect.number)
            else:
                outcome = events.EffectFailed(effect.job, f"{_doing(effect)}: {text}", effect=effect.number)
        self._count(kind, done)
        self._report(outcome)

    def _outcome(self, effect: Effect) -> events.Outcome:
        match effect:
            case CreateShards():
                return self._create_shards(effect)
            case AdmitWorker():
                return self._admit_worker(effect)
            case RemoveWorker():
                self._remove_worker(effect)
            case DropShards():
                self._drop_shards(effect)
        return events.EffectDone(effect=effect.number)

    def _create_shards(self, effect: CreateShards) -> events.Outcome:
        for server in sorted({ServerRef(shard.server, shard.address) for shard in effect.placement.shards}):
            self._call(server, "CreateShards", _creation(effect, server), timeout_s=_CREATE_TIMEOUT_S)
        return events.ShardsCreated(effect.job, effect=effect.number)

    def _admit_worker(self, effect: AdmitWorker) -> events.Outcome:
        request = pb.AdmitWorkerRequest(
            job=effect.job.name, worker=effect.worker, incarnation=effect.incarnation, rank=effect.rank
        )
        steps = [self._call(server, "AdmitWorker", request).step for server in effect.servers]
        return events.WorkerAdmitted(effect.job, effect.assignment, max(steps, default=0), effect=effect.number)

    def _remove_worker(self, effect: RemoveWorker) -> None:
        job, worker, incarnation = effect.job.name, effect.worker, effect.incarnation
        committed = effect.committed_steps
        if committed is None:
            committed = self._fence_worker(effect)
        release = pb.ReleaseWorkerRequest(job=job, worker=worker, incarnation=incarnation, committed_steps=committed)
        for server in effect.servers:
            self._call(server, "ReleaseWorker", release)

    def _fence_worker(self, effect: RemoveWorker) -> int:
        """Fenced everywhere before it is released anywhere: what is committed then is known, and grows no more."""
        fence = pb.FenceWorkerRequest(job=effect.job.name, worker=effect.worker, incarnation=effect.incarnation)
        fenced = [self._call(server, "FenceWorker", fence) for server in effect.servers]
        committed = max((reply.committed_steps for reply in fenced), default=0)
        # Kept, for a coordinator that comes after this one could ask only those that have not released it yet.
        self._report(events.WorkerFenced(effect.number, committed))
        return committed

    def _drop_shards(self, effect: DropShards) -> None:
        failures = []
        for server in effect.servers:
            try:
                self._call(server, "DropShards", pb.DropShardsRequest(job=effect.job.name))
            except errors.ShoalError as error:
                failures.append(error.message)
        if failures:
            raise errors.Unreachable("; ".join(failures))

    def _call(self, server: ServerRef, method: str, request: Any, *, timeout_s: float = _CALL_TIMEOUT_S) -> Any:
        """One call to one server, repeated while it cannot be reached: all of these may be."""
        # A channel a call: these are few, and a server that was restarted is found at once.
        with _rpc.channel(server.address) as channel:
            stub = getattr(ParameterServerStub(channel), method)

            def once() -> Any:
                with _rpc.translated(server.address):
                    return stub(request, timeout=timeout_s)

            return _rpc.retrying(
                once,
                what=f"server {server.member}",
                address=server.address,
                for_s=_RETRY_FOR_S,
                sleep=self._stopped.wait,
                on_retry=self._give_up_if_stopped,
            )

    def _give_up_if_stopped(self, error: errors.ShoalError) -> None:
        if self._stopped.is_set():
            raise errors.Cancelled(f"the coordinator is stopping ({error.message})")


def _creation(effect: CreateShards, server: ServerRef) -> pb.CreateShardsRequest:
    placement, spec = effect.placement, effect.spec
    return pb.CreateShardsRequest(
        job=placement.job,
        epoch=placement.epoch,
        variables=[variable.to_proto(name) for name, variable in placement.variables.items()],
        shards=[shard.layout.to_proto() for shard in placement.shards if shard.server == server.member],
        optimizer=spec.optimizer.to_proto(),
        consistency=spec.consistency.to_proto(),
        seed=spec.seed,
    )


def _doing(effect: Effect) -> str:
    match effect:
        case CreateShards():
            return "its shards could not be created"
        case AdmitWorker():
            return f"worker {effect.worker} could not be admitted"
        case RemoveWorker():
            return f"worker {effect.worker} could not be taken out"
        case DropShards():
            return "its shards could not be dropped"
