"""Calls whose headers have arrived and which have no thread yet, for `reception`; and the classes of calls."""

import enum
from concurrent.futures import Future
from typing import Any
from urllib.parse import unquote

from shoal import errors


class CallClass(enum.Enum):
    """Classes of calls, each with limits of its own, so that no class uses up the limits of another."""

    ORDINARY = "ordinary"
    ESSENTIAL = "essential"  # the cluster depends on them
    OPEN = "open"  # anybody may make them, without a token


class Call:
    """A call between its headers and its thread.

    Attributes:
        event: grpcio's event of its headers.
        state: grpcio's state of it.
        host: where it comes from, without the port.
        kind: its class.
        nbytes: bytes of its first message while that waits for a thread. The lock of the reception guards it.
        ended: finished when the call no longer counts; grpcio counts its calls by it.
    """

    __slots__ = ("ended", "event", "host", "kind", "nbytes", "state")

    def __init__(self, event: Any, state: Any, kind: CallClass) -> None:
        self.event, self.state, self.kind, self.nbytes = event, state, kind, 0
        peer = event.call.peer()
        self.host: bytes = peer.rpartition(b":")[0]
        self.ended: Future[None] = Future()


def host_of(event: Any) -> str:
    """Returns where a call comes from, without the port."""
    return host_in(event.call.peer().decode(errors="replace"))


def host_in(peer: str) -> str:
    """Returns the address in gRPC's name of the other end, without the port, in the form that HTTP servers report.

    Args:
        peer: such as `ipv4:10.0.0.5:4711` or `ipv6:%5B2001:db8::1%5D:4711`. Another form is returned as it is.
    """
    kind, _, rest = unquote(peer).partition(":")
    return rest.rpartition(":")[0].strip("[]") if kind in {"ipv4", "ipv6"} else peer


def size_of(message: Any) -> int:
    """Returns the bytes of a received message; 0 if there is none, or if it could not be decoded."""
    if message is None or isinstance(message, errors.ShoalError):
        return 0
    return len(message) if isinstance(message, bytes) else int(message.ByteSize())


__all__ = ["Call", "CallClass", "host_in", "host_of", "size_of"]
