"""Tickets of waiting pulls and pushes, and functions that answer or refuse them. These functions never raise.

Such a ticket is the pair of callbacks of one call. It is not a ticket of `shoal._security`, which proves an identity.
"""

from collections.abc import Iterable
from typing import Protocol

import structlog

from shoal import errors
from shoal_server.shards.machine.events import (
    AnswerPulls,
    GrantPermit,
    LockGroupEffect,
    RefusePermit,
    RefusePull,
    ShareNorm,
)

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


def deliver(effect: LockGroupEffect, job: str) -> None:
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


def tells(effects: Iterable[LockGroupEffect]) -> bool:
    """Returns whether effects tell somebody something: they answer a ticket, or send a norm to other servers."""
    told = AnswerPulls | GrantPermit | RefusePull | RefusePermit | ShareNorm
    return any(isinstance(effect, told) for effect in effects)


def answered_by(effects: Iterable[LockGroupEffect]) -> list[PullTicket | PushTicket]:
    """Returns the tickets that `deliver` would answer for these effects."""
    found: list[PullTicket | PushTicket] = []
    for effect in effects:
        match effect:
            case AnswerPulls():
                found += effect.tickets
            case GrantPermit() | RefusePull() | RefusePermit():
                found.append(effect.ticket)
    return found


def failed_update(cause: BaseException, job: str) -> str:
    """Logs that an update failed, and returns the text of the error for all callers.

    Args:
        cause: the error of the update.
        job: name of the job.
    """
    _log.error("an update failed; the job's values on this server are unusable", job=job, exc_info=cause)
    return (
        f"an update of job {job} failed on this server, so its values here are unusable: {type(cause).__name__}: "
        f"{cause}. Submit the job again; the server's log has the traceback"
    )


def refusal(job: str, failure: str, *, moved: bool = False) -> errors.ShoalError:
    """Returns why a closed group refuses calls.

    Args:
        job: name of the job.
        failure: text from `failed_update`; "" if no update failed.
        moved: whether other servers or lock groups have the shards now.
    """
    if moved:
        return errors.Moved(
            f"these shards of {job} have another server or lock group now; fetch the placement again", job=job
        )
    if failure:
        return errors.InternalError(failure, job=job)
    return errors.UnknownJob(f"{job} is gone from this server: its job has ended or was dropped", job=job)


def refuse_all(waiting: Iterable[PullTicket | PushTicket], error: errors.ShoalError, job: str) -> None:
    """Refuses pulls and pushes.

    Args:
        waiting: the pulls and pushes.
        error: why.
        job: name of the job, for the log.
    """
    for ticket in waiting:
        refuse(ticket, error, job)


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


__all__ = [
    "PullTicket",
    "PushTicket",
    "answered_by",
    "deliver",
    "failed_update",
    "refusal",
    "refuse",
    "refuse_all",
    "tells",
]
