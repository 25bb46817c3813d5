"""gRPC channels, addresses, errors on the wire, and retries."""

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc

from shoal import errors
from shoal._limits import catalogue
from shoal._rpc.backoff import Backoff
from shoal._rpc.tls_channel import TlsChannel
from shoal._security import NO_CREDENTIALS, AccessRole, Credentials
from shoal._system import ENTROPY
from shoal._wire import without_middle
from shoal._wire.limits import MAX_MESSAGE_BYTES
from shoal.v1 import header_pb2

T = TypeVar("T")

_DETAIL_KEY = "shoal-error-bin"

# The detail of an error that grpc itself created: the name of its status, such as UNIMPLEMENTED.
GRPC_STATUS = "grpc_status"
# Words of grpc's text when the answer of a port is not HTTP/2.
_NOT_HTTP2 = "Failed parsing HTTP/2"

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
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Despite its name, this is no pause, but the longest time that one attempt to connect may take: several round
    # trips. An attempt that fails sooner, such as at a restarting server, is repeated after the backoff.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    # Pushes are repeated with their stamps. gRPC's own retry buffer (256 KiB) is too small for a push.
    ("grpc.enable_retries", 0),
]

# For connections that carry no values, at both ends. By default, gRPC sends a ping with almost each message, to learn
# how much a connection carries. That took a fifth of the processor time of a heartbeat. The window is fixed instead, so
# that a placement of many variables takes few round trips.
CONTROL_OPTIONS: list[tuple[str, Any]] = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 18)]

# Longest wait for a channel to close; it takes milliseconds.
_CLOSE_S = 5.0
# Limits of an error's text in bytes. grpc limits trailing metadata, and larger metadata would hide the error.
_MAX_MESSAGE, _MAX_DETAIL = 4_000, 500

# Statuses that grpc itself creates, without our error detail.
_STATUS_TO_ERROR: dict[grpc.StatusCode, type[errors.ShoalError]] = {
    grpc.StatusCode.UNAVAILABLE: errors.Unreachable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    # From a server that stops during a call, or has more than PENDING_CALLS (grpc calls this, too, a cancellation). A
    # client that cancels its own call ignores the error.
    grpc.StatusCode.CANCELLED: errors.Unreachable,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.MessageTooLarge,
    grpc.StatusCode.INVALID_ARGUMENT: errors.BadRequest,
}

# Limits that grpc itself enforces, by words of its text.
_GRPC_LIMITS = {
    "message larger than max": catalogue.MAX_MESSAGE_BYTES,
    "metadata size exceeds": catalogue.HEADER_BYTES,
    "Too many pending requests": catalogue.PENDING_CALLS,
}


def parse_address(text: object, what: str = "an address") -> tuple[str, int]:
    """Parses `host:port`.

    Args:
        text: the address.
        what: what it should be, for the message.

    Raises:
        BadRequest: it is not an address.
    """
    plain = text if isinstance(text, str) else ""
    host, _, port = plain.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or int(port) > 65_535:
        scheme, found, rest = plain.partition("://")
        give = f"leave out {scheme}:// and give" if found and scheme and rest else "give"
        raise errors.BadRequest(f"{text!r} is not {what}; {give} host:port, such as 127.0.0.1:7070", address=text)
    return host, int(port)


def is_everywhere(host: str) -> bool:
    """Returns whether a host stands for all interfaces."""
    return host in {"0.0.0.0", "[::]", ""}  # noqa: S104 - only compared


def public_host(bound: str, advertise: str) -> str:
    """Returns the host for other machines: `advertise`, else `bound`, or this machine's name for all interfaces."""
    return advertise or (socket.gethostname() if is_everywhere(bound) else bound)


