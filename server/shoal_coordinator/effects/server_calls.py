"""Calls to parameter servers, for effects: to one server with retries, or to all of a job's at the same time."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from shoal import _rpc, _tracing, errors
from shoal.v1.parameter_server_pb2_grpc import ParameterServerStub
from shoal_coordinator.messages import ServerRef

CALL_TIMEOUT_S = 5.0
_RETRY_FOR_S = 20.0


class ServerCalls:
    """The way of one effect to servers.

    Args:
        wanted: whether it still makes sense to call a server for it: the server lives, and the effect was not given up.
        sleep: waits so many seconds, less when the coordinator stops.
        on_retry: told of each call that is repeated.
    """

    def __init__(
        self,
        wanted: Callable[[ServerRef], bool],
        sleep: Callable[[float], object] = time.sleep,
        on_retry: Callable[[], None] = lambda: None,
    ) -> None:
        self._wanted, self._sleep, self._on_retry = wanted, sleep, on_retry

    def call(self, server: ServerRef, method: str, request: Any, *, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """One call to one server, repeated while it cannot be reached: so it must be one that may be.

        Raises:
            ShoalError: what the server answers.
            Unreachable: nobody answered for long.
            Cancelled: the call is not wanted any more.
        """
        # A channel a call: these are few, and a server that was restarted is found at once.
        with _rpc.channel(server.address) as channel, _tracing.client_span(request):
            stub = getattr(ParameterServerStub(channel), method)

            def once() -> Any:
                with _rpc.as_shoal_errors(server.address):
                    return stub(request, timeout=timeout_s, metadata=_tracing.metadata())

            def again(error: errors.ShoalError) -> None:
                self.check_wanted(server, error.message)
                self._on_retry()

            return _rpc.retrying(
                once,
                what=f"server {server.member}",
                address=server.address,
                for_s=_RETRY_FOR_S,
                sleep=self._sleep,
                on_retry=again,
            )

    @contextmanager
    def at_once(self, servers: Sequence[ServerRef]) -> Iterator["ConcurrentCalls"]:
        """Channels to servers that are called at the same time, each call once."""
        with ExitStack() as channels:
            yield ConcurrentCalls(
                [(server, channels.enter_context(_rpc.channel(server.address))) for server in servers]
            )

    def check_wanted(self, server: ServerRef, why: str = "nobody waits for it any more") -> None:
        """Raises Cancelled if it makes no sense any more to call a server."""
        if not self._wanted(server):
            raise errors.Cancelled(f"server {server.member} is gone, or its job is ({why})")


class ConcurrentCalls:
    """Open channels to some servers; made by `ServerCalls.at_once`."""

    def __init__(self, channels: Sequence[tuple[ServerRef, Any]]) -> None:
        self._servers = [(server, ParameterServerStub(channel)) for server, channel in channels]

    def call(self, method: str, request: Any, *, timeout_s: float = CALL_TIMEOUT_S) -> list[Any]:
        """The same call to each; what they answer, in their order.

        Raises:
            ShoalError: of the first one that fails; the others' answers are not waited for.
        """
        with _tracing.client_span(request):
            calls = self._begin(method, request, timeout_s)
            try:
                answers = []
                for server, call in calls:
                    with _rpc.as_shoal_errors(server.address):
                        answers.append(call.result())
                return answers
            finally:
                for _, call in calls:
                    call.cancel()

    def tell(self, method: str, request: Any, *, timeout_s: float) -> None:
        """The same call to each, of which none has to succeed: returns when all are over, within the time."""
        with _tracing.client_span(request):
            for server, call in self._begin(method, request, timeout_s):
                with suppress(errors.ShoalError), _rpc.as_shoal_errors(server.address):
                    call.result()

    def _begin(self, method: str, request: Any, timeout_s: float) -> list[tuple[ServerRef, Any]]:
        context = _tracing.metadata()
        return [
            (server, getattr(stub, method).future(request, timeout=timeout_s, metadata=context))
            for server, stub in self._servers
        ]
