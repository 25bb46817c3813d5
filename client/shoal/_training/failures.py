"""Failures of sessions: the text of an exception that ends a session, and the error for a job that has ended."""

import traceback

from shoal import errors
from shoal.v1 import job_pb2


def failure_text(error: BaseException | str) -> str:
    """Returns the text with which an exception ends a job: first the exception in one line, then its traceback.

    A text is returned as it is.
    """
    if isinstance(error, str):
        return error
    message = " ".join(str(error).split())
    name = type(error).__name__
    trace = "".join(traceback.format_exception(error)).rstrip()
    return f"the session raised {name}{': ' if message else ''}{message}\n{trace}"


def end_of(job: str, status: job_pb2.JobStatus) -> errors.JobFailed | errors.Cancelled | None:
    """Returns the error of a session whose job has failed or was cancelled; None in any other state.

    Args:
        job: name of the job.
        status: its status; the state, the reason and the newest checkpoint count.
    """
    if status.state == job_pb2.FAILED:
        return errors.JobFailed(f"job {job} failed: {status.reason}", job=job)
    if status.state != job_pb2.CANCELLED:
        return None
    why = f": {status.reason}" if status.reason else ""
    saved = f"{job}/{status.checkpoint.number}"
    goes_on = f"; its newest checkpoint is {saved}: a run with restore={saved!r} or restore='auto' starts from it"
    return errors.Cancelled(f"job {job} was cancelled{why}{goes_on if status.HasField('checkpoint') else ''}", job=job)


__all__ = ["end_of", "failure_text"]
