"""Calls without a thread: those that have none yet, for `reception`, and those whose reply waits; and their classes."""

import enum
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
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


class LaterReply:
    """What a unary handler returns if its reply has to wait. The call then holds no thread while it waits."""

    def on_end(self, call: Callable[[], object]) -> None:
        """Calls a function when the wait ends: on any thread, and at once if it has ended. May call it twice."""
        raise NotImplementedError

    def withdraw(self) -> None:
        """Ends the wait, because the caller is gone."""
        raise NotImplementedError

    def finish(self) -> Any:
        """Returns the reply, after the end of the wait. It may be another `LaterReply`.

        Raises:
            ShoalError: the error of the call.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class EndedWait:
    """What a handler gets in place of the request when the wait of its later reply has ended.

    Attributes:
        request: the request.
        reply: the reply.
    """

    request: Any
    reply: LaterReply


def awaited(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a handler of `servicer` that may return later replies, so that its thread waits for them."""

    def handle(request: Any, context: Any) -> Any:
        reply = handler(request, context)
        while isinstance(reply, LaterReply):
            ended = threading.Event()
            reply.on_end(ended.set)
            ended.wait()
            reply = handler(EndedWait(request, reply), context)
        return reply

    return handle


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


__all__ = ["Call", "CallClass", "EndedWait", "LaterReply", "awaited", "host_in", "host_of", "size_of"]
