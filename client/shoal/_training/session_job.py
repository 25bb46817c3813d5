"""The job that a session is of: started by the first session, found by the others."""

import secrets
from collections.abc import Mapping
from typing import Any

import structlog
from numpy.typing import ArrayLike

from shoal import errors
from shoal._rpc import CoordinatorClient
from shoal.job import Job
from shoal.status import JobStatus
from shoal.v1 import job_pb2
from shoal.variables import Variable

_log = structlog.get_logger(__name__)


def start_or_find(
    coordinator: CoordinatorClient,
    name: str,
    variables: Mapping[str, Variable | ArrayLike] | None,
    options: Mapping[str, Any],
) -> bool:
    """Starts a job for sessions, or checks that the live one is the one meant; True if it was started.

    Raises:
        UnknownJob: there are no variables to start it with, and none is live.
        InvalidJob: the live one runs with other options, or they contradict themselves.
    """
    if variables is not None:
        # A loop that was not written for it would miss its own last push in what it pulls.
        job = Job(name=name, **{"overlap": False, **options})
        try:
            request = job_pb2.SubmitRequest(spec=job.to_proto(), token=secrets.token_hex(8))
            coordinator.call(coordinator.jobs.Submit, request)
        except errors.JobExists:
            pass
        else:
            return True
    status = JobStatus.from_proto(coordinator.call(coordinator.jobs.Get, job_pb2.GetRequest(job=name)).status)
    if status.state.finished:
        raise errors.UnknownJob(
            f"job {name} is {status.state.value}: there is nothing to join; give variables to start it anew", job=name
        )
    for option, wanted in options.items():
        running = getattr(status.job, option)
        chosen_for_us = option == "shards" and wanted == 0
        if wanted != running and not chosen_for_us:
            raise errors.InvalidJob(
                f"job {name} runs with {option}={running}, not {wanted}; leave {option} out to join it, "
                "or choose another name",
                job=name,
                option=option,
            )
    return False


def cancel(coordinator: CoordinatorClient, job: str) -> None:
    """Gives up a job that this session started and could not enter."""
    try:
        coordinator.call(coordinator.jobs.Cancel, job_pb2.CancelRequest(job=job), retry_for_s=0)
    except errors.ShoalError as error:
        _log.warning("could not cancel", job=job, reason=error.message)


__all__ = ["cancel", "start_or_find"]
