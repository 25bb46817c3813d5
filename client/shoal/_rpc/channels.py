"""gRPC for every role: channels, servers, retries, and the one table between domain errors and statuses.

Nothing outside this module and the servicers sees a grpc type.
"""

import functools
import random
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from shoal import _tracing, errors
from shoal._rpc.backoff import Backoff
from shoal._wire.limits import MAX_MESSAGE_BYTES
from shoal.v1 import header_pb2

T = TypeVar("T")
_log = structlog.get_logger(__name__)

_DETAIL_KEY = "shoal-error-bin"

_CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.max_frame_size", 1 << 20),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Reconnect fast: a restarted server is back within a second, and backoff between calls is ours.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A push is repeated by us with its stamp; gRPC's own retry buffer is too small for one (256 KiB).
    ("grpc.enable_retries", 0),
]
_SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.max_frame_size", 1 << 20),
    # A client whose host is gone, and with it half a push, is found out and its thread freed.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Two servers on one port would share its connections silently; say PortInUse instead.
    ("grpc.so_reuseport", 0),
]

# Calls that a server takes at once, running, waiting and queued; more are refused by grpc itself.
_MAX_CALLS = 32_768
# Of an error's text: what trailing metadata may hold is bounded by grpc, and exceeding it would hide the error.
_MAX_MESSAGE, _MAX_DETAIL = 4_000, 500

# Statuses that grpc itself makes, without our detail.
_STATUS_TO_ERROR: dict[grpc.StatusCode, type[errors.ShoalError]] = {
    grpc.StatusCode.UNAVAILABLE: errors.Unreachable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    # Of a server that stops in the middle of a call. Who gives up a call of its own does not wait for its error.
    grpc.StatusCode.CANCELLED: errors.Unreachable,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.MessageTooLarge,
    grpc.StatusCode.INVALID_ARGUMENT: errors.BadRequest,
}


def parse_address(text: str) -> tuple[str, int]:
    """The host and port of `host:port`.

    Raises:
        BadRequest: it is none.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise errors.BadRequest(f"{text!r} is no address; give host:port, such as 127.0.0.1:7070", address=text)
    return host, int(port)


def is_everywhere(host: str) -> bool:
    """Whether who listens there does so at all interfaces."""
    return host in {"0.0.0.0", "[::]", ""}  # noqa: S104 - it is compared


def public_host(bound: str, advertise: str) -> str:
    """The host that others reach this one by: the one given, or bound, or this machine's name if all are bound."""
    return advertise or (socket.gethostname() if is_everywhere(bound) else bound)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0: any free one.

    Raises:
        PortInUse: the port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), port), family=family, backlog=128)
    except OSError as error:
        raise _port_in_use(f"{host}:{port}", error) from None


def channel(address: str) -> grpc.Channel:
    """Opens a channel to `host:port`; it connects at the first call.

    Make its stubs before it can be closed: grpcio (1.85) crashes the process over a stub made on a closed channel.
    """
    return grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)


def _port_in_use(address: str, why: object) -> errors.PortInUse:
    return errors.PortInUse(
        f"cannot listen on {address}: the port is in use or the address is not this machine's ({why}); "
        "choose another port, or 0 for any free one",
        address=address,
    )


# Errors, both ways.


def error_metadata(error: errors.ShoalError) -> tuple[tuple[str, bytes], ...]:
    """The trailing metadata that carries an error's code and details."""
    return ((_DETAIL_KEY, detail_of(error).SerializeToString()),)


def detail_of(error: errors.ShoalError) -> header_pb2.ErrorDetail:
    """The message that carries an error."""
    return header_pb2.ErrorDetail(
        code=error.code,
        message=_shortened(error.message, _MAX_MESSAGE),
        details={key: _shortened(value, _MAX_DETAIL) for key, value in error.details.items()},
    )


