"""gRPC channels, servers, retries and errors. Only this module and the servicers use grpc types."""

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
    # Reconnect fast: a restarted server is ready within a second, and `retrying` has its own backoff between calls.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Pushes are repeated with their stamps. gRPC's own retry buffer (256 KiB) is too small for a push.
    ("grpc.enable_retries", 0),
]
_SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.max_frame_size", 1 << 20),
    # Keepalive detects a client whose host is gone in the middle of a push, and frees its thread.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Without this, two servers on one port would share its connections. Raise PortInUse instead.
    ("grpc.so_reuseport", 0),
]

# The most calls of a server at a time: running, waiting and queued. grpc refuses more.
_MAX_CALLS = 32_768
# Limits of an error's text in bytes. grpc limits trailing metadata, and larger metadata would hide the error.
_MAX_MESSAGE, _MAX_DETAIL = 4_000, 500

# Statuses that grpc itself creates, without our error detail.
_STATUS_TO_ERROR: dict[grpc.StatusCode, type[errors.ShoalError]] = {
    grpc.StatusCode.UNAVAILABLE: errors.Unreachable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    # From a server that stops during a call. A client that cancels its own call ignores the error.
    grpc.StatusCode.CANCELLED: errors.Unreachable,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.MessageTooLarge,
    grpc.StatusCode.INVALID_ARGUMENT: errors.BadRequest,
}


def parse_address(text: str) -> tuple[str, int]:
    """Parses `host:port`.

    Raises:
        BadRequest: the text is not an address.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise errors.BadRequest(f"{text!r} is not an address; give host:port, such as 127.0.0.1:7070", address=text)
    return host, int(port)


def is_everywhere(host: str) -> bool:
    """Returns whether a host stands for all interfaces."""
    return host in {"0.0.0.0", "[::]", ""}  # noqa: S104 - only compared


def public_host(bound: str, advertise: str) -> str:
    """Returns the host for other machines: `advertise`, else `bound`, or this machine's name for all interfaces."""
    return advertise or (socket.gethostname() if is_everywhere(bound) else bound)


def listen(host: str, port: int) -> socket.socket:
    """Opens a listening socket. Port 0 takes any free port.

    Raises:
        PortInUse: the port is in use, or the address is not one of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), port), family=family, backlog=128)
    except OSError as error:
        raise _port_in_use(f"{host}:{port}", error) from None


def channel(address: str) -> grpc.Channel:
    """Returns a channel to `host:port`, which connects at the first call.

    Create its stubs before it can be closed: grpcio 1.85 crashes the process if a stub is created on a closed channel.
    """
    return grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)


def _port_in_use(address: str, why: object) -> errors.PortInUse:
    return errors.PortInUse(
        f"cannot listen on {address}: the port is in use or the address is not this machine's ({why}); "
        "choose another port, or 0 for any free one",
        address=address,
    )


# Conversion of errors.


def error_metadata(error: errors.ShoalError) -> tuple[tuple[str, bytes], ...]:
    """Returns the trailing metadata with an error's code and details."""
    return ((_DETAIL_KEY, detail_of(error).SerializeToString()),)


def detail_of(error: errors.ShoalError) -> header_pb2.ErrorDetail:
    """Returns the message that carries an error."""
    return header_pb2.ErrorDetail(
        code=error.code,
        message=_shortened(error.message, _MAX_MESSAGE),
        details={key: _shortened(value, _MAX_DETAIL) for key, value in error.details.items()},
    )


def error_of(detail: header_pb2.ErrorDetail) -> errors.ShoalError:
    """Returns the error in a message, or InternalError for an unknown code."""
    kind = errors.ShoalError.catalogue.get(detail.code, errors.InternalError)
    return kind(detail.message, **dict(detail.details))


