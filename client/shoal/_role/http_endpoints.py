"""HTTP endpoints of every role: /metrics for Prometheus and /healthz for probes.

The port is open from the start. The app (`shoal._role.http_app`) is imported at the first connection, so that it does
not delay the start of a role. The number and duration of connections are limited.
"""

import select
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import prometheus_client
import structlog

from shoal import _rpc, errors
from shoal._limits import catalogue
from shoal._security import Authorizer

MAX_CONNECTIONS = catalogue.HTTP_CONNECTIONS.default
MAX_HOST_CONNECTIONS = catalogue.HOST_HTTP_CONNECTIONS.default
if TYPE_CHECKING:
    from shoal._security.tls import TlsFiles

# Seconds that a connection may last, the same as Prometheus's default timeout of a scrape.
CONNECTION_S = 10.0
# The name of a scrape in the table of permissions.
METRICS_CALL = "http/metrics"
_log = structlog.get_logger(__name__)


class RoleHttpServer:
    """Serves a role's HTTP endpoints from construction until `stop`.

    Args:
        listen: host:port. Port 0 takes any free port.
        registry: the metrics to serve.
        advertise: host by which others reach this machine if `listen` is at all interfaces. Empty means its name.
        tls: TLS settings. None means no TLS.

    Attributes:
        address: host:port at which others reach the endpoints.
        not_ready: the reason why the role does not serve, for /healthz. Empty if it serves. The thread that starts and
            stops the role writes it, and request threads read it.
        authorizer: decides who may read the metrics; it is replaced by that of the role when it has started.

    Raises:
        BadRequest: `listen` is not an address.
        PortInUse: the port is taken.
    """

    def __init__(
        self,
        listen: str,
        registry: prometheus_client.CollectorRegistry,
        *,
        advertise: str = "",
        tls: "TlsFiles | None" = None,
    ) -> None:
        host, port = _rpc.parse_address(listen)
        try:
            listening = _rpc.listen(host, port, "--metrics-listen")
        except errors.PortInUse as error:
            raise errors.PortInUse(f"cannot serve metrics: {error.message}", **error.details) from None
        self.not_ready, self.authorizer = "starting", Authorizer()
        public = _rpc.public_host(host, advertise if _rpc.is_everywhere(host) else "")
        self.address = f"{public}:{listening.getsockname()[1]}"
        self._registry, self._tls = registry, tls
        self._lock = threading.Lock()  # guards _stopped and _stop_server
        self._stopped = False
        self._stop_server: Callable[[], None] | None = None
        self._wakes, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, args=(listening,), name="http", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Frees the port and closes all connections."""
        with self._lock:
            self._stopped = True
            if self._stop_server:
                self._stop_server()
        self._wake.close()
        self._thread.join()

    def _serve(self, listening: socket.socket) -> None:
        with listening, self._wakes:
            try:
                first = select.poll()
                first.register(listening, select.POLLIN)
                first.register(self._wakes, select.POLLIN)
                first.poll()
                if not self._stopped:
                    self._run(listening)
            except Exception:  # the role continues without its endpoints
                _log.exception("HTTP endpoints failed", address=self.address)

    def _run(self, listening: socket.socket) -> None:
        from shoal._role.http_app import make_server  # noqa: PLC0415 - not before the first connection

        server = make_server(
            listening,
            lambda: self.not_ready,
            lambda token, certificate: self.authorizer.authorize(METRICS_CALL, token, certificate),
            self._registry,
            connections=MAX_CONNECTIONS,
            host_connections=MAX_HOST_CONNECTIONS,
            seconds=CONNECTION_S,
            tls=self._tls,
        )
        with self._lock:
            self._stop_server = server.stop
            if self._stopped:
                return
        server.run()


__all__ = ["RoleHttpServer"]