def listen(host: str, port: int, option: str = "") -> socket.socket:
    """Opens a listening socket. Port 0 takes any free port.

    Args:
        host: host to listen on.
        port: port to listen on.
        option: the option that sets the port, for the message of an error.

    Raises:
        PortInUse: the port is in use, or the address is not one of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), port), family=family, backlog=128)
    except OSError as error:
        raise port_in_use(f"{host}:{port}", error, option) from None


def check_free(address: str, option: str = "") -> None:
    """Checks that a process could listen at an address now. A port that is only reserved counts as free.

    gRPC writes lines of its own to standard error when it cannot listen, so its servers call this first.

    Args:
        address: host:port.
        option: the option that sets the address, for the message of an error.

    Raises:
        PortInUse: the port is in use, or the address is not one of this machine.
        BadRequest: `address` is not an address.
    """
    host, port = parse_address(address)
    try:
        reserve(host, port).close()
    except OSError as error:
        # gRPC knows more than this about names, and about machines without IPv6.
        known = {errno.EADDRINUSE} if is_everywhere(host) else {errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES}
        if error.errno in known:
            raise port_in_use(address, error, option) from None


def reserve(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to a port, but does not listen. Port 0 takes any free port.

    While the socket is open, Linux chooses this port neither for a process that asks for any free port, nor for an
    outgoing connection. A process that names the port can listen there, and again after a restart.

    Raises:
        OSError: the port is in use, or the address is not one of this machine.
    """
    holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host.strip("[]"), port))
    except OSError:
        holder.close()
        raise
    return holder


def channel(
    address: str, credentials: Credentials = NO_CREDENTIALS, role: AccessRole = AccessRole.SERVER
) -> grpc.Channel:
    """Returns a channel, which connects at the first call.

    With TLS, its calls use new certificates once the files have changed.

    Create its stubs before it can be closed: grpcio 1.85 crashes the process if a stub is created on a closed channel.

    Args:
        address: host:port of the other process.
        credentials: what this process presents.
        role: access role of the other process. With TLS, its certificate must name this role.
    """
    # With the scheme, gRPC reads the rest as host:port. Without it, unix:80 would be a socket in the file system.
    target = f"dns:///{address}"
    options = _CHANNEL_OPTIONS + (CONTROL_OPTIONS if role is AccessRole.COORDINATOR else [])
    if credentials.tls:
        return TlsChannel(target, credentials.tls, role, options)
    return grpc.insecure_channel(target, options=options)


def close_channel(channel: grpc.Channel, within_s: float = _CLOSE_S) -> None:
    """Closes a channel. Calls in progress end with Cancelled.

    grpc waits for the end of these calls. If Ctrl-C interrupts the thread that receives this end, grpc never learns of
    it and waits forever. This function then returns nevertheless.

    Args:
        channel: the channel.
        within_s: the longest wait, in seconds.
    """
    closing = threading.Thread(target=channel.close, name="channel-close", daemon=True)
    closing.start()
    closing.join(within_s)


def port_in_use(address: str, error: OSError | None, option: str = "") -> errors.PortInUse:
    """Returns the error of a process that cannot listen at an address. None means an unknown reason."""
    by = f" with {option}" if option else ""
    match error.errno if error else 0:
        case errno.EADDRINUSE:
            why = f"another process uses the port; choose another port{by}, or 0 for any free one"
        case errno.EADDRNOTAVAIL:
            why = f"this machine does not have this address; choose one of its own{by}, or 0.0.0.0 for all"
        case _:
            reason = (error and error.strerror) or "the reason is unknown"
            why = f"{reason}; choose another port{by}, or 0 for any free one"
    return errors.PortInUse(f"cannot listen on {address}: {why}", address=address)


# Conversion of errors.


def error_metadata(error: errors.ShoalError) -> tuple[tuple[str, bytes], ...]:
    """Returns the trailing metadata with an error's code and details."""
    return ((_DETAIL_KEY, detail_of(error).SerializeToString()),)


def detail_of(error: errors.ShoalError) -> header_pb2.ErrorDetail:
    """Returns the message that carries an error."""
    return header_pb2.ErrorDetail(
        code=error.code,
        message=without_middle(error.message, _MAX_MESSAGE),
        details={key: without_middle(value, _MAX_DETAIL) for key, value in error.details.items()},
    )


