"""gRPC with TLS: channels and servers that use new certificates once their files change."""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc

from shoal._security import AccessRole, role_name

if TYPE_CHECKING:
    from shoal._security.tls import TlsFiles, TlsMaterial

# Seconds between two looks at the files by the calls of one channel.
LOOK_S = 1.0


class TlsChannel(grpc.Channel):
    """A channel whose new calls use the current certificate. Calls in progress keep their connection.

    grpcio's own channel keeps the certificate that it was made with, for all its connections. So this channel opens
    another one when the files have changed, and closes the earlier one when its calls have ended.

    Args:
        target: address of the server, as for `grpc.secure_channel`.
        tls: TLS settings of this process.
        role: access role that the server's certificate must name. The channel checks this name instead of the host.
        options: options of the channel.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        target: str,
        tls: "TlsFiles",
        role: AccessRole,
        options: list[tuple[str, Any]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._target, self._tls, self._clock = target, tls, clock
        self._options = [*options, ("grpc.ssl_target_name_override", role_name(role))]
        self._lock = threading.Lock()  # guards all below, and the counts of calls
        self._current = self._open(tls.current())
        self._looked_at = clock()
        self._earlier: list[_Opened] = []
        self._closed = False

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, lambda channel: channel.unary_unary(method, *args, **kwargs))

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, lambda channel: channel.unary_stream(method, *args, **kwargs))

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, lambda channel: channel.stream_unary(method, *args, **kwargs))

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, lambda channel: channel.stream_stream(method, *args, **kwargs))

    def subscribe(self, callback: Callable[[Any], None], try_to_connect: bool = False) -> None:
        with self._lock:
            self._current.channel.subscribe(callback, try_to_connect=try_to_connect)

    def unsubscribe(self, callback: Callable[[Any], None]) -> None:
        with self._lock:
            self._current.channel.unsubscribe(callback)

    def close(self) -> None:
        """Closes the channel. Calls in progress end with Cancelled."""
        with self._lock:
            self._closed = True
            opened = [self._current, *self._earlier]
            self._earlier = []
        for each in opened:
            each.channel.close()

    def __enter__(self) -> "TlsChannel":
        return self

    def __exit__(self, *_: object) -> bool | None:
        self.close()
        return None

    def borrow(self, make: Callable[[grpc.Channel], Any], method: "_Method") -> "tuple[_Opened, Any]":
        """Returns the current channel and its callable for a method, for one call. `give_back` must follow."""
        with self._lock:
            idle = self._renew()
            opened = self._current
            found = opened.callables.get(method)
            if found is None:
                if self._closed:
                    raise ValueError("Cannot invoke RPC on closed channel!")  # as grpcio says it
                found = opened.callables[method] = make(opened.channel)
            opened.calls += 1
        for each in idle:
            each.channel.close()
        return opened, found

    def give_back(self, opened: "_Opened") -> None:
        """Ends the use of a channel by one call."""
        with self._lock:
            opened.calls -= 1

    def _renew(self) -> "list[_Opened]":
        """Opens another channel if the files have changed. Returns earlier channels without calls, to be closed."""
        if self._closed or self._clock() - self._looked_at < LOOK_S:
            return []
        self._looked_at = self._clock()
        material = self._tls.current()
        if material is not self._current.material:
            self._earlier.append(self._current)
            self._current = self._open(material)
        idle = [each for each in self._earlier if not each.calls]
        self._earlier = [each for each in self._earlier if each.calls]
        return idle

    def _open(self, material: "TlsMaterial") -> "_Opened":
        credentials = grpc.ssl_channel_credentials(material.ca, material.key or None, material.certificate or None)
        return _Opened(grpc.secure_channel(self._target, credentials, self._options), material)


class _Opened:
    """A channel with one certificate."""

    def __init__(self, channel: grpc.Channel, material: "TlsMaterial") -> None:
        self.channel, self.material = channel, material
        self.callables: dict[_Method, Any] = {}
        self.calls = 0


class _Method:
    """A method of a channel's stub: each call uses the current channel."""

    def __init__(self, channel: TlsChannel, make: Callable[[grpc.Channel], Any]) -> None:
        self._channel, self._make = channel, make

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        opened, method = self._channel.borrow(self._make, self)
        try:
            call = method(*args, **kwargs)
        except BaseException:
            self._channel.give_back(opened)
            raise
        return self._counted(opened, call)

    def future(self, *args: Any, **kwargs: Any) -> Any:
        """Starts a unary call; returns its future."""
        opened, method = self._channel.borrow(self._make, self)
        try:
            call = method.future(*args, **kwargs)
        except BaseException:
            self._channel.give_back(opened)
            raise
        return self._counted(opened, call)

    def _counted(self, opened: _Opened, call: Any) -> Any:
        """Counts a call as in progress until its end."""
        if not isinstance(call, grpc.RpcContext) or not call.add_callback(lambda: self._channel.give_back(opened)):
            self._channel.give_back(opened)  # it is over: this is its reply
        return call


def server_credentials(tls: "TlsFiles") -> grpc.ServerCredentials:
    """Returns credentials of a server, which reads the files again before a connection if they have changed."""
    known = tls.current()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal known
        material = tls.current()
        if material is known:
            return None
        known = material
        return _configuration(material)

    # A fetcher may return None: the certificate is the same. The types of grpcio do not say so.
    fetcher: Any = fetch
    return grpc.dynamic_ssl_server_credentials(
        _configuration(known), fetcher, require_client_authentication=tls.client_certificates
    )


def _configuration(material: "TlsMaterial") -> grpc.ServerCertificateConfiguration:
    pair = (material.key, material.certificate)
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=material.ca)


__all__ = ["TlsChannel", "server_credentials"]
