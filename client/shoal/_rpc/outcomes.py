"""Outcomes of calls, for a role that records them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from shoal._rpc.callers import caller
from shoal._rpc.calls import EndedWait, LaterReply, host_in
from shoal._security import Principal


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The outcome of one call.

    Attributes:
        call: SERVICE/METHOD.
        caller: who made it; None if that is not known.
        host: the address it came from, without the port, such as 10.0.0.5.
        status: the name of its gRPC status, such as OK.
        request: its message; None if it was refused before its message arrived.
        reason: the text of its error; empty if it has none.
    """

    call: str
    caller: Principal | None
    host: str
    status: str
    request: Any = None
    reason: str = ""


# Called with the outcome of a call, on its thread or, if it was refused, on grpcio's event thread. It must not wait.
OnOutcome = Callable[[CallOutcome], None]


def observed(
    call: str,
    handler: Callable[..., Any],
    on_outcome: OnOutcome,
    *,
    successes: bool,
    arity: str = "unary_unary",
) -> Callable[..., Any]:
    """Wraps a handler, so that the outcomes of its calls are known.

    Args:
        call: SERVICE/METHOD.
        handler: the handler.
        on_outcome: called at the end of each call that fails.
        successes: whether it is also called for calls that succeed.
        arity: whether its requests and its replies are streams: unary_unary, unary_stream, stream_unary or
            stream_stream. The outcome of a stream of requests has no request.

    Returns:
        A handler of the same kind: one that is non-blocking, as grpcio calls it, stays so.
    """

    streaming = arity.startswith("stream")

    def note(request: Any, context: grpc.ServicerContext, who: Principal | None) -> None:
        status: Any = context.code()  # type: ignore[attr-defined]  # grpcio has it, its types have not
        if status or successes:
            host, details = host_in(context.peer()), context.details() or b""  # type: ignore[attr-defined]
            name = status.name if status else "OK"
            reason = details.decode(errors="replace") if isinstance(details, bytes) else str(details)
            on_outcome(CallOutcome(call, who, host, name, None if streaming else request, reason))

    def handle(request: Any, context: grpc.ServicerContext) -> Any:
        reply = None
        try:
            reply = handler(request, context)
            return reply
        finally:
            if not isinstance(reply, LaterReply):
                note(request.request if isinstance(request, EndedWait) else request, context, caller())

    def handle_stream(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            yield from handler(request, context)
        finally:
            note(request, context, caller())

    if getattr(handler, "experimental_non_blocking", False):
        return _NonBlockingObserved(handler, note)
    return handle_stream if arity.endswith("stream") else handle


class _NonBlockingObserved:
    """An observed handler that may return before it has answered. It ends a call with `send(None)`, on any thread."""

    experimental_non_blocking = True

    def __init__(
        self,
        handler: Callable[..., Any],
        note: Callable[[Any, grpc.ServicerContext, Principal | None], None],
    ) -> None:
        self._handler, self._note = handler, note

    def __call__(self, request: Any, context: grpc.ServicerContext, send: Callable[[Any], None]) -> Any:
        who = caller()

        def watched(message: Any) -> None:
            if message is None:
                self._note(request, context, who)
            send(message)

        return self._handler(request, context, watched)


__all__ = ["CallOutcome", "OnOutcome", "observed"]
