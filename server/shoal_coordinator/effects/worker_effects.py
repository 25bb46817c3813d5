"""Entry of workers into a job, and their removal from it, on all servers of the job.

One call to each server serves many workers. The reply has a result for each worker, so a worker that cannot be admitted
does not keep the others out.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from shoal import _rpc, errors
from shoal.v1 import parameter_server_pb2 as pb
from shoal_coordinator.effects.server_calls import ServerCalls
from shoal_coordinator.messages import AdmitWorker, RemoveWorker, ServerRef, events

# Workers in one call. The contract has this limit; a request has some 40 KB.
MAX_WORKERS = 1_024

Admitted = events.WorkerAdmitted | errors.ShoalError


def admit(batch: Sequence[AdmitWorker], calls: ServerCalls) -> list[Admitted]:
    """Admits workers of one job on its servers.

    Args:
        batch: The effects, which name the same job and servers.
        calls: The calls to servers.

    Returns:
        For each effect its outcome, or why a server did not admit the worker.

    Raises:
        ShoalError: A server could not be called, or lacks the job's shards. Any worker may have been admitted.
    """
    first = batch[0]
    workers = [pb.WorkerAdmission(worker=it.worker, incarnation=it.incarnation, rank=it.rank) for it in batch]
    replies = _call_all(
        calls, first.servers, "AdmitWorkers", pb.AdmitWorkersRequest(job=first.job.name, workers=workers)
    )
    columns = [_of_each(reply.results, batch, server) for reply, server in zip(replies, first.servers, strict=True)]
    return [_admitted(effect, [column[place] for column in columns]) for place, effect in enumerate(batch)]


def remove(
    batch: Sequence[RemoveWorker],
    calls: ServerCalls,
    fenced: Callable[[Sequence[RemoveWorker]], None],
) -> None:
    """Fences workers of one job on all its servers, then releases them.

    No server releases a worker before all have fenced it, so the number of its committed steps is final.

    Args:
        batch: The effects, which name the same job and servers. A worker whose committed steps are known was fenced
            before, and is only released.
        calls: The calls to servers.
        fenced: Makes the committed steps of the workers durable, between the two calls: a server that has released a
            worker would say 0.

    Raises:
        ShoalError: A server could not be called, or lacks the job's shards. Any worker may have been released.
    """
    first, job = batch[0], batch[0].job.name
    if any(effect.committed_steps is None for effect in batch):
        batch = _fence(batch, calls)
        fenced(batch)
    workers = [
        pb.WorkerRelease(worker=it.worker, incarnation=it.incarnation, committed_steps=it.committed_steps or 0)
        for it in batch
    ]
    _call_all(calls, first.servers, "ReleaseWorkers", pb.ReleaseWorkersRequest(job=job, workers=workers))


def _fence(batch: Sequence[RemoveWorker], calls: ServerCalls) -> list[RemoveWorker]:
    """Fences the workers whose committed steps are not known. Returns all effects with the committed steps."""
    first = batch[0]
    unknown = [effect for effect in batch if effect.committed_steps is None]
    workers = [pb.WorkerFence(worker=it.worker, incarnation=it.incarnation) for it in unknown]
    replies = _call_all(
        calls, first.servers, "FenceWorkers", pb.FenceWorkersRequest(job=first.job.name, workers=workers)
    )
    columns = [
        _of_each(reply.committed_steps, unknown, server) for reply, server in zip(replies, first.servers, strict=True)
    ]
    committed = {
        effect.number: max((column[place] for column in columns), default=0) for place, effect in enumerate(unknown)
    }
    return [replace(it, committed_steps=committed[it.number]) if it.number in committed else it for it in batch]


def _call_all(calls: ServerCalls, servers: Sequence[ServerRef], method: str, request: Any) -> list[Any]:
    return calls.call_all(servers, method, lambda _: request)


def _of_each(values: Any, batch: Sequence[Any], server: ServerRef) -> list[Any]:
    if len(values) != len(batch):
        raise errors.InternalError(f"server {server.member} answers for {len(values)} of {len(batch)} workers")
    return [*values]


def _admitted(effect: AdmitWorker, results: Sequence[pb.AdmissionResult]) -> Admitted:
    for result in results:
        if result.HasField("error"):
            return _rpc.error_of(result.error)
    step = max((result.step for result in results), default=0)
    return events.WorkerAdmitted(effect.job, effect.assignment, step, effect=effect.number)


__all__ = ["MAX_WORKERS", "Admitted", "admit", "remove"]
