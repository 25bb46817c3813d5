"""Outcomes of calls, for a role that records them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from shoal._rpc.callers import caller
from shoal._rpc.calls import host_in
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


def observed(call: str, handler: Callable[..., Any], on_outcome: OnOutcome, *, successes: bool) -> Callable[..., Any]:
    """Wraps a unary handler, so that the outcomes of its calls are known.

    Args:
        call: SERVICE/METHOD.
        handler: the handler.
        on_outcome: called at the end of each call that fails.
        successes: whether it is also called for calls that succeed.
    """

    def handle(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return handler(request, context)
        finally:
            status: Any = context.code()  # type: ignore[attr-defined]  # grpcio has it, its types have not
            if status or successes:
                host, details = host_in(context.peer()), context.details() or b""  # type: ignore[attr-defined]
                name = status.name if status else "OK"
                reason = details.decode(errors="replace") if isinstance(details, bytes) else str(details)
                on_outcome(CallOutcome(call, caller(), host, name, request, reason))

    return handle


__all__ = ["CallOutcome", "OnOutcome", "observed"]
