"""The page's web server: a port, and the thread that serves it."""

import ipaddress
import re
import threading
from collections.abc import Iterable
from importlib.metadata import version
from typing import TYPE_CHECKING

import structlog

from shoal import _rpc, errors
from shoal._checkpoint import CheckpointStorage
from shoal._limits import catalogue
from shoal._role.web_server import ConnectionLimits, WebServer
from shoal_coordinator.coordinator import Coordinator
from shoal_coordinator.groups import GroupRegistry
from shoal_coordinator.logins import Logins
from shoal_coordinator.page.app import make_app
from shoal_coordinator.page.guard import RequestRules
from shoal_coordinator.page.login import PageLogin
from shoal_coordinator.page.reader import Reader

if TYPE_CHECKING:
    from shoal._security.tls import TlsFiles

_log = structlog.get_logger(__name__)

# Connections of all hosts, and of one. An open page needs several.
CONNECTIONS, HOST_CONNECTIONS = catalogue.PAGE_CONNECTIONS.default, catalogue.HOST_PAGE_CONNECTIONS.default
# Seconds that a connection may stay open without a request, at its start or after a response.
PATIENCE_S = 10.0
# A host name, or a numeric address.
_NAME = re.compile(r"[^\s/:@?#\[\]]+(?<!\.)|\[[0-9a-f:.]+\]")
# The wildcard addresses, each with an address for the page's URL.
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - compared, not bound


class PageServer:
    """The server of the page. It serves from its creation until `stop`.

    Args:
        coordinator: The shell.
        listen: host:port. Port 0 takes any free port.
        hosts: Further names of the page, beside those of loopback and the host of `listen`.
        storage: The checkpoint storage. None means that the cluster has none.
        read_only: Whether the page refuses all actions.
        heartbeat_timeout_s: Seconds without a heartbeat after which a member is dead.
        max_watchers: The limit of concurrent streams.
        tls: TLS settings. None means plain HTTP.
        logins: The logins of people. None means that the cluster asks for no tokens.
        on_outcome: Called with each login and each action.
        groups: The elastic groups.

    Raises:
        PortInUse: Another process listens on the port.
        BadRequest: `listen` is not an address, or one of `hosts` is not a name.

    Attributes:
        url: The URL of the page.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        listen: str,
        *,
        hosts: Iterable[str] = (),
        storage: CheckpointStorage | None = None,
        read_only: bool = False,
        heartbeat_timeout_s: float = 5.0,
        max_watchers: int = catalogue.PAGE_STREAMS.default,
        tls: "TlsFiles | None" = None,
        logins: Logins | None = None,
        on_outcome: _rpc.OnOutcome = lambda _: None,
        groups: GroupRegistry | None = None,
    ) -> None:
        host, port = _rpc.parse_address(listen)
        rules = rules_for(host, hosts, read_only=read_only)
        try:
            listening = _rpc.listen(host, port, "--page-listen")
        except errors.PortInUse as error:
            raise errors.PortInUse(
                f"cannot serve the page: {error.message}, or '' for no page", address=listen
            ) from None
        scheme, port = "https" if tls else "http", listening.getsockname()[1]
        self.url = f"{scheme}://{_EVERYWHERE.get(host, host)}:{port}"
        login = PageLogin(logins, port, tls=bool(tls)) if logins else None
        about = {
            "heartbeat_timeout_s": heartbeat_timeout_s,
            "read_only": read_only,
            "version": version("shoal"),
        }
        self._reader = Reader(coordinator, storage, about, groups)
        self._server = WebServer(
            listening,
            lambda stopping: make_app(self._reader, rules, stopping, max_watchers, login, on_outcome),
            ConnectionLimits(
                catalogue.PAGE_CONNECTIONS,
                CONNECTIONS,
                PATIENCE_S,
                host_limit=catalogue.HOST_PAGE_CONNECTIONS,
                host_connections=HOST_CONNECTIONS,
            ),
            tls,
        )
        self._thread = threading.Thread(target=self._serve, name="page", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends all streams and the server. No thread or port remains."""
        self._server.stop()
        self._thread.join()

    def _serve(self) -> None:
        try:
            self._server.run()
        except Exception:  # the cluster runs without the page
            _log.exception("the page has failed")


def rules_for(host: str, hosts: Iterable[str] = (), *, read_only: bool = False) -> RequestRules:
    """Returns the rules for a page that listens on a host.

    Args:
        host: A name, or a numeric address.
        hosts: Further names.
        read_only: Whether the page refuses all actions.

    Raises:
        BadRequest: One of `hosts` is more than a name, for example a name with a port. It would match no request.
    """
    try:
        numeric = not ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        numeric = host != "localhost"
    names = {name.strip().lower() for name in hosts} - {""}
    for name in names:
        if not _NAME.fullmatch(name):
            raise errors.BadRequest(
                f"{name!r} is not a host name; --page-host takes names without http:// and port, such as a.example",
                host=name,
            )
    return RequestRules(frozenset({host.strip().lower(), *names} - {"", *_EVERYWHERE}), numeric, read_only)


__all__ = ["PageServer", "rules_for"]
