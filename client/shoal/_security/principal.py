"""Principals: who makes a call, and what kind of caller it is."""

from dataclasses import dataclass
from enum import StrEnum


class AccessRole(StrEnum):
    """What a caller may do. `permissions` names the calls of each.

    Attributes:
        ADMIN: everything that users and operators do.
        SUBMITTER: submits jobs, and trains them in sessions.
        READER: looks at the cluster, at jobs and at values.
        WORKER: a worker daemon.
        SERVER: a server.
        COORDINATOR: the coordinator, in its calls to servers.
        TRAINER: one participant of one job, by a ticket.
        OBSERVER: a reader of one job's values, by a ticket.
    """

    ADMIN = "admin"
    SUBMITTER = "submitter"
    READER = "reader"
    WORKER = "worker"
    SERVER = "server"
    COORDINATOR = "coordinator"
    TRAINER = "trainer"
    OBSERVER = "observer"


# The roles that people give to tokens. The coordinator makes the other tokens itself.
GIVEN_ROLES = (AccessRole.ADMIN, AccessRole.SUBMITTER, AccessRole.READER, AccessRole.WORKER, AccessRole.SERVER)


@dataclass(frozen=True, slots=True)
class Principal:
    """The identity of a caller, as its token proves it.

    Attributes:
        name: name of the user, of the process, or of the member of a ticket.
        role: what the caller may do.
        token: id of the token. A ticket has the id of the token that it was made for.
        job: the only job that a ticket is for. Empty for other tokens.
        incarnation: the only life of the member that a ticket is for. 0 for other tokens.
    """

    name: str
    role: AccessRole
    token: str = ""
    job: str = ""
    incarnation: int = 0

    def __str__(self) -> str:
        return f"{self.role.value} {self.name!r}" + (f" of job {self.job}" if self.job else "")


__all__ = ["GIVEN_ROLES", "AccessRole", "Principal"]
