"""The sessions that this process has open, for errors and warnings that name them."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from shoal import errors
from shoal._rpc import CoordinatorClient

_LOG = logging.getLogger("shoal")

# Refusals that another session of the same process can be the reason of.
_REFUSALS = (errors.Overloaded, errors.InvalidJob, errors.DuplicateMember)


@dataclass(frozen=True, slots=True)
class OpenSession:
    """A session that is open.

    Attributes:
        coordinator: its client of the coordinator.
        job: name of its job.
        worker: its member id.
        process: id of the process that opened it; a fork of this process does not have the session.
    """

    coordinator: CoordinatorClient
    job: str
    worker: str
    process: int = field(default_factory=os.getpid)


# Added to and removed from in single operations, and copied before it is read. It needs no lock, which a fork of the
# process could leave locked.
_open: set[OpenSession] = set()


def add(session: OpenSession) -> None:
    """Records that a session is open."""
    _open.add(session)


def remove(session: OpenSession) -> None:
    """Records that a session is not open any more."""
    _open.discard(session)


@contextmanager
def naming_own(coordinator: CoordinatorClient, job: str) -> Iterator[None]:
    """Adds to refusals of the block that this process itself has a session of the job open, and what to do.

    Args:
        coordinator: client of the coordinator.
        job: name of the job.
    """
    try:
        yield
    except _REFUSALS as error:
        own = own_in(coordinator, job)
        if not own:
            raise
        raise type(error)(
            f"this process has {_named(own)} of job {job} open: call its close() first, or cancel the job with "
            f"client.cancel({job!r}), or choose another job name. {error.message}",
            **error.details,
        ) from None


def own_in(coordinator: CoordinatorClient, job: str) -> list[str]:
    """Returns the member ids of the sessions of a job that this process has open.

    Args:
        coordinator: client of the coordinator.
        job: name of the job.
    """
    return [it.worker for it in _of_this_process() if (it.coordinator.address, it.job) == (coordinator.address, job)]


def warn_of_open(coordinator: CoordinatorClient) -> None:
    """Warns of the sessions that are open while their client is being closed."""
    for it in _of_this_process():
        if it.coordinator is coordinator:
            _LOG.warning(
                f"the client of session {it.worker} (job {it.job}) is closed, and the session is still open: it counts "
                "as lost after the heartbeat timeout. Call the session's close() before the client's"
            )


def _of_this_process() -> list[OpenSession]:
    return sorted((it for it in _open.copy() if it.process == os.getpid()), key=lambda it: it.worker)


def _named(workers: list[str]) -> str:
    return f"{'session' if len(workers) == 1 else 'sessions'} {', '.join(workers)}"


__all__ = ["OpenSession", "add", "naming_own", "own_in", "remove", "warn_of_open"]
