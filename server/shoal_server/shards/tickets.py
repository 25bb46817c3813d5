"""Tickets of waiting pulls, and functions that answer or refuse a pull. These functions never raise."""

from typing import Protocol

import structlog

from shoal import errors

_log = structlog.get_logger(__name__)


class PullTicket(Protocol):
    """Callbacks of one pull. The group calls them without its lock."""

    def answer(self, step: int) -> None:
        """The values may be read now."""

    def refuse(self, error: errors.ShoalError) -> None:
        """The pull has failed."""


# If the callback of one pull fails, the other pulls must still wake, and the push that wakes them must not fail.


def answer(ticket: PullTicket, step: int, job: str) -> None:
    """Answers a pull.

    Args:
        ticket: the pull.
        step: the worker's next step.
        job: name of the job, for the log.
    """
    try:
        ticket.answer(step)
    except Exception as error:
        _log.exception("a pull could not be answered", job=job)
        refuse(ticket, errors.InternalError(f"the pull failed: {type(error).__name__}: {error}"), job)


def refuse(ticket: PullTicket, error: errors.ShoalError, job: str) -> None:
    """Refuses a pull.

    Args:
        ticket: the pull.
        error: why.
        job: name of the job, for the log.
    """
    try:
        ticket.refuse(error)
    except Exception:
        _log.exception("a pull could not be refused", job=job, why=error.message)


__all__ = ["PullTicket", "answer", "refuse"]