def _shortened(text: str, most: int) -> str:
    """Returns the beginning and the end of a text, because a traceback ends with the error."""
    encoded = text.encode()
    if len(encoded) <= most:
        return text
    beginning, end = encoded[: most // 4], encoded[-(most - most // 4) :]
    return f"{beginning.decode(errors='ignore')} [...] {end.decode(errors='ignore')}"


def status_of(error: errors.ShoalError) -> grpc.StatusCode:
    """Returns the gRPC status of a domain error."""
    return grpc.StatusCode[error.status]


def error_from(failure: grpc.RpcError, address: str) -> errors.ShoalError:
    """Returns the domain error of a failed call to `address`."""
    call: Any = failure  # every RpcError of a stub is also a grpc.Call
    for key, value in call.trailing_metadata() or ():
        if key == _DETAIL_KEY:
            return error_of(header_pb2.ErrorDetail.FromString(value))
    code, text = call.code(), call.details() or "no detail given"
    kind = _STATUS_TO_ERROR.get(code, errors.InternalError)
    return kind(f"call to {address} failed with {code.name}: {text}", address=address)


@contextmanager
def as_shoal_errors(address: str) -> Iterator[None]:
    """Converts gRPC errors of the block to `ShoalError`. A channel closed by this process gives Cancelled."""
    try:
        yield
    except grpc.RpcError as failure:
        raise error_from(failure, address) from None
    except ValueError as failure:
        if "closed" not in str(failure):  # grpc has no error class for calls on a closed channel
            raise
        raise errors.Cancelled(f"the connection to {address} was closed on this side", address=address) from None


def servicer(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a unary or client-streaming handler, so that a `ShoalError` becomes the status of the call."""

    @functools.wraps(method)
    def handler(self: Any, request: Any, context: grpc.ServicerContext) -> Any:
        failure: errors.ShoalError
        try:
            with _tracing.server_rpc_span(method.__name__, context):
                return method(self, request, context)
        except errors.ShoalError as error:
            failure = error
        except grpc.RpcError:  # from the request stream: the caller is gone
            raise
        except Exception as error:
            _log.exception("handler failed", rpc=method.__name__)
            failure = errors.InternalError(f"{method.__name__} failed: {type(error).__name__}: {error}")
        refuse(context, failure)
        return context.abort(status_of(failure), _shortened(failure.message, _MAX_DETAIL))  # raises

    return handler


def refuse(context: grpc.ServicerContext, error: errors.ShoalError) -> None:
    """Sets an error on a call. The handler must then abort the call or end its stream."""
    context.set_code(status_of(error))
    context.set_details(_shortened(error.message, _MAX_DETAIL))
    context.set_trailing_metadata(error_metadata(error))


class Pooled:
    """A handler that runs on its own threads, so that other calls never wait for it.

    It uses grpcio's `experimental_thread_pool`.

    Args:
        handler: the handler.
        pool: its threads.
    """

    def __init__(self, handler: Callable[..., Any], pool: ThreadPoolExecutor) -> None:
        self._handler = handler
        self.experimental_thread_pool = pool

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
    """Repeats a call while its target does not answer, with `Backoff` between the attempts.

    Args:
        call: the call. Unreachable and DeadlineExceeded are repeated.
        what: the target, for the message, as is `address`.
        address: host:port of the target.
        for_s: seconds from the first failure during which the call is repeated.
        clock: a monotonic clock, in seconds.
        sleep: waits for some seconds.
        jitter: returns a random number in [0, 1) for each pause.
        on_retry: called with the error before each repetition.

    Returns:
        The result of the call.

    Raises:
        Unreachable: the target did not answer in time. The message has the address and the time.
        ShoalError: any other error of `call`, without a repetition.
    """
    failed_at: float | None = None
    backoff = Backoff(jitter)
    while True:
        try:
            return call()
        except (errors.Unreachable, errors.DeadlineExceeded) as error:
            now = clock()
            failed_at = now if failed_at is None else failed_at
            if now - failed_at + backoff.at_most > for_s:
                raise errors.Unreachable(
                    f"{what}: {address} did not answer within {for_s:g} s ({error.message}); "
                    "check that it is running and that the address is right",
                    address=address,
                ) from None
            if on_retry:
                on_retry(error)
            sleep(backoff.next())


# Servers.


class RpcServer:
    """A gRPC server with the standard health service and reflection.

    Args:
        bind: host:port to listen on. Port 0 takes any free port.
        services: full name, function of the generated code that adds it, and servicer of each service.
        threads: largest number of calls that run at a time.
        advertise: host by which others reach this one. Default: as `public_host` chooses.

    Raises:
        PortInUse: the port is in use.
        BadRequest: `bind` is not an address.
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
        """Starts to serve. The health service reports NOT_SERVING until `set_ready(True)`."""
        self._server.start()

    def set_ready(self, ready: bool) -> None:
        """Sets the status that the health service reports for the process and each service."""
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ["", *self._names]:
            self._health.set(name, status)

    def stop(self, grace_s: float = 1.0) -> None:
        """Refuses new calls, waits up to `grace_s` seconds for running ones, and frees the port and the threads."""
        self.set_ready(False)
        self._server.stop(grace_s).wait()
        self._executor.shutdown(wait=True)
