"""Failures of sessions: the text of an exception that ends a session or a script, and the error of an ended job."""

import sys
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


def failure_of(error: BaseException | None) -> str:
    """Returns the text of the exception that ends a script, or a `with` block. "" means that it has succeeded.

    `sys.exit()` and `sys.exit(0)` are successes.
    """
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return ""
    return failure_text(error)


def failure_at_exit() -> str:
    """Returns what `failure_of` returns for the script, as far as a function of `atexit` can know.

    Python keeps only an uncaught exception until then. It clears a SystemExit before, so `sys.exit(1)` seems to be a
    success: only a `with` block sees it. In an interactive interpreter or a notebook, the last exception may be that of
    any earlier statement. It says nothing about the end, which counts as a success.
    """
    return "" if hasattr(sys, "ps1") else failure_of(getattr(sys, "last_value", None))


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


__all__ = ["end_of", "failure_at_exit", "failure_of", "failure_text"]
