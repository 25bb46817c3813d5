"""Errors of a session that cannot go on: what has happened, and what to do."""

from shoal import errors

# Errors that may end a session.
ENDING = (errors.Fenced, errors.UnknownJob, errors.JobFailed, errors.Cancelled, errors.Unreachable)


def job_gone(job: str, worker: str) -> errors.UnknownJob:
    """Returns the error of a session whose job does not exist any more."""
    return errors.UnknownJob(
        f"job {job} and its variables are gone: it was dropped, or the coordinator was restarted with another "
        "store. Close this session; to continue, open a new one with the values that you have",
        job=job,
        worker=worker,
    )


def closed(job: str, worker: str, *, of_client: bool = False) -> errors.Cancelled:
    """Returns the error of a session that is used after it was closed.

    Args:
        job: name of the job.
        worker: member id of the session.
        of_client: whether the session is open, and its client is closed.
    """
    what, how = "session", "open another one with client.session()"
    if of_client:
        what = "the client of session"
        how = (
            "a session cannot be used without its client, and counts as lost after the heartbeat timeout. Close the "
            "client after its sessions; to continue, open a client and a session"
        )
    return errors.Cancelled(f"{what} {worker} of job {job} is closed; {how}", job=job, worker=worker)


def declared_lost(job: str, worker: str) -> errors.Fenced:
    """Returns the error of a session that was declared lost."""
    return errors.Fenced(
        f"{worker} of job {job} was declared lost: it sent no heartbeat within the heartbeat timeout. "
        "Its earlier pushes count, and other workers continue. Close this session and open a new one",
        job=job,
        worker=worker,
    )


def forked(job: str, worker: str, process: int) -> errors.BadRequest:
    """Returns the error of a session that a fork of its process uses.

    Args:
        job: name of the job.
        worker: member id of the session.
        process: id of the process that opened the session.
    """
    return errors.BadRequest(
        f"session {worker} of job {job} was opened by process {process}, and this is a fork of it; open a session in "
        "each process",
        job=job,
        worker=worker,
    )


__all__ = ["ENDING", "closed", "declared_lost", "forked", "job_gone"]
