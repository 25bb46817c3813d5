"""The pages that every role serves over HTTP: /metrics for Prometheus, /healthz for probes.

A request gets a thread. There are few, and each connection has little time, so that whoever is slow holds up nobody.
"""

import http
import io
import socket
import threading
import time
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import prometheus_client
import structlog

from shoal import _rpc, errors

_MOST_CONNECTIONS = 16
# Of a connection, from its beginning to its end, as of Prometheus's own scrapes.
_SECONDS_A_CONNECTION = 10.0
# How often it is looked whether one has had its time, and whether the role stops, which waits for that.
_LOOK_S = 0.05
_HINT = b"there is /metrics and /healthz here\n"
_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\n\r\n"
_log = structlog.get_logger(__name__)

_Respond = Callable[[str, list[tuple[str, str]]], object]


class RolePages:
    """Serves a role's pages, from now until `stop`.

    Args:
        listen: host:port; port 0 takes any free one.
        registry: whose metrics are served.
        advertise: host that others reach this machine by, where `listen` is at all interfaces; empty: its name.

    Attributes:
        address: host:port that others reach them at.
        not_ready: why the role does not serve, for /healthz; empty: it does. Written by the thread that starts and
            stops the role, read by those of requests.

    Raises:
        BadRequest: `listen` is no address.
        PortInUse: the port is taken.
    """

    def __init__(self, listen: str, registry: prometheus_client.CollectorRegistry, *, advertise: str = "") -> None:
        host, port = _rpc.parse_address(listen)
        try:
            listening = _rpc.listen(host, port)
        except errors.PortInUse as error:
            raise errors.PortInUse(f"cannot serve metrics: {error.message}", **error.details) from None
        self.not_ready = "it starts"
        self._metrics = prometheus_client.make_wsgi_app(registry)
        self._server = _Server(listening, self._answer)
        public = _rpc.public_host(host, advertise if _rpc.is_everywhere(host) else "")
        self.address = f"{public}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_LOOK_S,), name="pages", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Frees the port, and ends the connections there are."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, request: dict[str, Any], respond: _Respond) -> Iterable[bytes]:
        path = request["PATH_INFO"]
        if path == "/metrics":
            return self._metrics(request, respond)  # type: ignore[no-any-return]  # it says nothing of what it gives
        if path == "/healthz":
            reason = self.not_ready
            status = http.HTTPStatus.SERVICE_UNAVAILABLE if reason else http.HTTPStatus.OK
            text = f"{reason or 'ok'}\n".encode()
        else:
            status, text = http.HTTPStatus.NOT_FOUND, _HINT
        headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(text)))]
        respond(f"{status.value} {status.phrase}", [*headers, ("Cache-Control", "no-store")])
        return [] if request["REQUEST_METHOD"] == "HEAD" else [text]


class _Request(WSGIRequestHandler):
    timeout = _SECONDS_A_CONNECTION  # of one read or write; the server's is of all of them

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: probes come every few seconds."""

    def get_stderr(self) -> io.StringIO:  # where wsgiref writes of peers that have gone
        return io.StringIO()


class _Server(ThreadingMixIn, WSGIServer):
    """A thread a connection, up to a bound, and an end to each.

    Args:
        listening: a socket that listens.
        app: what answers.
    """

    daemon_threads = True

    def __init__(self, listening: socket.socket, app: Callable[[dict[str, Any], _Respond], Iterable[bytes]]) -> None:
        host, port = listening.getsockname()[:2]
        super().__init__((host, port), _Request, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        # What the base class does when it binds, without asking a name server who we are.
        self.server_address, self.server_name, self.server_port = (host, port), host, port
        self.setup_environ()
        self.set_app(app)
        self._lock = threading.Lock()  # guards _connections
        self._connections: dict[socket.socket, float] = {}  # those with a thread, and when each began

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            busy = len(self._connections) >= _MOST_CONNECTIONS
            if not busy:
                self._connections[request] = time.monotonic()
        if not busy:
            super().process_request(request, client_address)
            return
        request.setblocking(False)
        request.send(_BUSY)
        super().shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called every so often."""
        self._end(time.monotonic() - _SECONDS_A_CONNECTION)

    def server_close(self) -> None:
        super().server_close()
        self._end(float("inf"))

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the base class's
        _log.debug("a request for a page failed", peer=client_address, exc_info=True)

    def _end(self, before: float) -> None:
        """Ends the connections that began before then; their threads notice."""
        with self._lock:
            for connection, since in self._connections.items():
                if since < before:
                    try:
                        connection.shutdown(socket.SHUT_RDWR)
                    except OSError:  # its peer has gone already
                        continue


__all__ = ["RolePages"]
