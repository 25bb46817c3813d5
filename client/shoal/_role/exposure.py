"""The rule that a role is closed by default: who may connect to it without TLS (no I/O)."""

import ipaddress
from collections.abc import Iterable

from shoal import errors

_ADVICE = (
    "Give --tls-ca, --tls-cert and --tls-key (`shoal certs init` makes the files), or listen on 127.0.0.1. If all who "
    "reach the network may read and change everything, give --insecure"
)


def check_exposure(role: str, listens: Iterable[str], *, tls: bool, insecure: bool) -> None:
    """Checks that other hosts can reach a role only over TLS, unless its user has said otherwise.

    Args:
        role: coordinator, server or worker.
        listens: the addresses at which it listens, host:port each; empty ones are none.
        tls: whether it uses TLS.
        insecure: whether --insecure was given.

    Raises:
        BadRequest: it would listen beyond loopback without TLS, or --insecure contradicts the TLS files.
    """
    if insecure and tls:
        raise errors.BadRequest(
            "--insecure (SHOAL_INSECURE) and the TLS files contradict each other; leave out one of them"
        )
    if insecure or tls:
        return
    for listen in filter(None, listens):
        if not is_loopback(listen.rpartition(":")[0]):
            raise errors.BadRequest(
                f"the {role} would listen on {listen} without TLS, so others could read tokens and values. {_ADVICE}",
                address=listen,
            )


def insecure_consequence(role: str) -> str:
    """Returns what --insecure means for a role, for the warning at its start."""
    if role == "coordinator":
        return "the cluster asks for no tokens: all who can reach it can read and change everything in it"
    return (
        f"other hosts can connect to the {role} without TLS: all who reach the network can read and change what its "
        "connections carry"
    )


def is_loopback(host: str) -> bool:
    """Returns whether only processes of this host can connect to a listening host."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


__all__ = ["check_exposure", "insecure_consequence", "is_loopback"]
