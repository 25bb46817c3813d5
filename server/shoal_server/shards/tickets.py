"""Tickets of waiting pulls and pushes, and functions that answer or refuse them. These functions never raise."""

from typing import Protocol

import structlog

from shoal import errors
from shoal_server.shards.events import AnswerPulls, Effect, GrantPermit, RefusePermit, RefusePull

_log = structlog.get_logger(__name__)


class PullTicket(Protocol):
    """Callbacks of one pull. The group calls them without its lock."""

    def answer(self, step: int) -> None:
        """The values may be read now."""

    def refuse(self, error: errors.ShoalError) -> None:
        """The pull has failed."""


class PushTicket(Protocol):
    """Callbacks of one push that may wait for a permit. The group calls them without its lock."""

    def grant(self, *, wanted: bool) -> None:
        """The push may go on. If `wanted` is False, it goes on without its gradient."""

    def refuse(self, error: errors.ShoalError) -> None:
        """The push has failed."""


# If the callback of one ticket fails, the others must still wake, and the push that wakes them must not fail.


def deliver(effect: Effect, job: str) -> None:
    """Makes the calls that answer tickets.

    Args:
        effect: an effect of the group's state machine; one that answers no ticket is ignored.
        job: name of the job, for the log.
    """
    match effect:
        case AnswerPulls():
            for ticket in effect.tickets:
                _answer(ticket, effect.step, job)
        case GrantPermit():
            _grant(effect.ticket, job, wanted=effect.wanted)
        case RefusePull() | RefusePermit():
            refuse(effect.ticket, effect.error, job)


def _grant(ticket: PushTicket, job: str, *, wanted: bool) -> None:
    """Lets a push go on.

    Args:
        ticket: the push.
        job: name of the job, for the log.
        wanted: as for the ticket.
    """
    try:
        ticket.grant(wanted=wanted)
    except Exception as error:
        _log.exception("a push could not go on", job=job)
        refuse(ticket, errors.InternalError(f"the push failed: {type(error).__name__}: {error}"), job)


def _answer(ticket: PullTicket, step: int, job: str) -> None:
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


def refuse(ticket: PullTicket | PushTicket, error: errors.ShoalError, job: str) -> None:
    """Refuses a pull or a push.

    Args:
        ticket: the pull or push.
        error: why.
        job: name of the job, for the log.
    """
    try:
        ticket.refuse(error)
    except Exception:
        _log.exception("a call could not be refused", job=job, why=error.message)


__all__ = ["PullTicket", "PushTicket", "deliver", "refuse"]
