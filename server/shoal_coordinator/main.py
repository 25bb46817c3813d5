"""`shoal coordinator`: one source of truth for its flags and `SHOAL_*` variables."""

from typing import Annotated

import typer
from prometheus_client import CollectorRegistry

from shoal import _role


def coordinator(
    listen: Annotated[
        str,
        typer.Option(envvar="SHOAL_LISTEN", help="host:port to serve at; port 0 takes any free one."),
    ] = "127.0.0.1:7070",
    advertise: Annotated[
        str,
        typer.Option(envvar="SHOAL_ADVERTISE", help="Host that others reach it by, if not that of --listen."),
    ] = "",
    metrics_listen: Annotated[
        str, typer.Option(envvar="SHOAL_METRICS_LISTEN", help="host:port of /metrics; port 0 takes any free one.")
    ] = "127.0.0.1:0",
    lease: Annotated[
        float, typer.Option(envvar="SHOAL_LEASE", help="Seconds of silence after which a member is declared dead.")
    ] = 5.0,
    heartbeat: Annotated[
        float,
        typer.Option(
            envvar="SHOAL_HEARTBEAT", help="Seconds between a member's signs of life; less than half the lease."
        ),
    ] = 0.5,
    keep_finished: Annotated[
        int,
        typer.Option(
            min=0,
            envvar="SHOAL_KEEP_FINISHED",
            help="Ended jobs whose variables stay readable; older ones go.",
        ),
    ] = 8,
    log_format: Annotated[str, typer.Option(envvar="SHOAL_LOG_FORMAT", help="console or json.")] = "console",
    log_level: Annotated[str, typer.Option(envvar="SHOAL_LOG_LEVEL", help="debug, info, warning or error.")] = "info",
    supervised: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Keeps the cluster's small state: members, placement, jobs and who trains on which data."""

    def start(registry: CollectorRegistry, _metrics_address: str) -> _role.Running:
        from shoal_coordinator.process import CoordinatorConfig, start_coordinator  # noqa: PLC0415 - numpy is slow

        config = CoordinatorConfig(
            listen=listen,
            advertise=advertise,
            lease_s=lease,
            heartbeat_s=heartbeat,
            keep_finished=keep_finished,
        )
        return start_coordinator(config, registry)

    _role.run_role(
        "coordinator",
        start,
        metrics_listen=metrics_listen,
        log_format=log_format,
        log_level=log_level,
        supervised=supervised,
    )
