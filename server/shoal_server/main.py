"""`shoal server`: one source of truth for its flags and `SHOAL_*` variables."""

import socket
from typing import Annotated

import typer
from prometheus_client import CollectorRegistry

from shoal import _role


def server(
    coordinator: Annotated[
        str, typer.Option(envvar="SHOAL_COORDINATOR", help="The coordinator's host:port.")
    ] = "127.0.0.1:7070",
    name: Annotated[
        str,
        typer.Option(
            envvar="SHOAL_NAME",
            help="Member id, kept over restarts: [a-z0-9-], up to 63. By default server- and this host's name.",
        ),
    ] = "",
    listen: Annotated[
        str, typer.Option(envvar="SHOAL_LISTEN", help="host:port to serve at; port 0 takes any free one.")
    ] = "127.0.0.1:0",
    advertise: Annotated[
        str,
        typer.Option(envvar="SHOAL_ADVERTISE", help="Host that workers reach this server by, if not that of --listen."),
    ] = "",
    metrics_listen: Annotated[
        str, typer.Option(envvar="SHOAL_METRICS_LISTEN", help="host:port of /metrics; port 0 takes any free one.")
    ] = "127.0.0.1:0",
    rpc_threads: Annotated[
        int, typer.Option(envvar="SHOAL_RPC_THREADS", min=2, max=256, help="Pushes, and pulls, served at once.")
    ] = 16,
    retry_for: Annotated[
        float, typer.Option(envvar="SHOAL_RETRY_FOR", min=0, help="Seconds to look for the coordinator at start.")
    ] = 30.0,
    log_format: Annotated[str, typer.Option(envvar="SHOAL_LOG_FORMAT", help="console or json.")] = "console",
    log_level: Annotated[str, typer.Option(envvar="SHOAL_LOG_LEVEL", help="debug, info, warning or error.")] = "info",
    supervised: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Hosts shards of jobs' variables and applies updates to them."""

    def start(registry: CollectorRegistry, metrics_address: str) -> _role.Running:
        from shoal_server.process import Server, ServerConfig  # noqa: PLC0415 - numba takes a second to import

        config = ServerConfig(
            name=name or f"server-{socket.gethostname().lower()}",
            coordinator=coordinator,
            listen=listen,
            advertise=advertise,
            rpc_threads=rpc_threads,
            retry_for_s=retry_for,
            metrics_address=metrics_address,
        )
        return Server(config, registry)

    _role.run_role(
        "server",
        start,
        metrics_listen=metrics_listen,
        log_format=log_format,
        log_level=log_level,
        supervised=supervised,
    )