def error_of(detail: header_pb2.ErrorDetail) -> errors.ShoalError:
    """The error that a message carries; InternalError for a code that this version does not know."""
    kind = errors.ShoalError.catalogue.get(detail.code, errors.InternalError)
    return kind(detail.message, **dict(detail.details))


def _shortened(text: str, most: int) -> str:
    """The beginning and the end of a text: what it is about, and what a traceback came to."""
    encoded = text.encode()
    if len(encoded) <= most:
        return text
    beginning, end = encoded[: most // 4], encoded[-(most - most // 4) :]
    return f"{beginning.decode(errors='ignore')} [...] {end.decode(errors='ignore')}"


def status_of(error: errors.ShoalError) -> grpc.StatusCode:
    """The gRPC status of a domain error."""
    return grpc.StatusCode[error.status]


def error_from(failure: grpc.RpcError, address: str) -> errors.ShoalError:
    """The domain error that a failed call to `address` stands for."""
    call: Any = failure  # every RpcError that a stub raises is a grpc.Call too
    for key, value in call.trailing_metadata() or ():
        if key == _DETAIL_KEY:
            return error_of(header_pb2.ErrorDetail.FromString(value))
    code, text = call.code(), call.details() or "no detail given"
    kind = _STATUS_TO_ERROR.get(code, errors.InternalError)
    return kind(f"call to {address} failed with {code.name}: {text}", address=address)


@contextmanager
def as_shoal_errors(address: str) -> Iterator[None]:
    """Raises a `ShoalError` for any gRPC error of the block; Cancelled if our own channel was closed."""
    try:
        yield
    except grpc.RpcError as failure:
        raise error_from(failure, address) from None
    except ValueError as failure:
        if "closed" not in str(
            failure
        ):  # the only ValueError that grpc raises for a call has this and no type of its own
            raise
        raise errors.Cancelled(f"the connection to {address} was closed on this side", address=address) from None


def servicer(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a unary or client-streaming handler: a `ShoalError` it raises becomes its status."""

    @functools.wraps(method)
    def handler(self: Any, request: Any, context: grpc.ServicerContext) -> Any:
        failure: errors.ShoalError
        try:
            with _tracing.served_call(method.__name__, context):
                return method(self, request, context)
        except errors.ShoalError as error:
            failure = error
        except grpc.RpcError:  # of the request's stream: the caller is gone
            raise
        except Exception as error:
            _log.exception("handler failed", rpc=method.__name__)
            failure = errors.InternalError(f"{method.__name__} failed: {type(error).__name__}: {error}")
        refuse(context, failure)
        return context.abort(status_of(failure), _shortened(failure.message, _MAX_DETAIL))  # raises

    return handler


def refuse(context: grpc.ServicerContext, error: errors.ShoalError) -> None:
    """Puts an error on a call; the caller then aborts it or ends its stream."""
    context.set_code(status_of(error))
    context.set_details(_shortened(error.message, _MAX_DETAIL))
    context.set_trailing_metadata(error_metadata(error))


class Pooled:
    """A handler that runs on threads of its own, so that calls of other kinds never wait for its.

    This is grpcio's `experimental_thread_pool`.

    Args:
        handler: called as grpc calls handlers.
        pool: lends the threads.
    """

    def __init__(self, handler: Callable[..., Any], pool: ThreadPoolExecutor) -> None:
        self._handler = handler
        self.experimental_thread_pool = pool

    def __call__(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._handler(request, context)


class NonBlocking:
    """A server-streaming handler that may return before it has answered, so that a call that waits holds no thread.

    It gets a third argument, `send`: `send(message)` blocks until there is room for the next one, `send(None)` ends
    the stream; both may be called later and from any thread. This is grpcio's `experimental_non_blocking`, on which
    its own health service rests.

    Args:
        handler: called with (request, context, send).
        pool: whose threads run the handler, apart from those of other calls.
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
    """Stands in for a server while generated code adds its handlers, and leaves some methods' messages as bytes.

    Args:
        server: where the handlers go.
        requests: methods whose requests are not decoded.
        replies: methods whose replies are encoded already.
    """

    def __init__(self, server: grpc.Server, *, requests: Collection[str], replies: Collection[str]) -> None:
        self._server, self._requests, self._replies = server, requests, replies

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Made anew below, from the changed handlers."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """Passes the handlers on."""
        raw = {name: self._raw(name, handler) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, raw),))
        self._server.add_registered_method_handlers(service, raw)

    def _raw(self, name: str, handler: Any) -> Any:
        if name in self._requests:
            handler = handler._replace(request_deserializer=None)
        return handler._replace(response_serializer=None) if name in self._replies else handler


# Retries.

Clock = Callable[[], float]
Sleep = Callable[[float], object]


def retrying(
    call: Callable[[], T],
    *,
    what: str,
    address: str,
    for_s: float,
    clock: Clock = time.monotonic,
    sleep: Sleep = time.sleep,
    jitter: Callable[[], float] = random.random,
    on_retry: Callable[[errors.ShoalError], None] | None = None,
) -> T:
    """Repeats `call` while its far end cannot be reached, for up to `for_s` seconds from its first failure.

    Between the calls it waits as `Backoff` say.

    Raises:
        Unreachable: nobody answered in time; the message has the address and the time.
        ShoalError: any other error of `call`, at once.
    """
    failed_at: float | None = None
    pauses = Backoff(jitter)
    while True:
        try:
            return call()
        except (errors.Unreachable, errors.DeadlineExceeded) as error:
            now = clock()
            failed_at = now if failed_at is None else failed_at
            if now - failed_at + pauses.at_most > for_s:
                raise errors.Unreachable(
                    f"{what}: {address} did not answer within {for_s:g} s ({error.message}); "
                    "is it running, and is the address right?",
                    address=address,
                ) from None
            if on_retry:
                on_retry(error)
            sleep(pauses.next())


# Servers.


class RpcServer:
    """A gRPC server with the standard health service and reflection.

    Args:
        bind: host:port to listen on; port 0 takes any free one.
        services: (full name of the service, adder of the generated code, servicer).
        threads: how many calls run at once.
        advertise: host that others reach this one by; by default the one bound, or this machine's name where
            all interfaces are bound.

    Raises:
        PortInUse: the port is taken.
        BadRequest: `bind` is no address.
    """

    def __init__(
        self,
        bind: str,
        services: Sequence[tuple[str, Callable[[Any, grpc.Server], None], Any]],
        *,
        threads: int,
        advertise: str = "",
    ) -> None:
        host, _ = parse_address(bind)
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="rpc")
        self._server = grpc.server(self._executor, options=_SERVER_OPTIONS, maximum_concurrent_rpcs=_MAX_CALLS)
        self._health = health.HealthServicer(experimental_non_blocking=True)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        for _, add, implementation in services:
            add(implementation, self._server)
        self._names = [name for name, _, _ in services]
        reflection.enable_server_reflection([*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        try:
            bound = self._server.add_insecure_port(bind)
        except RuntimeError:
            bound = 0
        if not bound:
            raise _port_in_use(bind, "grpc could not bind it")
        self.address = f"{public_host(host, advertise)}:{bound}"
        self.set_ready(False)

    def start(self) -> None:
        """Begins to answer; health says NOT_SERVING until `set_ready(True)`."""
        self._server.start()

    def set_ready(self, ready: bool) -> None:
        """What the health service says, of the process and of each service."""
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ["", *self._names]:
            self._health.set(name, status)

    def stop(self, grace_s: float = 1.0) -> None:
        """Refuses new calls, waits up to `grace_s` seconds for those running, and frees the port and threads."""
        self.set_ready(False)
        self._server.stop(grace_s).wait()
        self._executor.shutdown(wait=True)
