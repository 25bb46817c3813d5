"""Command-line options that all roles share, each with its `SHOAL_*` variable and its help text."""

import os
from typing import Annotated, Literal

import typer

from shoal._role.identity import ANY_PORT
from shoal._security import VARIABLES
from shoal.client import DEFAULT_ADDRESS as DEFAULT_COORDINATOR

# Empty if not given. TF_CONFIG, the pod or the default then supplies the value (`shoal._role.identity`).
Coordinator = Annotated[
    str,
    typer.Option(
        "--coordinator",
        "-c",
        envvar="SHOAL_COORDINATOR",
        help="host:port of the coordinator.",
        show_default=DEFAULT_COORDINATOR,
    ),
]
Name = Annotated[
    str,
    typer.Option(
        envvar="SHOAL_NAME",
        help="Member id: 1 to 63 characters of a-z, 0-9 and -. Keep the same id across restarts.",
        show_default="role, host name and random suffix",
    ),
]
CoordinatorListen = Annotated[
    str,
    typer.Option(
        envvar="SHOAL_LISTEN",
        help="host:port to listen on. Port 0 takes any free port.",
        show_default=DEFAULT_COORDINATOR,
    ),
]
Listen = Annotated[
    str,
    typer.Option(
        envvar="SHOAL_LISTEN", help="host:port to listen on. Port 0 takes any free port.", show_default=ANY_PORT
    ),
]
Advertise = Annotated[
    str,
    typer.Option(
        envvar="SHOAL_ADVERTISE",
        help="Host by which other processes reach this one. Default: the host of --listen.",
    ),
]
MetricsListen = Annotated[
    str,
    typer.Option(
        envvar="SHOAL_METRICS_LISTEN", help="host:port for /metrics and /healthz. Port 0 takes any free port."
    ),
]
Checkpoints = Annotated[
    str,
    typer.Option(
        envvar="SHOAL_CHECKPOINTS",
        help="Folder or URL for checkpoints, the same for the coordinator and all servers. The folder must exist. "
        "Default: no checkpoints.",
    ),
]
_CA, _CERTIFICATE, _KEY = VARIABLES
TlsCa = Annotated[
    str,
    typer.Option(
        "--tls-ca",
        envvar=_CA,
        metavar="FILE",
        help="PEM file with the CA that issued the cluster's certificates. Connections then use TLS. Default: no TLS.",
    ),
]
TlsCertificate = Annotated[
    str,
    typer.Option("--tls-cert", envvar=_CERTIFICATE, metavar="FILE", help="PEM file with the certificate to present."),
]
TlsKey = Annotated[
    str,
    typer.Option(
        "--tls-key",
        envvar=_KEY,
        metavar="FILE",
        help="PEM file with the private key of --tls-cert. Other users must not be able to read it.",
    ),
]
TlsClientCertificates = Annotated[
    Literal["required", "optional"],
    typer.Option(
        "--tls-client-certs",
        envvar="SHOAL_TLS_CLIENT_CERTS",
        help="Whether clients must present a certificate. With `optional`, gRPC does not ask for one.",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        envvar="SHOAL_INSECURE",
        help="Accepts connections from other hosts without TLS. A coordinator then also asks for no tokens: everybody "
        "who can reach the cluster can read and change everything in it. All roles of the cluster need it.",
    ),
]
DEFAULT_PAGE = "127.0.0.1:7080"
_PAGE_VARIABLE = "SHOAL_PAGE_LISTEN"
# None if it was not given; `page_listen` then chooses.
PageListen = Annotated[
    str | None,
    typer.Option(
        envvar=_PAGE_VARIABLE,
        help="host:port for the web page. An empty value disables it.",
        show_default=DEFAULT_PAGE,
    ),
]
# The same for `shoal up`, which may choose another port.
PageListenOrAny = Annotated[
    str | None,
    typer.Option(
        envvar=_PAGE_VARIABLE,
        help="host:port for the web page. An empty value disables it. If the option is not given and port 7080 is in "
        "use, the page takes any free port.",
        show_default=DEFAULT_PAGE,
    ),
]
PageHosts = Annotated[
    str,
    typer.Option(
        "--page-host",
        envvar="SHOAL_PAGE_HOSTS",
        help="Further host names that the page accepts in requests, without a port, separated by commas.",
    ),
]
PageReadOnly = Annotated[
    bool,
    typer.Option(
        "--page-read-only",
        envvar="SHOAL_PAGE_READ_ONLY",
        help="Disables all actions of the page that change the cluster.",
    ),
]
RetryFor = Annotated[
    float, typer.Option(envvar="SHOAL_RETRY_FOR", min=0, help="Seconds to retry while the coordinator does not answer.")
]
LogFormat = Annotated[
    Literal["console", "json"],
    typer.Option(envvar="SHOAL_LOG_FORMAT", help="Format of the log: text for people, or one JSON object per line."),
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    typer.Option(envvar="SHOAL_LOG_LEVEL", help="Lowest level that the role logs: debug, info, warning or error."),
]
AllowPrograms = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-program",
        envvar="SHOAL_ALLOW_PROGRAM",
        metavar="PATTERN",
        help="Program that jobs may name: module:factory, or a module (such as vision), which allows everything in "
        "it. '.' means the modules under --path; * stands for any text, ? for any character. Repeatable; in "
        "SHOAL_ALLOW_PROGRAM, patterns are separated by spaces. NAME=PATTERN allows it only to jobs that NAME "
        "submitted, @ROLE=PATTERN only to jobs that were submitted with that access role: admin or submitter. Default: "
        "'.' and shoal_nn.",
    ),
]
TrainerEnvironment = Annotated[
    list[str] | None,
    typer.Option(
        "--trainer-env",
        envvar="SHOAL_TRAINER_ENV",
        metavar="NAME[=VALUE]",
        help="Environment variable that trainers get, besides those that they always get. NAME passes the worker's own "
        "value. Repeatable; in SHOAL_TRAINER_ENV, separated by spaces. Example: AWS_ACCESS_KEY_ID.",
    ),
]
# Whether the page takes any free port if its port is in use. `shoal up` sets it unless the user chose the port: another
# process can take a port between a check and the coordinator's start.
PageOrAny = Annotated[bool, typer.Option("--page-or-any", hidden=True)]
# How `shoal up` and `LocalCluster` start a role; see `shoal._role.lifecycle.run_role`.
Supervised = Annotated[bool, typer.Option(hidden=True)]


def page_listen(given: str | None) -> str:
    """Returns the address for the page: the given one or the default, or "" if the variable is set to nothing.

    typer treats an empty variable as if it were not set.

    Args:
        given: the value of the option. None means that it was not given.
    """
    if given is not None:
        return given
    return "" if os.environ.get(_PAGE_VARIABLE) == "" else DEFAULT_PAGE


__all__ = [
    "ANY_PORT",
    "DEFAULT_COORDINATOR",
    "DEFAULT_PAGE",
    "Advertise",
    "AllowPrograms",
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
    "PageListenOrAny",
    "PageOrAny",
    "PageReadOnly",
    "RetryFor",
    "Supervised",
    "TlsCa",
    "TlsCertificate",
    "TlsClientCertificates",
    "TlsKey",
    "TrainerEnvironment",
    "page_listen",
]
