"""Web server of a role: uvicorn with limits on connections.

It serves the coordinator's page and the HTTP endpoints of all roles; the apps are in other modules. Its import of
uvicorn takes about 130 ms, so roles import this module at the first connection.
"""

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

import uvicorn
from starlette.requests import Request
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from shoal import errors
from shoal._limits import Limit, catalogue, count_refusal

if TYPE_CHECKING:
    from shoal._security.tls import TlsFiles

T = TypeVar("T")

# Seconds for a TLS handshake, and for a client to answer the end of its connection.
_TLS_S = 5.0
# Seconds for responses in progress when the server stops.
_GRACE_S = 2
# The name of a client's certificate in the state of its requests.
_CERTIFICATE = "client_certificate"


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of connections.

    Attributes:
        limit: entry of `connections` in the table of limits.
        connections: largest number of connections at a time.
        idle_timeout_s: seconds that a connection may be open without a complete request, at first and after each
            response.
        longest_s: seconds after which a connection is closed in any case. None means no limit.
        refusal: bytes that a connection above a limit gets without TLS. Empty means that it is reset. With TLS it is
            reset in any case, before the handshake.
        host_limit: entry of `host_connections` in the table of limits. None means that there is no such limit.
        host_connections: largest number of connections of one host at a time.
        replaces: whether a connection above a limit replaces an earlier one, instead of being refused. So a short
            request, such as a probe, is always answered. Not for servers whose connections may last.
    """

    limit: Limit
    connections: int
    idle_timeout_s: float
    longest_s: float | None = None
    refusal: bytes = b""
    host_limit: Limit | None = None
    host_connections: int = 0
    replaces: bool = False

    def refused(self, host: str, of_host: int, of_all: int) -> errors.ShoalError | None:
        """Returns why a connection is refused; None if it is not.

        Args:
            host: where it comes from.
            of_host: connections of that host, with this one.
            of_all: connections of all hosts, with this one.
        """
        if of_all > self.connections:
            return self.limit.refusal(f"{of_all} connections are open", "try again later", limit=self.connections)
        if self.host_limit and of_host > self.host_connections:
            problem = f"{host} has {of_host} connections"
            return self.host_limit.refusal(problem, "try again later", limit=self.host_connections)
        return None


class WebServer:
    """Serves an app until it is stopped.

    Args:
        listening: a listening socket, which the server closes.
        make_app: returns the app. It is called in the event loop's thread with an event that is set when streams must
            end.
        limits: the limits of connections.
        tls: TLS settings. None means plain HTTP. Clients need no certificate.
        client_certificates: whether a client may show a certificate, which `certificate_of` returns. The page does not
            ask for one, because browsers would then ask their users to choose one.
    """

    def __init__(
        self,
        listening: socket.socket,
        make_app: Callable[[asyncio.Event], ASGIApp],
        limits: ConnectionLimits,
        tls: "TlsFiles | None" = None,
        *,
        client_certificates: bool = False,
    ) -> None:
        self._tls, self._client_certificates = tls, client_certificates
        self._listening, self._make_app, self._limits = listening, make_app, limits
        self._lock = threading.Lock()  # guards _loop and _stopped
        self._loop: asyncio.AbstractEventLoop | None = None  # while `run` serves
        self._stopped = False

    def run(self) -> None:
        """Serves in this thread until `stop`."""
        try:
            asyncio.run(self._main())
        finally:
            self._listening.close()

    def stop(self) -> None:
        """Ends all streams and connections and makes `run` return. Any thread may call it, also before `run`."""
        with self._lock:
            self._stopped = True
            if self._loop:
                self._loop.call_soon_threadsafe(self._end)

    async def _main(self) -> None:
        stopping = self._stopping = asyncio.Event()
        connection_limits = self._limits
        context = _reloading_context(self._tls, self._client_certificates) if self._tls else None

        class LimitedConnection(_Connection):
            limits = connection_limits
            tls = context
            of_host: ClassVar[dict[str, dict[_Connection, None]]] = {}

        config = uvicorn.Config(
            self._make_app(stopping),
            http=LimitedConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_GRACE_S,
            h11_max_incomplete_event_size=catalogue.HTTP_HEADER_BYTES.default,
        )
        config.load()
        self._server = uvicorn.Server(config)
        with self._lock:
            if self._stopped:
                return
            self._loop = asyncio.get_running_loop()
        try:
            await self._server.serve(sockets=[self._listening])
        finally:
            with self._lock:
                self._loop = None

    def _end(self) -> None:
        self._stopping.set()
        self._server.should_exit = True


def _reloading_context(tls: "TlsFiles", client_certificates: bool) -> ssl.SSLContext:
    """Returns a context with which each handshake uses the current certificate and the current CAs."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if client_certificates:
        # OpenSSL takes this mode from here, and the CAs from the context that the callback sets.
        context.verify_mode = ssl.CERT_OPTIONAL
        # A session that is resumed would not check the certificate again.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0

    def use_current(handshake: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        current = tls.current().web
        assert current, "a web server has a certificate"
        handshake.context = current

    context.sni_callback = use_current  # OpenSSL calls it in each handshake, also without a name
    return context


class _Connection(H11Protocol):
    """A connection that keeps to the limits.

    It counts from the moment that it is accepted, so that a client that does not finish the TLS handshake counts, too.
    asyncio's own TLS servers tell their protocols of a connection only after the handshake. So uvicorn serves without
    TLS, and this class adds it.
    """

    limits: ConnectionLimits
    tls: ssl.SSLContext | None
    of_host: ClassVar[dict[str, dict["_Connection", None]]]  # open connections of the server, oldest first
    _host = ""
    _idle_timer: asyncio.TimerHandle | None = None
    _end_timer: asyncio.TimerHandle | None = None
    _handshake: asyncio.Task[None] | None = None
    _early: bytes | None = None  # during the handshake, what has arrived with its end

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._host = str((transport.get_extra_info("peername") or [""])[0])
        mine = self.of_host.setdefault(self._host, {})
        mine[self] = None
        refused = self.limits.refused(self._host, len(mine), len(self.connections))
        replaced = self._to_replace(mine) if refused and self.limits.replaces else None
        if replaced:
            replaced.transport.abort()
        if refused is None or replaced:
            if self.limits.longest_s is not None:
                self._end_timer = self.loop.call_later(self.limits.longest_s, transport.abort)
            self._restart_idle_timer()
            if self.tls:
                self._early = b""
                transport.pause_reading()
                self._handshake = self.loop.create_task(self._secure(transport, self.tls))
        if refused is None:
            return
        count_refusal(refused)
        if replaced:
            return
        if self.limits.refusal and not self.tls:
            transport.write(self.limits.refusal)
            transport.close()
        else:
            transport.abort()

    def _to_replace(self, mine: dict["_Connection", None]) -> "_Connection | None":
        """Returns the connection that this one replaces: the oldest of a host, without a request if there is one.

        The host is that of this connection if it has reached its own limit, or else the one with most connections.
        """
        if len(mine) <= self.limits.host_connections:
            mine = max(self.of_host.values(), key=len)
        others = [each for each in mine if each is not self and not each.transport.is_closing()]
        return next((each for each in others if each.is_idle), next(iter(others), None))

    async def _secure(self, plain: asyncio.Transport, context: ssl.SSLContext) -> None:
        """Performs the TLS handshake."""
        lost: Exception | None = None
        transport: asyncio.Transport | None = None
        try:
            if not plain.is_closing():
                transport = await self.loop.start_tls(
                    plain, self, context, server_side=True, ssl_handshake_timeout=_TLS_S, ssl_shutdown_timeout=_TLS_S
                )
        except Exception as error:  # of the connection, or of TLS
            lost = error
        early, self._early = self._early, None
        if transport is None:  # asyncio does not call this after a failed handshake
            self.connection_lost(lost)
            return
        certificate = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        self.app_state = {**self.app_state, _CERTIFICATE: certificate}
        if self in self.connections:
            super().connection_made(transport)
            if early:
                self.data_received(early)

    def data_received(self, data: bytes) -> None:
        if self._early is None:
            super().data_received(data)
        else:
            self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        if self not in self.connections:  # it is called for the second time
            return
        for timer in (self._idle_timer, self._end_timer):
            if timer:
                timer.cancel()
        mine = self.of_host[self._host]
        del mine[self]
        if not mine:
            del self.of_host[self._host]
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._restart_idle_timer()

    def _restart_idle_timer(self) -> None:
        """Restarts the idle timer. Single bytes of a request do not restart it."""
        if self._idle_timer:
            self._idle_timer.cancel()
        self._idle_timer = self.loop.call_later(self.limits.idle_timeout_s, self._close_if_idle)

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return bool(getattr(self.cycle, "response_complete", True))  # there is no cycle before the first request

    def _close_if_idle(self) -> None:
        if self.is_idle:
            self.transport.close()


def certificate_of(request: Request) -> bytes:
    """Returns the certificate of the client as PEM. It is empty if the client has shown none."""
    shown: bytes | None = getattr(request.state, _CERTIFICATE, None)
    return ssl.DER_cert_to_PEM_cert(shown).encode() if shown else b""


def in_thread(function: Callable[[], T], name: str) -> Future[T]:
    """Runs a function in a daemon thread.

    Returns:
        A future of the result. It cannot be cancelled.

    Raises:
        RuntimeError: the system cannot start a thread.
    """
    result = Future[T]()
    result.set_running_or_notify_cancel()

    def perform() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # the future passes it to the caller
            result.set_exception(error)

    threading.Thread(target=perform, name=name, daemon=True).start()
    return result


__all__ = ["ConnectionLimits", "WebServer", "certificate_of", "in_thread"]
