"""Text of an exception that ends a session, for the job's reason and its log."""

import traceback


def failure_text(error: BaseException) -> str:
    """Returns the text with which an exception ends a job: first the exception in one line, then its traceback."""
    message = " ".join(str(error).split())
    name = type(error).__name__
    trace = "".join(traceback.format_exception(error)).rstrip()
    return f"the session raised {name}{': ' if message else ''}{message}\n{trace}"


__all__ = ["failure_text"]
