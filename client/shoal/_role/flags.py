"""The flags that roles share: each is a flag, a `SHOAL_*` variable and a line of help, and is defined here once."""

import os
from typing import Annotated, Literal

import typer

from shoal._role.identity import ANY_PORT
from shoal.client import DEFAULT_ADDRESS as DEFAULT_COORDINATOR

# Empty where it is not given: TF_CONFIG or the pod may say it then, and the default if they do not
# (`shoal._role.identity`).
Coordinator = Annotated[
    str,
    typer.Option(envvar="SHOAL_COORDINATOR", help="The coordinator's host:port.", show_default=DEFAULT_COORDINATOR),
]
Name = Annotated[
    str,
    typer.Option(
        envvar="SHOAL_NAME",
        help="Member id, kept over restarts: a-z, 0-9 and -.",
        show_default="the role, this host and a random end",
    ),
]
CoordinatorListen = Annotated[
    str,
    typer.Option(
        envvar="SHOAL_LISTEN",
        help="host:port to serve at; port 0 takes any free one.",
        show_default=DEFAULT_COORDINATOR,
    ),
]
Listen = Annotated[
    str,
    typer.Option(
        envvar="SHOAL_LISTEN", help="host:port to serve at; port 0 takes any free one.", show_default=ANY_PORT
    ),
]
Advertise = Annotated[
    str, typer.Option(envvar="SHOAL_ADVERTISE", help="Host that others reach it by, if not that of --listen.")
]
MetricsListen = Annotated[
    str,
    typer.Option(envvar="SHOAL_METRICS_LISTEN", help="host:port of /metrics and /healthz; port 0 takes any free one."),
]
Checkpoints = Annotated[
    str,
    typer.Option(
        envvar="SHOAL_CHECKPOINTS",
        help="Folder or URL of checkpoints, the same for all servers and the coordinator; none: empty.",
    ),
]
DEFAULT_PAGE = "127.0.0.1:7080"
_PAGE_VARIABLE = "SHOAL_PAGE_LISTEN"
PageListen = Annotated[
    str, typer.Option(envvar=_PAGE_VARIABLE, help="host:port of the page to watch the cluster; empty: none.")
]
PageHosts = Annotated[
    str,
    typer.Option(
        "--page-host",
        envvar="SHOAL_PAGE_HOSTS",
        help="Further names of the page, without a port: a,b.",
    ),
]
PageReadOnly = Annotated[
    bool,
    typer.Option("--page-read-only", envvar="SHOAL_PAGE_READ_ONLY", help="Nothing can be changed from the page."),
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
# How `shoal up` and `LocalCluster` start a role; see `shoal._role.lifecycle.run_role`.
Supervised = Annotated[bool, typer.Option(hidden=True)]


def page_listen(given: str) -> str:
    """Where the page is to be; empty: nowhere. An empty variable says so, which the command line takes for none."""
    return "" if given == DEFAULT_PAGE and os.environ.get(_PAGE_VARIABLE) == "" else given


__all__ = [
    "ANY_PORT",
    "DEFAULT_COORDINATOR",
    "DEFAULT_PAGE",
    "Advertise",
    "Checkpoints",
    "Coordinator",
    "CoordinatorListen",
    "Listen",
    "LogFormat",
    "LogLevel",
    "MetricsListen",
    "Name",
    "PageHosts",
    "PageListen",
    "PageReadOnly",
    "RetryFor",
    "Supervised",
    "page_listen",
]
