"""Credentials of the calls of tests, for a cluster that asks for tokens."""

from contextlib import closing

from shoal._rpc import CoordinatorClient
from shoal._security import AccessRole, Credentials
from shoal.v1 import token_pb2


def as_admin(address: str) -> Credentials:
    """Returns the credentials of this user's processes on this machine.

    Args:
        address: host:port of the coordinator.
    """
    return Credentials().for_coordinator(address, AccessRole.ADMIN)


def login_link(credentials: Credentials, address: str) -> str:
    """Returns a link that logs a browser in to the page of a coordinator, as the holder of these credentials."""
    with closing(CoordinatorClient(address, credentials=credentials)) as client:
        link: str = client.call(client.tokens.GetLoginLink, token_pb2.GetLoginLinkRequest()).link
        return link


__all__ = ["as_admin", "login_link"]
