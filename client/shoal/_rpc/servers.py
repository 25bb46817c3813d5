"""gRPC servers: handlers, their errors and threads, the health service and reflection."""

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection

from shoal import _tracing, errors
from shoal._limits import catalogue, count_refusal
from shoal._rpc import channels, requests
from shoal._rpc.call_limits import CallLimits
from shoal._rpc.calls import CallClass, EndedWait, awaited
from shoal._rpc.health_service import HEALTH, Health
from shoal._rpc.outcomes import OnOutcome, observed
from shoal._rpc.receiving_pool import SUPPORTED, Hold
from shoal._rpc.reception import Reception
from shoal._rpc.tls_channel import server_credentials
from shoal._security import AUDITED, NO_CREDENTIALS, OPEN_CALLS, Audited, Authorizer, Credentials
from shoal._system.logs import Log
from shoal._wire.limits import MAX_MESSAGE_BYTES

_log = Log(__name__)

# Milliseconds for a new connection to speak HTTP/2, and for a connection without calls to stay.
_HANDSHAKE_MS, _IDLE_MS = 10_000, 600_000

_SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.max_frame_size", 1 << 20),
    # Keepalive detects a client whose host is gone in the middle of a push, and frees its thread.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    # gRPC makes a client wait with more calls. A process that calls for a thousand members has one connection.
    ("grpc.max_concurrent_streams", catalogue.CONNECTION_CALLS.default),
    # Further calls are cancelled, and further connections are closed.
    ("grpc.server.max_pending_requests", catalogue.PENDING_CALLS.default // 2),  # from here on, some
    ("grpc.server.max_pending_requests_hard_limit", catalogue.PENDING_CALLS.default),
    ("grpc.max_allowed_incoming_connections", catalogue.CONNECTIONS.default),
    ("grpc.max_metadata_size", catalogue.HEADER_BYTES.default),
    ("grpc.absolute_max_metadata_size", catalogue.HEADER_BYTES.default),
    ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
    ("grpc.max_connection_idle_ms", _IDLE_MS),
    # Without this, two servers on one port would share its connections. Raise PortInUse instead.
    ("grpc.so_reuseport", 0),
]

# The calls whose successes count as outcomes, too.
_AUDITED = frozenset(call for call, audited in AUDITED.items() if audited is not Audited.REFUSED)
# Threads of essential calls, which wait for nothing but the coordinator's store, and of probes.
_ESSENTIAL_THREADS, _HEALTH_THREADS = 8, 2
# Seconds in which cancelled calls end when a server stops.
CANCELLED_S = 5.0
# The option of a role that sets the address of its gRPC server, for messages.
_LISTEN = "--listen"


