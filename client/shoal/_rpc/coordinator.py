"""Client of the coordinator for clients, sessions, servers and workers: a channel with retries."""

import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from shoal import _tracing, errors
from shoal._rpc import channels
from shoal._rpc.retries import Retries
from shoal._rpc.tls_probe import tls_failure
from shoal._security import NO_CREDENTIALS, AccessRole, Credentials, shown
from shoal.v1 import coordinator_pb2, coordinator_pb2_grpc, group_pb2_grpc, job_pb2_grpc, token_pb2_grpc

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]

_LOG = logging.getLogger("shoal")

CALL_TIMEOUT_S = 5.0
# Calls of one client that stay open.
MAX_OPEN_CALLS = 256
# Seconds between two checks whether a call in progress is abandoned.
_ABANDON_POLL_S = 0.1


class CoordinatorClient:
    """Calls to one coordinator.

    Args:
        address: host:port.
        retry_for_s: seconds during which a call is repeated while the coordinator does not answer.
        credentials: what this process presents.
        on_silence: called with a sentence for people when the coordinator has not answered for about a second, and
            when it answers again. Default: a warning of the logger `shoal` of the standard library, which goes to
            standard error unless the program configures it otherwise.

    Attributes:
        credentials: as given; calls to servers use them as well.
        closed: whether `close` was called.
        member_secrets: the secrets of the members that were registered by this client, by member id.
        retries: counts of repeated calls. The owner of this client also counts its own repeated calls to servers here.
    """

    def __init__(
        self,
        address: str,
        *,
        retry_for_s: float = 20.0,
        credentials: Credentials = NO_CREDENTIALS,
        on_silence: Callable[[str], object] = _LOG.warning,
    ) -> None:
        self.address, self.credentials = address, credentials
        self.closed = False
        self.member_secrets: dict[str, str] = {}
        self._open_calls: list[Any] = []  # replaced and appended to by any thread; one more or less does no harm
        self._answered = False  # whether any call was answered, so that TLS works
        self.retries = Retries()
        self._retry_for_s, self._on_silence = retry_for_s, on_silence
        self._check_port = credentials.port_check(address)
        self._channel = channels.channel(address, credentials, AccessRole.COORDINATOR)
        self.members = coordinator_pb2_grpc.CoordinatorStub(self._channel)
        self.groups = group_pb2_grpc.GroupsStub(self._channel)
        self.jobs = job_pb2_grpc.JobsStub(self._channel)
        self.tokens = token_pb2_grpc.TokensStub(self._channel)

    def call(
        self,
        method: Callable[..., T],
        request: Any,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        retry_for_s: float | None = None,
        abandon: Callable[[], bool] | None = None,
    ) -> T:
        """Makes one unary call, for example `call(client.jobs.Get, job_pb2.GetRequest(job="a"))`.

        All calls of the coordinator may be repeated: they are idempotent.

        Args:
            method: method of a stub.
            request: the request message.
            timeout_s: time limit of one attempt, in seconds.
            retry_for_s: seconds during which the call is repeated. None means the client's default.
            abandon: called several times a second during a call that may wait long; True ends the call.

        Returns:
            The reply message.

        Raises:
            Unreachable: the coordinator did not answer for `retry_for_s` seconds.
            Cancelled: `abandon` returned True.
            Unauthenticated: the first call fails because of TLS.
            BadRequest: something else than a coordinator listens at the address.
            ShoalError: the error that the coordinator answered.
        """

        def once() -> T:
            try:
                reply = self._presenting(attempt)
            except (errors.Unreachable, errors.InternalError) as error:
                if not self._answered and (reason := self._reason(error)):
                    raise reason from None
                raise
            self._answered = True
            return reply

        def attempt(metadata: Metadata) -> T:
            metadata += self._secret_of(request)
            with channels.as_shoal_errors(self.address):
                if abandon is None:
                    return method(request, timeout=timeout_s, metadata=metadata)
                stub: Any = method  # of a stub, as far as it makes futures
                future = stub.future(request, timeout=timeout_s, metadata=metadata)
                reply: T = _result(future, abandon, self.address)
                return reply

        with _tracing.client_span(request):
            return channels.retrying(
                once,
                what="the coordinator",
                address=self.address,
                for_s=self._retry_for_s if retry_for_s is None else retry_for_s,
                on_retry=lambda _: self.retries.count("coordinator"),
                on_silence=self._on_silence,
            )

    def register(
        self, request: coordinator_pb2.RegisterRequest, *, retry_for_s: float | None = None
    ) -> coordinator_pb2.RegisterReply:
        """Registers a member, and keeps its secret: later calls of this client for the member show it.

        Args:
            request: the registration.
            retry_for_s: as for `call`.

        Returns:
            The reply message.

        Raises:
            ShoalError: as `call`.
        """
        reply: coordinator_pb2.RegisterReply = self.call(self.members.Register, request, retry_for_s=retry_for_s)
        self.member_secrets[request.member] = reply.secret
        return reply

    def open_call(self, method: Callable[..., Any], request: Any) -> Any:
        """Begins a call that stays open, without a time limit, and without a wait.

        A client has at most `MAX_OPEN_CALLS` of them, because gRPC delays further calls of a connection that has many.

        Args:
            method: method of a stub.
            request: the request message.

        Returns:
            gRPC's future of the call; None if this client has too many.

        Raises:
            Unauthenticated: as `metadata`.
        """
        self._open_calls = [it for it in self._open_calls if not it.done()]
        if len(self._open_calls) >= MAX_OPEN_CALLS:
            return None
        stub: Any = method  # of a stub, as far as it makes futures
        future = stub.future(request, metadata=self.metadata() + self._secret_of(request))
        self._open_calls.append(future)
        return future

    def _secret_of(self, request: Any) -> Metadata:
        """Returns the metadata with the secret of the member that a request is about, if this client has it."""
        member = getattr(request, "worker", "") or getattr(request, "member", "")
        return shown(self.member_secrets.get(member, ""))

    def _presenting(self, attempt: Callable[[Metadata], T]) -> T:
        """Makes a call, and once more if it is refused and there is another token by now."""
        presented = self.metadata()
        try:
            return attempt(presented)
        except errors.Unauthenticated:
            # The token was replaced after it was read, or this is a ticket of a token that was replaced.
            self.credentials.discard_token()
            renewed = self.metadata()
            if renewed == presented:
                raise
            return attempt(renewed)

    def _reason(self, error: errors.ShoalError) -> errors.ShoalError | None:
        """Returns why the first call failed, if what listens at the address tells it."""
        if isinstance(error, errors.Unreachable):
            return tls_failure(self.address, self.credentials.tls, AccessRole.COORDINATOR)
        if error.details.get(channels.GRPC_STATUS) == "UNIMPLEMENTED":
            return errors.BadRequest(
                f"no coordinator listens at {self.address}, but another process that does not know its calls, "
                "perhaps a server or a coordinator of another version; give the coordinator's address",
                address=self.address,
            )
        return None

    def metadata(self) -> Metadata:
        """Returns the metadata of a call: the trace of this thread, and the token.

        Raises:
            Unauthenticated: another host, or another user on the coordinator's port, would get the token without TLS.
        """
        return *(_tracing.metadata() or ()), *self.credentials.metadata(self._check_port)

    def close(self) -> None:
        """Closes the channel. Calls in progress fail with Cancelled."""
        self.closed = True
        channels.close_channel(self._channel)


def _result(future: Any, abandon: Callable[[], bool], address: str) -> Any:
    """Returns the reply of a call in progress, or ends the call when it is abandoned."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    try:
        while not done.wait(_ABANDON_POLL_S):
            if abandon():
                raise errors.Cancelled(f"the call to {address} was abandoned by its caller", address=address)
    finally:
        future.cancel()  # does nothing if it is done
    return future.result()
