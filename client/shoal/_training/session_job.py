"""Job of a session: the first session starts it, and the others join it."""

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from shoal import errors
from shoal._rpc import CoordinatorClient
from shoal._system import check_type
from shoal._system.logs import Log
from shoal._system.waits import wait_notice
from shoal._training.submission import submit
from shoal._transport import chosen_setting
from shoal.checkpoint_policy import AUTO
from shoal.job import Job
from shoal.status import JobStatus
from shoal.v1 import job_pb2

_log = Log(__name__)

# The detail of the refusal because the job has finished, and its last checkpoint is being written.
_ENDING = "ending"

# Seconds between two attempts to submit a job while an earlier one of its name ends.
_SUBMIT_AGAIN_S = 0.1


def start_or_find(
    coordinator: CoordinatorClient,
    name: str,
    options: Mapping[str, Any],
    *,
    starts: bool,
    sleep: Callable[[float], object] = time.sleep,
) -> bool:
    """Starts a job for sessions, or checks that the running one has the same options.

    If the last checkpoint of an earlier job of this name is being written, it waits until that job has ended.

    Args:
        coordinator: client of the coordinator.
        name: name of the job.
        options: options of `Job`.
        starts: whether to start a job if none of this name is running; the session then has variables.
        sleep: waits for a number of seconds.

    Returns:
        Whether the job was started.

    Raises:
        BadRequest: `name` has the wrong type, or SHOAL_TRANSPORT is unknown.
        UnknownJob: no job of this name is running, and there are no variables to start one.
        InvalidJob: the running job has other options, or the options are inconsistent.
    """
    chosen_setting()  # before a job is started, not at the first call
    check_type("job", name, str, "the name of a job, such as 'digits-1'")
    if starts:
        # Overlap is off by default: with it, pulled values lack the loop's own last push.
        job = Job(name=name, **{"overlap": False, **options})
        if _submitted(coordinator, job, sleep):
            return True
    try:
        status = JobStatus.from_proto(coordinator.call(coordinator.jobs.Get, job_pb2.GetRequest(job=name)).status)
    except errors.UnknownJob as error:
        raise errors.UnknownJob(
            f"there is no running job {name!r:.80} that this session can join: pass variables to start it "
            f"({error.message})",
            job=name,
        ) from None
    if status.state.finished:
        raise errors.UnknownJob(
            f"job {name} is {status.state.value}: it cannot be joined; pass variables to start it again", job=name
        )
    for option, wanted in options.items():
        running = getattr(status.job, option)
        chosen_for_us = (option == "shards" and wanted == 0) or wanted == AUTO
        # Without a checkpoint, a job with restore="auto" begins with initial values, and restores nothing in part.
        chosen_for_us |= option == "partial_restore" and options.get("restore") == AUTO and not status.job.restore
        if wanted != running and not chosen_for_us:
            raise errors.InvalidJob(
                f"job {name} runs with {option}={running}, not {wanted}; leave {option} out to join it, "
                "or choose another name",
                job=name,
                option=option,
            )
    return False


def _submitted(coordinator: CoordinatorClient, job: Job, sleep: Callable[[float], object]) -> bool:
    """Submits a job; returns False if one of its name is running."""
    with wait_notice(f"job {job.name}", lambda: "for the end of its last run: the last checkpoint is being written"):
        while True:
            try:
                submit(coordinator, job)
            except errors.JobExists as error:
                if _ENDING not in error.details:
                    return False
                sleep(_SUBMIT_AGAIN_S)
            else:
                return True


def member_id(worker: object) -> str:
    """Returns the member id of a session: the given one, or a random one for "".

    Raises:
        BadRequest: it is not a string.
    """
    if not isinstance(worker, str):
        raise errors.BadRequest(f"worker is {worker!r}; give a member id, or the number of sessions as `workers`")
    return worker or f"session-{secrets.token_hex(4)}"


def cancel(coordinator: CoordinatorClient, job: str, worker: str, error: BaseException | None) -> None:
    """Cancels a job that this session started but could not enter, unless other sessions have a part in it.

    Args:
        coordinator: client of the coordinator.
        job: name of the job.
        worker: member id of the session.
        error: why the session could not enter; None if it could, so that there is nothing to cancel.
    """
    if error is None:
        return
    why = error.message if isinstance(error, errors.ShoalError) else f"{type(error).__name__}: {error}".rstrip(": ")
    reason = f"session {worker}, which started it, could not enter: {why}".encode(errors="replace").decode()
    request = job_pb2.CancelRequest(job=job, reason=reason, session=worker)
    try:
        coordinator.call(coordinator.jobs.Cancel, request, retry_for_s=0)
    except errors.ShoalError as failure:
        _log.warning("could not cancel", job=job, reason=failure.message)


__all__ = ["cancel", "member_id", "start_or_find"]
