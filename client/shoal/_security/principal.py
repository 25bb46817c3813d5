"""Principals: the identities of callers, with their access roles."""

import math
import re
from dataclasses import dataclass, field
from enum import StrEnum

from shoal._security.member_secrets import MemberIdentity

# Prefix of the id by which a certificate is revoked. The serial number follows, in hexadecimal.
ID_PREFIX = "cert:"
# The holder of the tokens of the access file. No other token and no certificate may have this name: jobs belong to it,
# and its revocation revokes the access file.
LOCAL_HOLDER = "local"
_HOLDER = re.compile(r"[a-z0-9-]{1,63}")
# What `can_hold` accepts, for messages.
HOLDER_RULE = f"1 to 63 characters of a-z, 0-9 and -, and is not {LOCAL_HOLDER!r}"


class AccessRole(StrEnum):
    """What a caller may do. `permissions` lists the calls that each role may make.

    Attributes:
        ADMIN: everything that users and operators do.
        SUBMITTER: submits jobs, and trains them in sessions.
        READER: looks at the cluster, at jobs and at values.
        WORKER: a worker daemon.
        SERVER: a server.
        COORDINATOR: the coordinator, in its calls to servers.
        TRAINER: a participant of one job. A ticket gives this role.
        OBSERVER: a reader of one job's values. A ticket gives this role.
        PEER: a server of one job, in its calls to the other servers of the job. A ticket gives this role.
    """

    ADMIN = "admin"
    SUBMITTER = "submitter"
    READER = "reader"
    WORKER = "worker"
    SERVER = "server"
    COORDINATOR = "coordinator"
    TRAINER = "trainer"
    OBSERVER = "observer"
    PEER = "peer"


# The roles that a token of `shoal token create` or a certificate can have. The coordinator alone gives the other roles.
GIVEN_ROLES = (AccessRole.ADMIN, AccessRole.SUBMITTER, AccessRole.READER, AccessRole.WORKER, AccessRole.SERVER)


def can_hold(name: str) -> bool:
    """Returns whether a token that an admin makes, or a certificate, may name this holder."""
    return bool(_HOLDER.fullmatch(name)) and name != LOCAL_HOLDER


@dataclass(frozen=True, slots=True)
class Principal:
    """The identity of a caller, as its token or its certificate proves it.

    Attributes:
        name: name of the user, of the process, or of the member of a ticket.
        role: what the caller may do.
        token: id of the token or the certificate. A ticket has the id of the token with which it was requested.
        job: the job that a ticket is for. Empty for other tokens.
        incarnation: the member's incarnation that a ticket is for. 0 for other tokens.
        expires_at: Unix time in seconds when the caller's token or certificate expires. A ticket or a login has the
            time of the token or the certificate for which it was made. The comparison of principals ignores this time.
        member: the registration whose secret the caller has shown with its call; None if it has shown none.
    """

    name: str
    role: AccessRole
    token: str = ""
    job: str = ""
    incarnation: int = 0
    expires_at: float = field(default=math.inf, compare=False)
    member: MemberIdentity | None = field(default=None, compare=False)

    @property
    def proof(self) -> str:
        """What proves the identity, for messages: the token or the certificate."""
        return "certificate" if self.token.startswith(ID_PREFIX) else "token"

    def __str__(self) -> str:
        return f"{self.role.value} {self.name!r}" + (f" of job {self.job}" if self.job else "")


__all__ = ["GIVEN_ROLES", "HOLDER_RULE", "ID_PREFIX", "LOCAL_HOLDER", "AccessRole", "Principal", "can_hold"]
