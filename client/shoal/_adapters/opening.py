"""Opening of a session for an adapter, with a client of its own unless the user has one."""

from contextlib import ExitStack
from typing import Any

from shoal import errors, optim
from shoal.client import Client
from shoal.session import Session


def check_optimizer(optimizer: Any, equal: str) -> None:
    """Checks that an optimizer is one of Shoal.

    Args:
        optimizer: what the user gave.
        equal: an optimizer of the framework, and which one of Shoal it is, for the message.

    Raises:
        InvalidOptimizer: it is something else.
    """
    if not isinstance(optimizer, optim.Optimizer):
        raise errors.InvalidOptimizer(
            f"the optimizer is {type(optimizer).__module__}.{type(optimizer).__name__}; the servers update the values, "
            f"so give one of shoal.optim: {equal}"
        )


def check_client(address: str | None, client: Client | None) -> None:
    """Checks that a user has given an address or a client, or neither.

    Raises:
        BadRequest: both are given.
    """
    if client is not None and address is not None:
        raise errors.BadRequest("address and client are both given; give only one of them")


def open_session(
    variables: Any, *, job: str, address: str | None, client: Client | None, **options: Any
) -> tuple[Session, ExitStack]:
    """Opens a session.

    Args:
        variables: see `Client.session`.
        job: name of the job.
        address: host:port of the coordinator; None means the default of `Client`.
        client: the client to use, which stays open. None opens one.
        options: see `Client.session`.

    Returns:
        The session, and what is to be closed after it.

    Raises:
        BadRequest: an address and a client are given.
        ShoalError: see `Client.session`.
    """
    check_client(address, client)
    with ExitStack() as owned:
        opened = client or owned.enter_context(Client(address))
        return opened.session(job, variables=variables, **options), owned.pop_all()


__all__ = ["check_client", "check_optimizer", "open_session"]
