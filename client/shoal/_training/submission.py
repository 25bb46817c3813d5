"""Submission of a job, with the checkpoint that `restore="auto"` stands for."""

import secrets
from dataclasses import replace

from shoal import errors
from shoal._rpc import CoordinatorClient
from shoal.checkpoint_policy import AUTO
from shoal.job import Job
from shoal.v1 import job_pb2


def submit(coordinator: CoordinatorClient, job: Job) -> job_pb2.SubmitReply:
    """Submits a job.

    With `restore="auto"`, the job starts from the newest checkpoint of its name, or from initial values if there is
    none.

    Args:
        coordinator: client of the coordinator.
        job: the specification.

    Returns:
        The reply of the coordinator.

    Raises:
        InvalidJob: the specification is invalid.
        JobExists: a job of that name is running.
        StorageFailed: the job has `restore="auto"`, and the cluster has no checkpoint storage.
        UnknownCheckpoint: the checkpoint in `Job.restore` does not exist.
    """
    if job.restore != AUTO:
        return _submit(coordinator, job)
    try:
        return _submit(coordinator, replace(job, restore=job.name))
    except errors.UnknownCheckpoint:
        return _submit(coordinator, replace(job, restore="", partial_restore=False))


def _submit(coordinator: CoordinatorClient, job: Job) -> job_pb2.SubmitReply:
    request = job_pb2.SubmitRequest(spec=job.to_proto(), token=secrets.token_hex(8))
    return coordinator.call(coordinator.jobs.Submit, request)


__all__ = ["submit"]
