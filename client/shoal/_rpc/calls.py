"""Calls whose headers have arrived and which have no thread yet, for `reception`; and the classes of calls."""

import enum
from concurrent.futures import Future
from typing import Any

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
    peer: str = event.call.peer().decode(errors="replace")
    return peer.rpartition(":")[0]


def size_of(message: Any) -> int:
    """Returns the bytes of a received message; 0 if there is none, or if it could not be decoded."""
    if message is None or isinstance(message, errors.ShoalError):
        return 0
    return len(message) if isinstance(message, bytes) else int(message.ByteSize())


__all__ = ["Call", "CallClass", "host_of", "size_of"]
