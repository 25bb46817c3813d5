"""Calling server: what a server is in its calls to other servers."""

from dataclasses import dataclass

from shoal._security import Credentials


@dataclass(frozen=True, slots=True)
class CallingServer:
    """What this server is in its calls to other servers.

    Attributes:
        server: its member id.
        incarnation: its incarnation.
        credentials: what it presents.
    """

    server: str
    incarnation: int
    credentials: Credentials


__all__ = ["CallingServer"]