def servicer(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a handler with one reply, perhaps a `LaterReply`, so that a `ShoalError` becomes the status of the call."""

    @functools.wraps(method)
    def handler(self: Any, request: Any, context: grpc.ServicerContext) -> Any:
        failure: errors.ShoalError
        try:
            with _tracing.server_rpc_span(method.__name__, context):
                return request.reply.finish() if isinstance(request, EndedWait) else method(self, request, context)
        except errors.ShoalError as error:
            failure = error
        except grpc.RpcError:  # from the request stream: the caller is gone
            raise
        except Exception as error:
            _log.exception("handler failed", rpc=method.__name__)
            failure = errors.InternalError(f"{method.__name__} failed: {type(error).__name__}: {error}")
        return _abort(context, failure)

    return handler


def _abort(context: grpc.ServicerContext, error: errors.ShoalError) -> Any:
    """Ends a call with an error, by an exception of grpcio."""
    refuse(context, error)
    return context.abort(channels.status_of(error), channels.status_text(error))  # raises


def refuse(context: grpc.ServicerContext, error: errors.ShoalError) -> None:
    """Sets an error on a call. The handler must then abort the call or end its stream. An exceeded limit is counted."""
    count_refusal(error)
    context.set_code(channels.status_of(error))
    context.set_details(channels.status_text(error))
    context.set_trailing_metadata(channels.error_metadata(error))


class Pooled:
    """A handler that runs on its own threads, so that other calls never wait for it.

    It uses grpcio's `experimental_thread_pool`.

    Args:
        handler: the handler.
        pool: its threads.
        hold: called with the first message of each call and with `go_on`, as for `Deferred`. If this function returns
            None, the call is handled at once, on the same thread. Without `hold`, calls do not wait.
    """

    def __init__(self, handler: Callable[..., Any], pool: ThreadPoolExecutor, hold: Hold | None = None) -> None:
        self._handler, self.hold = handler, hold
        self.experimental_thread_pool = pool

    def __call__(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._handler(request, context)


def encoded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a handler whose replies are serialized messages."""
    method.replies_encoded = True  # type: ignore[attr-defined]
    return method


class Deferred:
    """A unary handler whose calls may wait before they are handled, without a thread. Its replies are serialized.

    Args:
        handler: handles a call.
        hold: called before that, with the request and with `go_on`; any thread may call `go_on`, once, to let the call
            be handled. Returns a function that is called if the caller disconnects before that. This function has to
            call `go_on`.
    """

    replies_encoded = True

    def __init__(self, handler: Callable[..., Any], hold: Hold) -> None:
        self._handler, self.hold = handler, hold

    def __call__(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._handler(request, context)


class NonBlocking:
    """A server-streaming handler that may return before it has answered, so that a waiting call holds no thread.

    `send(message)` blocks until there is room for the next message, and `send(None)` ends the stream. Both may be
    called later and from any thread. It uses grpcio's `experimental_non_blocking`, as grpcio's health service does.

    Args:
        handler: called with (request, context, send).
        pool: the threads that run the handler, separate from those of other calls.
    """

    experimental_non_blocking = True

    def __init__(
        self, handler: Callable[[Any, grpc.ServicerContext, Callable[[Any], None]], None], pool: ThreadPoolExecutor
    ) -> None:
        self._handler = handler
        self.experimental_thread_pool = pool

    def __call__(self, request: Any, context: grpc.ServicerContext, send: Callable[[Any], None]) -> None:
        try:
            self._handler(request, context, send)
        except errors.ShoalError as error:
            refuse(context, error)
            send(None)
        except Exception as error:
            _log.exception("handler failed")
            refuse(context, errors.InternalError(f"{type(error).__name__}: {error}"))
            send(None)


class RawMessages:
    """A stand-in for a server, to which generated code adds handlers. Messages of some methods stay bytes.

    Args:
        server: the server that gets the handlers.
        requests: methods whose requests are not decoded.
        replies: methods whose replies are already encoded.
    """

    def __init__(self, server: grpc.Server, *, requests: Collection[str], replies: Collection[str]) -> None:
        self._server, self._requests, self._replies = server, requests, replies

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Does nothing: `add_registered_method_handlers` creates the generic handlers."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """Adds the changed handlers to the server."""
        raw = {name: self._raw(name, handler) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, raw),))
        self._server.add_registered_method_handlers(service, raw)

    def _raw(self, name: str, handler: Any) -> Any:
        if name in self._requests:
            handler = handler._replace(request_deserializer=None)
        return handler._replace(response_serializer=None) if name in self._replies else handler


class RpcServer:
    """A gRPC server with the standard health service and reflection.

    A call gets a thread when its first message has arrived (`Reception`). The threads of essential calls and of probes
    are apart, so that no other call delays them.

    Args:
        bind: host:port to listen on. Port 0 takes any free port.
        services: full name, function of the generated code that adds it, and servicer of each service.
        threads: largest number of calls that run at a time, beside the essential ones.
        advertise: host by which others reach this one. Default: as `public_host` chooses.
        essential: methods that the cluster depends on, as SERVICE/METHOD.
        limits: limits of the calls.
        credentials: with TLS settings, the port accepts TLS only.
        values: whether calls carry values of variables, so that connections adapt to how much they can carry.
        authorizer: decides who may make which call. None allows all calls.
        on_outcome: called with the outcome of each call that fails, that `authorizer` refuses, or whose permitted calls
            audit logs record (`AUDITED`).

    Raises:
        PortInUse: the port is in use.
        BadRequest: `bind` is not an address, or there are TLS settings without a certificate.
    """

    def __init__(
        self,
        bind: str,
        services: Sequence[tuple[str, Callable[[Any, grpc.Server], None], Any]],
        *,
        threads: int,
        advertise: str = "",
        essential: Collection[str] = (),
        limits: CallLimits | None = None,
        credentials: Credentials = NO_CREDENTIALS,
        values: bool = False,
        authorizer: Authorizer | None = None,
        on_outcome: OnOutcome | None = None,
    ) -> None:
        if credentials.tls:
            credentials.tls.check_serves()
        host, _ = channels.parse_address(bind)
        channels.check_free(bind, _LISTEN)
        limits = limits or CallLimits()
        self._reception = Reception(limits, _refusal, authorizer, on_outcome or (lambda _: None))
        self._pools = _Pools(threads)
        self._server = grpc.server(
            self._pools.ordinary,
            options=_SERVER_OPTIONS + ([] if values else channels.CONTROL_OPTIONS),
            maximum_concurrent_rpcs=2 * limits.calls + limits.open_calls,
        )
        self._health = Health()
        # As far as generated code uses a server.
        registrar: Any = _Registrar(self._server, self._reception, self._pools, essential, on_outcome)
        registrar.add_registered_method_handlers(HEALTH, self._health.handlers())
        for _, add, implementation in services:
            add(implementation, registrar)
        self._names = [name for name, _, _ in services]
        reflection.enable_server_reflection([*self._names, HEALTH, reflection.SERVICE_NAME], registrar)
        try:
            if credentials.tls:
                bound = self._server.add_secure_port(bind, server_credentials(credentials.tls))
            else:
                bound = self._server.add_insecure_port(bind)
        except RuntimeError:
            bound = 0
        if not bound:
            raise channels.port_in_use(bind, None, _LISTEN)
        self.address = f"{channels.public_host(host, advertise)}:{bound}"
        self.set_ready(False)

    @property
    def calls_without_message(self) -> int:
        """The number of calls whose first message has not arrived."""
        return self._reception.waiting

    def take_essential_delays(self) -> tuple[float, int]:
        """Returns the longest wait of an essential call for a thread, in seconds, and the number of refused ones.

        Both are since this method was last called.
        """
        return self._reception.take_essential_delays()

    def start(self) -> None:
        """Starts to serve. The health service reports NOT_SERVING until `set_ready(True)`."""
        self._reception.start()
        self._server.start()

    def set_ready(self, ready: bool) -> None:
        """Sets the status that the health service reports for the process and each service."""
        self._health.set(["", *self._names], ready=ready)

    def stop(self, grace_s: float = 1.0) -> None:
        """Refuses new calls, waits up to `grace_s` seconds for running ones, and frees the port and the threads.

        It then cancels the calls that still run. If grpcio does not report the end of a cancelled call within 5 s, this
        method no longer waits for that call, so that the process can end.
        """
        self.set_ready(False)
        if not self._server.stop(grace_s).wait(grace_s + CANCELLED_S):
            _log.warning("stopped although a cancelled call has not ended", after_s=grace_s + CANCELLED_S)
        self._reception.stop()
        self._pools.shutdown()


class _Pools:
    """The threads of a server, by kind of call."""

    def __init__(self, threads: int) -> None:
        self.ordinary = ThreadPoolExecutor(threads, thread_name_prefix="rpc")
        self.essential = ThreadPoolExecutor(_ESSENTIAL_THREADS, thread_name_prefix="rpc-essential")
        self.health = ThreadPoolExecutor(_HEALTH_THREADS, thread_name_prefix="rpc-health")
        # A reflection call holds its thread until its caller ends it.
        self.reflection = ThreadPoolExecutor(1, thread_name_prefix="rpc-reflection")

    def shutdown(self) -> None:
        """Waits for the threads."""
        for pool in (self.ordinary, self.essential, self.health, self.reflection):
            pool.shutdown(wait=True)


class _Registrar:
    """What generated code adds handlers to: each gets its threads, behind the reception of its messages."""

    def __init__(
        self,
        server: grpc.Server,
        reception: Reception,
        pools: _Pools,
        essential: Collection[str],
        on_outcome: OnOutcome | None,
    ) -> None:
        self._server, self._reception, self._pools, self._essential = server, reception, pools, essential
        self._on_outcome = on_outcome

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Does nothing: `add_registered_method_handlers` creates the generic handlers."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """Adds handlers to the server."""
        received = {name: self._received(service, name, handler) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, received),))
        self._server.add_registered_method_handlers(service, received)

    def _received(self, service: str, name: str, handler: Any) -> Any:
        call = f"{service}/{name}"
        arity = ("unary", "stream")[handler.request_streaming] + ("_unary", "_stream")[handler.response_streaming]
        behavior = getattr(handler, arity)
        kind = CallClass.ORDINARY
        if call in self._essential:
            kind, threads = CallClass.ESSENTIAL, self._pools.essential
        elif call in OPEN_CALLS:
            kind, threads = CallClass.OPEN, self._pools.health
        elif service == reflection.SERVICE_NAME:
            threads = self._pools.reflection
        else:
            threads = getattr(behavior, "experimental_thread_pool", None) or self._pools.ordinary
        hold = requests.holding(getattr(behavior, "hold", None))
        pool = self._reception.pool(call, threads, streaming=handler.request_streaming, kind=kind, hold=hold)
        if not (SUPPORTED or handler.response_streaming):
            behavior = awaited(behavior)
        if getattr(behavior, "replies_encoded", False):
            handler = handler._replace(response_serializer=None)
        if handler.request_deserializer:
            handler = handler._replace(request_deserializer=requests.Decoder(handler.request_deserializer, name))
        if self._on_outcome:
            behavior = observed(call, behavior, self._on_outcome, successes=call in _AUDITED, arity=arity)
        return handler._replace(**{arity: _InPool(behavior, pool)})


class _InPool:
    """A handler with the pool that grpcio runs it in."""

    def __init__(self, handler: Callable[..., Any], pool: ThreadPoolExecutor) -> None:
        self._handler = handler
        self.experimental_thread_pool = pool
        self.experimental_non_blocking = getattr(handler, "experimental_non_blocking", False)

    def __call__(self, request: Any, context: grpc.ServicerContext, *send: Callable[[Any], None]) -> Any:
        if isinstance(request, errors.ShoalError):
            if send:  # the handler does not block
                refuse(context, request)
                return send[0](None)
            return _abort(context, request)
        if isinstance(request, Iterator):
            request = requests.decoded(request, partial(_abort, context))
        return self._handler(request, context, *send)


def _refusal(error: errors.ShoalError) -> tuple[Any, bytes, Any]:
    """Returns the status, the text and the trailing metadata with which a call is refused, and counts the refusal."""
    count_refusal(error)
    return (
        channels.status_of(error).value[0],
        channels.status_text(error).encode(),
        channels.error_metadata(error),
    )
