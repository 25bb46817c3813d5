"""Calls of effects to parameter servers.

Calls to one or to many servers are repeated while a server cannot be reached. The calls of a checkpoint's cut go to all
servers of a job at once, and are not repeated (`concurrently`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from shoal import _rpc, _tracing, errors
from shoal.v1 import parameter_server_pb2 as pb
from shoal_coordinator.effects.parallel_calls import CallPolicy, ParallelCalls
from shoal_coordinator.effects.server_channels import LentChannel, ServerChannels
from shoal_coordinator.messages import ServerRef

CALL_TIMEOUT_S = 5.0
RETRY_FOR_S = 20.0


class ServerCalls:
    """The calls of one effect to servers.

    Args:
        channels: The channels to servers.
        wanted: Returns whether to call a server: it is alive, and the effect is still pending.
        on_retry: Called for each repeated call.
        patience_s: Seconds without an answer of a server after which `call` and `call_all` raise `ServerSilent`. None:
            they wait.
    """

    def __init__(
        self,
        channels: ServerChannels,
        wanted: Callable[[ServerRef], bool],
        on_retry: Callable[[], None] = lambda: None,
        patience_s: float | None = None,
    ) -> None:
        self._channels, self._wanted, self._on_retry, self._patience_s = channels, wanted, on_retry, patience_s

    def call(self, server: ServerRef, method: str, request: Any, *, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Calls one server, and repeats the call while the server cannot be reached; see `call_all`.

        Args:
            server: The server.
            method: The name of the RPC, which must be safe to repeat.
            request: The request message.
            timeout_s: Seconds until one attempt fails.

        Returns:
            The reply message.
        """
        [reply] = self.call_all([server], method, lambda _: request, timeout_s=timeout_s)
        return reply

    def call_all(
        self,
        servers: Sequence[ServerRef],
        method: str,
        request_for: Callable[[ServerRef], Any],
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        retry_for_s: float | None = None,
    ) -> list[Any]:
        """Calls servers in parallel, and repeats each call while its server cannot be reached.

        Args:
            servers: The servers.
            method: The name of the RPC, which must be safe to repeat.
            request_for: Returns the request message for a server. Called when the call begins, so that only the
                requests of calls on their way are in memory.
            timeout_s: Seconds until one attempt fails.
            retry_for_s: Seconds from a call's first failure during which it is repeated; 0 means never. Default: 20 s.

        Returns:
            The reply messages, in the order of the servers.

        Raises:
            ShoalError: A server has returned an error; the other calls are cancelled.
            Unreachable: A server did not reply for `retry_for_s` seconds.
            Cancelled: The calls are no longer wanted.
            ServerSilent: A server did not answer within the patience.
        """
        for_s = RETRY_FOR_S if retry_for_s is None else retry_for_s
        policy = CallPolicy(self.check_wanted, self._on_retry, for_s, self._patience_s)
        return self._run(policy, servers, method, request_for, timeout_s)

    def call_each(self, servers: Sequence[ServerRef], method: str, request: Any) -> list[Any]:
        """Calls servers in parallel with the same request, as `call_all` does, but goes on if some calls fail.

        Args:
            servers: The servers.
            method: The name of the RPC, which must be safe to repeat.
            request: The request message.

        Returns:
            For each server its reply message, or the ShoalError why there is none.

        Raises:
            ServerSilent: A server did not answer within the patience.
        """
        policy = CallPolicy(self.check_wanted, self._on_retry, RETRY_FOR_S, self._patience_s, keep_errors=True)
        return self._run(policy, servers, method, lambda _: request, CALL_TIMEOUT_S)

    def _run(
        self,
        policy: CallPolicy,
        servers: Sequence[ServerRef],
        method: str,
        request_for: Callable[[ServerRef], Any],
        timeout_s: float,
    ) -> list[Any]:
        if not servers:
            return []
        with _tracing.client_span(getattr(pb, f"{method}Request")()):

            def begin(stub: Any, server: ServerRef) -> Any:
                metadata = self._channels.metadata(server)
                return getattr(stub, method).future(request_for(server), timeout=timeout_s, metadata=metadata)

            return ParallelCalls(self._channels, policy, begin).run(servers)

    def unless_ended(self, is_live: Callable[[], bool]) -> "ServerCalls":
        """Returns the same calls, except that they are also cancelled once a job has ended.

        This is for restores, which may take as long as the storage hangs. Other calls complete even if their job has
        ended. Otherwise a server could handle the call to drop the shards before the call to create them, and keep the
        shards.
        """
        return ServerCalls(
            self._channels, lambda server: self._wanted(server) and is_live(), self._on_retry, self._patience_s
        )

    @contextmanager
    def concurrently(self, servers: Sequence[ServerRef]) -> Iterator["ConcurrentCalls"]:
        """Provides channels for calls that go to all these servers at once, without retries.

        Raises:
            Cancelled: A server is gone.
        """
        with ExitStack() as lent:
            channels = []
            for server in servers:
                channels.append(self._channels.borrow(server))
                lent.callback(self._channels.give_back, channels[-1])
            yield ConcurrentCalls(channels, self._channels.metadata)

    def check_wanted(self, server: ServerRef, why: str = "the effect was dropped") -> None:
        """Raises Cancelled if calls to a server are no longer wanted."""
        if not self._wanted(server):
            raise errors.Cancelled(f"server {server.member} is gone, or its job has ended ({why})")


class ConcurrentCalls:
    """Channels to some servers; made by `ServerCalls.concurrently`."""

    def __init__(
        self, channels: Sequence[LentChannel], metadata: Callable[[ServerRef], tuple[tuple[str, str], ...]]
    ) -> None:
        self._channels, self._metadata = channels, metadata

    def call(self, method: str, request: Any, *, timeout_s: float = CALL_TIMEOUT_S) -> list[Any]:
        """Calls all servers with the same request.

        Args:
            method: The name of the RPC.
            request: The request message.
            timeout_s: Seconds until a call fails.

        Returns:
            The replies in the order of the servers.

        Raises:
            Unreachable: Another user listens on a server's port; no call is then in progress.
            ShoalError: The first call that failed has raised it; the other calls are cancelled.
        """
        calls: list[tuple[ServerRef, Any]] = []
        with _tracing.client_span(request):
            try:
                for it in self._channels:
                    calls.append(self._begin(it, method, request, timeout_s))
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
        calls: list[tuple[ServerRef, Any]] = []
        with _tracing.client_span(request):
            for it in self._channels:
                with suppress(errors.ShoalError):
                    calls.append(self._begin(it, method, request, timeout_s))
            for server, call in calls:
                with suppress(errors.ShoalError), _rpc.as_shoal_errors(server.address):
                    call.result()

    def _begin(self, lent: LentChannel, method: str, request: Any, timeout_s: float) -> tuple[ServerRef, Any]:
        metadata = self._metadata(lent.server)
        with _rpc.as_shoal_errors(lent.server.address):
            return lent.server, getattr(lent.stub, method).future(request, timeout=timeout_s, metadata=metadata)


__all__ = ["CALL_TIMEOUT_S", "ConcurrentCalls", "ServerCalls"]