def error_of(detail: header_pb2.ErrorDetail) -> errors.ShoalError:
    """Returns the error in a message, or InternalError for an unknown code."""
    kind = errors.ShoalError.catalogue.get(detail.code, errors.InternalError)
    return kind(detail.message, **dict(detail.details))


def status_text(error: errors.ShoalError) -> str:
    """Returns the text of a call's status, which is shorter than the error's own message in the metadata."""
    return without_middle(error.message, _MAX_DETAIL)


def status_of(error: errors.ShoalError) -> grpc.StatusCode:
    """Returns the gRPC status of a domain error."""
    return grpc.StatusCode[error.status]


def error_from(failure: grpc.RpcError, address: str) -> errors.ShoalError:
    """Returns the domain error of a failed call to `address`."""
    call: Any = failure  # every RpcError of a stub is also a grpc.Call
    for key, value in call.trailing_metadata() or ():
        if key == _DETAIL_KEY:
            return error_of(header_pb2.ErrorDetail.FromString(value))
    code, text = call.code(), _plain(call.details() or "no detail given")
    problem = f"call to {address} failed with {code.name}: {text}"
    for words, limit in _GRPC_LIMITS.items():
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and words in text:
            return limit.refusal(problem, address=address)
    return _STATUS_TO_ERROR.get(code, errors.InternalError)(problem, address=address, **{GRPC_STATUS: code.name})


def _plain(details: str) -> str:
    """Returns the reason why a connection failed, such as "Connection refused", without gRPC's words around it."""
    if _NOT_HTTP2 in details:
        return (
            "what listens there does not speak gRPC; it looks like an HTTP port, such as the port of the page or of "
            "metrics"
        )
    for words in ("last error: ", "errors resolving "):
        _, found, reason = details.partition(words)
        if found:
            return reason.rpartition(": ")[2].rstrip("]")
    return details


@contextmanager
def as_shoal_errors(address: str) -> Iterator[None]:
    """Converts gRPC errors of the block to `ShoalError`. A channel closed by this process gives Cancelled."""
    try:
        yield
    except grpc.RpcError as failure:
        raise error_from(failure, address) from None
    except grpc.FutureCancelledError:  # raised by the future of a call instead of an RpcError
        raise errors.Unreachable(f"the call to {address} was cancelled", address=address) from None
    except ValueError as failure:
        if "closed" not in str(failure):  # grpc has no error class for calls on a closed channel
            raise
        raise errors.Cancelled(f"the connection to {address} was closed on this side", address=address) from None


# Retries.

# Seconds without an answer after which a caller that waits is told. It is longer than a restart of a coordinator takes.
TOLD_AFTER_S = 1.0

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
    jitter: Callable[[], float] = ENTROPY.random,
    on_retry: Callable[[errors.ShoalError], None] | None = None,
    on_silence: Callable[[str], object] | None = None,
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
        on_silence: called once with a sentence for people, before the target has been silent for `TOLD_AFTER_S` seconds
            or when the first attempt ends later than that; and once more when the target answers again.

    Returns:
        The result of the call.

    Raises:
        Unreachable: the target did not answer in time. The message has the address and the time.
        ShoalError: any other error of `call`, without a repetition.
    """
    began_at, failed_at, told = clock(), None, False
    backoff = Backoff(jitter)
    while True:
        try:
            result = call()
        except (errors.Unreachable, errors.DeadlineExceeded) as error:
            now = clock()
            failed_at = now if failed_at is None else failed_at
            if now - failed_at + backoff.at_most > for_s:
                within = f" within {for_s:g} s" if for_s else ""
                raise errors.Unreachable(
                    f"{what} at {address} did not answer{within} ({error.message}); "
                    "check that it is running and that the address is right",
                    address=address,
                ) from None
            if on_retry:
                on_retry(error)
            if on_silence and not told and now - began_at + backoff.at_most > TOLD_AFTER_S:
                on_silence(f"{what} at {address} does not answer ({error.message}); trying again for up to {for_s:g} s")
                told = True
            sleep(backoff.next())
        else:
            if on_silence and told:
                on_silence(f"{what} at {address} answers again")
            return result
