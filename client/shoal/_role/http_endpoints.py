"""The pages that every role serves over HTTP: /metrics for Prometheus, /healthz for probes.

The port is open from the start. What answers there, `shoal._role.http_app`, is imported with the first connection, so
that no role starts later for it. Connections are few and short, so that a slow caller holds up nobody.
"""

import select
import socket
import threading
from collections.abc import Callable

import prometheus_client
import structlog

from shoal import _rpc, errors

_MOST_CONNECTIONS = 16
# Of a connection, from its beginning to its end, as of Prometheus's own scrapes.
_SECONDS_A_CONNECTION = 10.0
_log = structlog.get_logger(__name__)


class RoleHttpServer:
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
        public = _rpc.public_host(host, advertise if _rpc.is_everywhere(host) else "")
        self.address = f"{public}:{listening.getsockname()[1]}"
        self._registry = registry
        self._lock = threading.Lock()  # guards _stopped and _stop_server
        self._stopped = False
        self._stop_server: Callable[[], None] | None = None
        self._wakes, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, args=(listening,), name="pages", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Frees the port, and ends the connections there are."""
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
            except Exception:  # the role goes on without its pages
                _log.exception("the pages have failed", address=self.address)

    def _run(self, listening: socket.socket) -> None:
        from shoal._role.http_app import make_server  # noqa: PLC0415 - not before somebody asks

        server = make_server(
            listening,
            lambda: self.not_ready,
            self._registry,
            connections=_MOST_CONNECTIONS,
            seconds=_SECONDS_A_CONNECTION,
        )
        with self._lock:
            self._stop_server = server.stop
            if self._stopped:
                return
        server.run()


__all__ = ["RoleHttpServer"]
