"""Calls of effects to parameter servers: to one server with retries, or to all servers of a job concurrently."""

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
    """The calls of one effect to servers.

    Args:
        wanted: Returns whether to call a server: it is alive, and the effect is still pending.
        sleep: Waits for a number of seconds, or until the coordinator stops.
        on_retry: Called for each repeated call.
    """

    def __init__(
        self,
        wanted: Callable[[ServerRef], bool],
        sleep: Callable[[float], object] = time.sleep,
        on_retry: Callable[[], None] = lambda: None,
    ) -> None:
        self._wanted, self._sleep, self._on_retry = wanted, sleep, on_retry

    def call(self, server: ServerRef, method: str, request: Any, *, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Calls one server, and repeats the call while the server cannot be reached.

        Args:
            server: The server.
            method: The name of the RPC, which must be safe to repeat.
            request: The request message.
            timeout_s: Seconds until one attempt fails.

        Returns:
            The reply message.

        Raises:
            ShoalError: The server has returned an error.
            Unreachable: The server did not reply for 20 s.
            Cancelled: The call is no longer wanted.
        """
        # Each call opens a channel: calls are few, and a restarted server is found at once.
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
    def concurrently(self, servers: Sequence[ServerRef]) -> Iterator["ConcurrentCalls"]:
        """Opens channels for concurrent calls to servers, without retries."""
        with ExitStack() as channels:
            yield ConcurrentCalls(
                [(server, channels.enter_context(_rpc.channel(server.address))) for server in servers]
            )

    def check_wanted(self, server: ServerRef, why: str = "the effect was dropped") -> None:
        """Raises Cancelled if calls to a server are no longer wanted."""
        if not self._wanted(server):
            raise errors.Cancelled(f"server {server.member} is gone, or its job has ended ({why})")


class ConcurrentCalls:
    """Open channels to some servers; made by `ServerCalls.concurrently`."""

    def __init__(self, channels: Sequence[tuple[ServerRef, Any]]) -> None:
        self._servers = [(server, ParameterServerStub(channel)) for server, channel in channels]

    def call(self, method: str, request: Any, *, timeout_s: float = CALL_TIMEOUT_S) -> list[Any]:
        """Calls all servers with the same request.

        Args:
            method: The name of the RPC.
            request: The request message.
            timeout_s: Seconds until a call fails.

        Returns:
            The replies in the order of the servers.

        Raises:
            ShoalError: The first call that failed has raised it; the other calls are cancelled.
        """
        with _tracing.client_span(request):
            calls = self._begin(method, request, timeout_s)
            try:
                replies = []
                for server, call in calls:
                    with _rpc.as_shoal_errors(server.address):
                        replies.append(call.result())
                return replies
            finally:
                for _, call in calls:
                    call.cancel()

    def send(self, method: str, request: Any, *, timeout_s: float) -> None:
        """Calls all servers with the same request, and ignores errors. Returns when all calls have ended.

        Args:
            method: The name of the RPC.
            request: The request message.
            timeout_s: Seconds until a call fails.
        """
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
