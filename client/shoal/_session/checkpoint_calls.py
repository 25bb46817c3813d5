"""Checkpoints on demand, for jobs and sessions."""

from shoal import _tracing, errors, events
from shoal._rpc import CoordinatorClient
from shoal._system import check_seconds
from shoal._system.waits import wait_notice
from shoal.events import CheckpointEnded
from shoal.status import SavedCheckpoint
from shoal.v1 import job_pb2


def take_checkpoint(coordinator: CoordinatorClient, job: str, timeout_s: float | None) -> SavedCheckpoint:
    """Takes a checkpoint of a job, and waits until it is complete.

    Args:
        coordinator: client of the coordinator.
        job: name of the job.
        timeout_s: how long to wait, in seconds. None means no limit. The checkpoint continues after a timeout.

    Returns:
        The complete checkpoint.

    Raises:
        StorageFailed: the cluster has no checkpoint storage, or writing to it failed.
        JobEnded: the job has ended.
        NotPlaced: the job's variables are not on servers.
        UnknownJob: there is no such job, or it was dropped.
        DeadlineExceeded: the checkpoint was not complete within `timeout_s`.
    """
    check_seconds("timeout_s", timeout_s, optional=True)
    with _tracing.root("checkpoint", job=job):
        reply = coordinator.call(coordinator.jobs.TakeCheckpoint, job_pb2.TakeCheckpointRequest(job=job))
    watched = events.watch(coordinator, job, after=reply.after, timeout_s=timeout_s)
    try:
        with wait_notice(f"the checkpoint of job {job}", lambda: "until all servers have written their shards"):
            end = next((it for it in watched if isinstance(it, CheckpointEnded) and it.attempt >= reply.attempt), None)
    except errors.DeadlineExceeded:
        raise errors.DeadlineExceeded(
            f"the checkpoint of job {job} was not complete within {timeout_s:g} s; it continues, and the "
            "job's events report how it ends",
            job=job,
        ) from None
    if end and end.saved:
        return end.saved
    if end:
        raise errors.StorageFailed(f"a checkpoint of job {job} failed: {end.failure}", job=job)
    raise errors.JobEnded(f"job {job} has ended before its checkpoint was complete", job=job)


__all__ = ["take_checkpoint"]
