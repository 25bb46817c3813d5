"""The page's server: a port, and a thread that serves it."""

import ipaddress
import re
import threading
from collections.abc import Iterable
from importlib.metadata import version

import structlog

from shoal import _rpc, errors
from shoal._checkpoint import CheckpointStorage
from shoal._role.web_server import ConnectionLimits, WebServer
from shoal_coordinator.coordinator import Coordinator
from shoal_coordinator.page.app import make_app
from shoal_coordinator.page.guard import Rules
from shoal_coordinator.page.reader import Reader

_log = structlog.get_logger(__name__)

# Connections at a time: some for each page that watches, and for those who only ask.
_CONNECTIONS = 256
# How long a connection may be open, or be kept open behind an answer, before it has asked for something.
_PATIENCE_S = 10.0
# A host's name, or an address of it.
_NAME = re.compile(r"[^\s/:@?#\[\]]+(?<!\.)|\[[0-9a-f:.]+\]")
# What stands for all addresses of this machine, and one of these.
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - to be told apart, not to be bound


class PageServer:
    """Serves the page until it is stopped.

    Args:
        coordinator: the shell.
        listen: host:port; port 0 takes any free one.
        hosts: names that it is asked for by, beside those of loopback and the host listened at.
        folder: of checkpoints; None: the cluster has none.
        read_only: nothing can be changed from the page.
        heartbeat_timeout_s: seconds of silence after which a member is dead.
        heartbeat_interval_s: seconds between its signs of life.
        max_watchers: pages that are kept up to date at a time.

    Raises:
        PortInUse: another process listens there.
        BadRequest: `listen` is no address, or one of `hosts` no name.

    Attributes:
        url: where it is.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        listen: str,
        *,
        hosts: Iterable[str] = (),
        folder: CheckpointStorage | None = None,
        read_only: bool = False,
        heartbeat_timeout_s: float = 5.0,
        heartbeat_interval_s: float = 0.5,
        max_watchers: int = 32,
    ) -> None:
        host, port = _rpc.parse_address(listen)
        rules = rules_for(host, hosts, read_only=read_only)
        try:
            listening = _rpc.listen(host, port)
        except errors.PortInUse as error:
            raise errors.PortInUse(
                f"cannot serve the page on {listen}: {error.message}; --page-listen takes another port, or '' for none",
                address=listen,
            ) from None
        self.url = f"http://{_EVERYWHERE.get(host, host)}:{listening.getsockname()[1]}"
        about = {
            "heartbeat_timeout_s": heartbeat_timeout_s,
            "heartbeat_interval_s": heartbeat_interval_s,
            "read_only": read_only,
            "version": version("shoal"),
        }
        self._reader = Reader(coordinator, folder, about, heartbeat_interval_s)
        self._server = WebServer(
            listening,
            lambda stopping: make_app(self._reader, rules, stopping, max_watchers),
            ConnectionLimits(_CONNECTIONS, _PATIENCE_S),
        )
        self._thread = threading.Thread(target=self._serve, name="page", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends all streams, and the server: no thread or port is left."""
        self._server.stop()
        self._thread.join()

    def _serve(self) -> None:
        try:
            self._server.run()
        except Exception:  # the cluster goes on without the page
            _log.exception("the page has failed")


def rules_for(host: str, hosts: Iterable[str] = (), *, read_only: bool = False) -> Rules:
    """Who may ask a page that listens at a host.

    Args:
        host: a name, or an address in numbers.
        hosts: further names.
        read_only: nothing may be changed.

    Raises:
        BadRequest: one of them is more than a name, as with a port: it would match nothing.
    """
    try:
        numeric = not ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        numeric = host != "localhost"
    names = {name.strip().lower() for name in hosts} - {""}
    for name in names:
        if not _NAME.fullmatch(name):
            raise errors.BadRequest(
                f"{name!r} is no name of the page; --page-host takes names alone, without http:// and port: a.example",
                host=name,
            )
    return Rules(frozenset({host.strip().lower(), *names} - {"", *_EVERYWHERE}), numeric, read_only)


__all__ = ["PageServer", "rules_for"]
