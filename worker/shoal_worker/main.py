"""`shoal worker`: flags, and nothing heavy before they are read, so that `shoal --help` stays fast."""

import re
import secrets
import socket
from pathlib import Path
from typing import Annotated

import typer


def worker(
    coordinator: Annotated[
        str, typer.Option(envvar="SHOAL_COORDINATOR", help="Where the coordinator is, host:port.")
    ] = "127.0.0.1:7070",
    name: Annotated[
        str,
        typer.Option(envvar="SHOAL_NAME", help="Member id, of a-z, 0-9 and -. Default: the host's, and a random end."),
    ] = "",
    device: Annotated[
        str, typer.Option(envvar="SHOAL_DEVICE", help="cpu, cuda:N, or auto: the first GPU if there is one.")
    ] = "auto",
    path: Annotated[
        list[Path] | None,
        typer.Option(envvar="SHOAL_PATH", help="Folder to import programs from; may be repeated. Default: this one."),
    ] = None,
    metrics_listen: Annotated[
        str, typer.Option(envvar="SHOAL_METRICS_LISTEN", help="Where /metrics is served; port 0: any free one.")
    ] = "127.0.0.1:0",
    retry_for: Annotated[
        float, typer.Option(envvar="SHOAL_RETRY_FOR", min=0, help="Seconds to keep trying where nobody answers.")
    ] = 30.0,
    log_format: Annotated[str, typer.Option(envvar="SHOAL_LOG_FORMAT", help="console or json.")] = "console",
    log_level: Annotated[str, typer.Option(envvar="SHOAL_LOG_LEVEL", help="debug, info, warning or error.")] = "info",
    supervised: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Run a worker: it takes jobs from the coordinator and trains their programs on one device."""
    from shoal._role import run_role  # noqa: PLC0415
    from shoal_worker.daemon import WorkerConfig, start_worker  # noqa: PLC0415

    config = WorkerConfig(
        coordinator=coordinator,
        name=name or default_name(),
        device=device,
        paths=tuple(str(folder.resolve()) for folder in path or [Path()]),
        retry_for_s=retry_for,
    )
    run_role(
        "worker",
        lambda registry, metrics_address: start_worker(config, registry, metrics_address),
        metrics_listen=metrics_listen,
        log_format=log_format,
        log_level=log_level,
        supervised=supervised,
    )


def default_name(host: str | None = None) -> str:
    """A member id that says where it is and that no other worker there has."""
    plain = re.sub(r"[^a-z0-9]+", "-", (host or socket.gethostname()).lower()).strip("-")[:40]
    return f"worker-{plain}-{secrets.token_hex(3)}"
