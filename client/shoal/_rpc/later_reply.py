"""Later reply: what a unary handler returns if its reply has to wait. The call then holds no thread while it waits."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class LaterReply:
    """A reply that is not known yet."""

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


__all__ = ["EndedWait", "LaterReply", "awaited"]
