"""Commands on the cluster: `up` and `status`."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from shoal import _rpc, errors
from shoal._cli import options
from shoal._cli.output import Output, Row
from shoal._display import records
from shoal._role import flags
from shoal.client import Client
from shoal.local_cluster import LocalCluster
from shoal.status import MemberStatus

# Seconds between two checks by `up` whether a role has died.
_POLL_S = 0.5

_CheckpointsOption = Annotated[
    str,
    typer.Option(
        envvar="SHOAL_CHECKPOINTS",
        help="Folder or URL for checkpoints, kept after the cluster stops. Default: no checkpoints.",
    ),
]
_StoreOption = Annotated[
    str,
    typer.Option(
        envvar="SHOAL_STORE",
        help="File of the metadata store, from which the next `shoal up` resumes jobs. Default: none.",
    ),
]


def up(
    servers: Annotated[int, typer.Option(min=1, help="Number of servers.")] = 2,
    workers: Annotated[int, typer.Option(min=0, help="Number of workers. With 0, only sessions train.")] = 2,
    path: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder to import programs from. Repeatable. Default: the working directory.",
        ),
    ] = None,
    listen: Annotated[
        str, typer.Option(envvar="SHOAL_LISTEN", help="host:port of the coordinator. Port 0 takes any free port.")
    ] = options.DEFAULT_ADDRESS,
    checkpoints: _CheckpointsOption = "",
    store: _StoreOption = "",
    page_listen: flags.PageListen = flags.DEFAULT_PAGE,
    page_hosts: flags.PageHosts = "",
    page_read_only: flags.PageReadOnly = False,
    log_level: Annotated[
        str,
        typer.Option(envvar="SHOAL_LOG_LEVEL", help="Lowest level that the roles log: debug, info, warning or error."),
    ] = "warning",
    log_dir: Annotated[
        Path | None, typer.Option(help="Folder for the log files of the roles. Default: standard error.")
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Runs a cluster on this machine until Ctrl-C.

    With --json, the command prints one object when the cluster is ready, and one for each role that dies.
    """
    page_flags = [
        *(["--page-host", page_hosts] if page_hosts else []),
        *(["--page-read-only"] if page_read_only else []),
    ]
    cluster = LocalCluster(
        servers,
        workers,
        path=path or ["."],
        checkpoints=checkpoints,
        store=store,
        listen=listen,
        page_listen=_free_page(flags.page_listen(page_listen)),
        flags={"coordinator": page_flags},
        log_level=log_level,
        log_dir=log_dir,
        show_logs=log_dir is None,
    )
    with Output(as_json) as out, _until_interrupted():
        if not as_json:
            out.errors.print(f"starting a coordinator, {servers} servers and {workers} workers ...")
        with cluster:
            _announce(cluster, out)
            _watch(cluster, out)


def status(
    coordinator: options.CoordinatorOption = options.DEFAULT_ADDRESS,
    retry_for: options.RetryOption = 20.0,
    as_json: options.JsonOption = False,
) -> None:
    """Shows the members of the cluster with their state, devices, jobs and shards."""
    columns = ["member", "role", "state", "address", "device", "job", "shards", "bytes", "metrics"]
    with Output(as_json) as out, Client(coordinator, retry_for_s=retry_for) as client:
        now = client.status()
        if as_json:
            out.record(records.cluster(now))
            return
        title = f"cluster {now.cluster} · generation {now.generation} · {now.shards} shards · {now.bytes:,} bytes"
        rows: list[tuple[list[str], Row]] = [(_member_cells(member), {}) for member in now.members]
        out.rows(title, columns, rows, optional=["metrics", "device", "bytes", "shards"])


def _member_cells(member: MemberStatus) -> list[str]:
    return [
        member.member,
        member.role.value,
        _state(member),
        member.address,
        member.device,
        member.job,
        str(member.shards or ""),
        f"{member.bytes:,}" if member.bytes else "",
        member.metrics_address,
    ]


def _state(member: MemberStatus) -> str:
    since = f"{member.silent_s:.0f} s"
    match records.member_state(member):
        case "late":
            return f"late, silent for {since}"
        case "left":
            return f"left {since} ago"
        case "dead":
            return f"dead, silent for {since}"
        case state:
            return state


def _free_page(listen: str) -> str:
    """Returns the address for the page: any free port if the default port is taken, else `listen`."""
    if listen == flags.DEFAULT_PAGE:
        try:
            _rpc.listen(*_rpc.parse_address(listen)).close()
        except errors.PortInUse:
            return flags.ANY_PORT
    return listen


def _announce(cluster: LocalCluster, out: Output) -> None:
    watch = f"Watch it at {cluster.page}\n" if cluster.page else ""
    out.message(
        f"Shoal runs at {cluster.address}. Ctrl-C stops it. {watch}From another terminal:\n"
        f"  export SHOAL_COORDINATOR={cluster.address}\n"
        "  shoal submit PACKAGE.MODULE:FACTORY --workers 2 --follow\n"
        "  shoal status",
        {
            "address": cluster.address,
            "page": cluster.page,
            "metrics": cluster.metrics,
            "pids": {process.name: process.pid for process in cluster.processes},
        },
    )


def _watch(cluster: LocalCluster, out: Output) -> None:
    """Reports each role that dies, until interrupted."""
    dead: set[str] = set()
    while True:
        time.sleep(_POLL_S)
        for process in cluster.processes:
            code = process.returncode
            if code is not None and process.name not in dead:
                dead.add(process.name)
                record = {"event": "ended", "name": process.name, "exit_status": code}
                out.message(f"{process.name} ended with exit status {code}; the other roles continue", record)


@contextmanager
def _until_interrupted() -> Iterator[None]:
    """Ends the block at Ctrl-C or SIGTERM without an error."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)


__all__ = ["status", "up"]
