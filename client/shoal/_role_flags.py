"""The flags that roles share: each is a flag, a `SHOAL_*` variable and a line of help, and is defined here once."""

from typing import Annotated, Literal

import typer

from shoal.client import DEFAULT_ADDRESS as DEFAULT_COORDINATOR

ANY_PORT = "127.0.0.1:0"

Coordinator = Annotated[str, typer.Option(envvar="SHOAL_COORDINATOR", help="The coordinator's host:port.")]
Listen = Annotated[str, typer.Option(envvar="SHOAL_LISTEN", help="host:port to serve at; port 0 takes any free one.")]
Advertise = Annotated[
    str, typer.Option(envvar="SHOAL_ADVERTISE", help="Host that others reach it by, if not that of --listen.")
]
MetricsListen = Annotated[
    str, typer.Option(envvar="SHOAL_METRICS_LISTEN", help="host:port of /metrics; port 0 takes any free one.")
]
Checkpoints = Annotated[
    str,
    typer.Option(
        envvar="SHOAL_CHECKPOINTS",
        help="Folder or URL of checkpoints, the same for all servers and the coordinator; none: empty.",
    ),
]
RetryFor = Annotated[
    float, typer.Option(envvar="SHOAL_RETRY_FOR", min=0, help="Seconds to look for a coordinator that is away.")
]
LogFormat = Annotated[
    Literal["console", "json"], typer.Option(envvar="SHOAL_LOG_FORMAT", help="For people, or for machines.")
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"], typer.Option(envvar="SHOAL_LOG_LEVEL", help="The least to be logged.")
]
# How `shoal up` and `LocalCluster` start a role; see `shoal._role.run_role`.
Supervised = Annotated[bool, typer.Option(hidden=True)]

__all__ = [
    "ANY_PORT",
    "DEFAULT_COORDINATOR",
    "Advertise",
    "Checkpoints",
    "Coordinator",
    "Listen",
    "LogFormat",
    "LogLevel",
    "MetricsListen",
    "RetryFor",
    "Supervised",
]
