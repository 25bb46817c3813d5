"""Commands on the cluster: `up`, `status` and `page`."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from shoal import _rpc, errors
from shoal._cli import options
from shoal._cli.engines import on_ray, ray_options
from shoal._cli.last_checkpoints import saving_jobs
from shoal._cli.output import Output, Row
from shoal._display import counted, records
from shoal._role import RoleProcess, flags
from shoal._role.supervision import Death, RestartPolicy
from shoal._security import Credentials
from shoal._system.logs import Log
from shoal.local_cluster import LocalCluster
from shoal.status import MemberStatus, Role
from shoal.v1 import token_pb2

_log = Log(__name__)

# Seconds between two checks by `up` whether a role has died.
_POLL_S = 0.5

_PathsOption = Annotated[
    list[Path] | None,
    typer.Option(
        exists=True,
        file_okay=False,
        help="Folder to import programs from. Repeatable. Default: the working directory.",
    ),
]
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

_LogLevelOption = Annotated[
    str, typer.Option(envvar="SHOAL_LOG_LEVEL", help="Lowest level that the roles log: debug, info, warning or error.")
]
_LogDirOption = Annotated[
    Path | None, typer.Option(help="Folder for the log files of the roles. Default: standard error.")
]


def up(
    context: typer.Context,
    servers: Annotated[int, typer.Option(min=1, help="Number of servers.")] = 2,
    workers: Annotated[int, typer.Option(min=0, help="Number of workers. With 0, only sessions train.")] = 2,
    path: _PathsOption = None,
    allow_program: flags.AllowPrograms = None,
    trainer_env: flags.TrainerEnvironment = None,
    listen: Annotated[
        str, typer.Option(envvar="SHOAL_LISTEN", help="host:port of the coordinator. Port 0 takes any free port.")
    ] = options.DEFAULT_ADDRESS,
    checkpoints: _CheckpointsOption = "",
    store: _StoreOption = "",
    page_listen: flags.PageListenOrAny = None,
    page_hosts: flags.PageHosts = "",
    page_read_only: flags.PageReadOnly = False,
    log_level: _LogLevelOption = "warning",
    log_dir: _LogDirOption = None,
    on: ray_options.On = "local",
    name: ray_options.Name = None,
    namespace: ray_options.Namespace = None,
    resources: ray_options.Resources = None,
    max_workers: ray_options.MaxWorkers = None,
    idle: ray_options.Idle = None,
    start_timeout: ray_options.StartTimeout = None,
    wait_for_nodes: ray_options.WaitForNodes = False,
    as_json: options.JsonOption = False,
) -> None:
    """Runs a cluster on this machine, or on Ray, until Ctrl-C or SIGTERM.

    With --checkpoints, it first takes a last checkpoint of each job that trains, for at most 30 s. A second Ctrl-C
    stops at once.

    If a role dies, the command restarts it after 1 s, and after 2, 4 and 8 s if it keeps dying within 60 s. After the
    fifth death the role is not restarted, and the others continue. With --json, the command prints one object when the
    cluster is ready, one for each role that dies or returns, and some about the last checkpoints.

    With --on ray, the roles are actors of the Ray cluster that RAY_ADDRESS names. Ray restarts them, without a limit.
    Ray chooses the addresses, and there are no last checkpoints. The command refuses options that have no effect.
    """
    shared: dict[str, Any] = {"checkpoints": checkpoints, "store": store, "log_level": log_level}
    shared |= {"path": path or ".", "allow_programs": allow_program or (), "trainer_env": trainer_env or ()}
    on_engine: dict[str, Any] = {
        "name": name,
        "namespace": namespace,
        "resources": resources,
        "max_workers": max_workers,
    }
    on_engine |= {"idle_s": idle, "start_timeout_s": start_timeout, "wait_for_nodes": wait_for_nodes}
    with Output(as_json):
        own = ray_options.chosen(on, context, page_listen, on_engine)
        if on == "local":
            _check_listen(listen, page_listen)
    if on == "ray":
        own |= {"page": bool(flags.page_listen(page_listen)), "flags": _page_flags("", page_hosts, page_read_only)}
        _up_on_ray(servers, workers, as_json, **shared, **own)
        return
    shared |= {"listen": listen, "page_listen": flags.page_listen(page_listen), "log_dir": log_dir}
    shared["flags"] = _page_flags(page_listen, page_hosts, page_read_only)
    _up_here(servers, workers, as_json, **shared, show_logs=log_dir is None)


@options.connected
def status(
    connect: options.Connect,
    everything: options.AllOption = False,
    as_json: options.JsonOption = False,
) -> None:
    """Shows the members of the cluster with their state, devices, jobs and shards.

    The table leaves out sessions that have left, and says how many there are. --all and --json show them.
    """
    with Output(as_json) as out, connect() as client:
        now = client.status()
        if as_json:
            out.record(records.cluster(now))
            return
        size = f"{counted(now.shards, 'shard')} · {counted(now.bytes, 'byte')}"
        title = f"cluster {now.cluster} · generation {now.generation} · {size}"
        late_s = records.late_after_s(now)
        shown = [it for it in now.members if everything or not _has_left(it, late_s)]
        zoned = any(member.zone for member in shown)
        zone = ["zone"] if zoned else []
        columns = ["member", "role", "state", "address", *zone, "device", "job", "shards", "bytes", "metrics"]
        rows: list[tuple[list[str], Row]] = [(_member_cells(member, late_s, zoned=zoned), {}) for member in shown]
        left = len(now.members) - len(shown)
        notes = [f"{counted(left, 'session')} left; `shoal status --all` shows them"] if left else []
        out.rows(title, columns, rows, optional=["metrics", "zone", "device", "bytes", "shards"], notes=notes)


@options.connected
def page(
    connect: options.ConnectCoordinator,
    as_json: options.JsonOption = False,
) -> None:
    """Prints a link that opens the coordinator's page and logs you in. The link is valid for ten minutes."""
    with Output(as_json) as out, connect() as client:
        reply = client.call(client.tokens.GetLoginLink, token_pb2.GetLoginLinkRequest())
        out.message(reply.link, {"link": reply.link, "valid_s": reply.valid_s})


def _member_cells(member: MemberStatus, late_s: float, *, zoned: bool) -> list[str]:
    return [
        member.member,
        member.role.value,
        _state(member, late_s),
        member.address,
        *([member.zone] if zoned else []),
        member.device,
        member.job,
        *_load_cells(member),
        member.metrics_address,
    ]


def _load_cells(member: MemberStatus) -> list[str]:
    """Returns the number of a member's shards and their bytes. A server that is gone has no shards any more."""
    if not member.alive:
        return ["-", "-"] if member.role is Role.SERVER else ["", ""]
    return [str(member.shards or ""), f"{member.bytes:,}" if member.bytes else ""]


def _has_left(member: MemberStatus, late_s: float) -> bool:
    return member.role is Role.SESSION and records.member_state(member, late_s) == "left"


def _state(member: MemberStatus, late_s: float) -> str:
    since = f"{member.silent_s:.0f} s"
    match records.member_state(member, late_s):
        case "late":
            return f"late, silent for {since}"
        case "left":
            return f"left {since} ago"
        case "lost":
            return f"lost, silent for {since}"
        case "draining" if member.drained:
            return "draining: nothing left"
        case "draining":
            left = [counted(len(member.waiting_jobs), "job")] if member.waiting_jobs else []
            left += [counted(member.moving_groups, "lock group")] if member.moving_groups else []
            return f"draining: {', '.join(left)} left" if left else "draining"
        case state:
            return state


def _beginning(servers: int, workers: int) -> str:
    return f"starting a coordinator, {counted(servers, 'server')} and {counted(workers, 'worker')} ..."


def _up_here(servers: int, workers: int, as_json: bool, **arguments: Any) -> None:
    cluster = LocalCluster(servers, workers, **arguments)
    with Output(as_json) as out, _until_interrupted():
        if not as_json:
            out.errors.print(_beginning(servers, workers))
        with cluster:
            announce(cluster, out, _login_link(cluster))
            with saving_jobs(cluster, out, storage=bool(arguments["checkpoints"])):
                Supervisor(cluster, out).run()


def _up_on_ray(servers: int, workers: int, as_json: bool, **arguments: Any) -> None:
    with Output(as_json) as out:
        cluster = on_ray.prepare(servers, workers, **arguments)
        with _until_interrupted():  # after Ray has set its own handlers
            if not as_json:
                out.errors.print(_beginning(servers, workers))
            on_ray.run(cluster, out)


def _check_listen(listen: str, page_listen: str | None) -> None:
    """Raises PortInUse if the coordinator could not listen, so that the first message is the error."""
    try:
        _rpc.check_free(listen, "--listen")
    except errors.PortInUse as error:
        raise errors.PortInUse(
            f"{error.message}. Another `shoal up` may be running there: `shoal status --coordinator {listen}` shows it",
            **error.details,
        ) from None
    if page_listen:  # the coordinator itself chooses another port than a default one that is in use
        _rpc.check_free(page_listen, "--page-listen")


def _page_flags(given: str | None, hosts: str, read_only: bool) -> dict[str, list[str]]:
    """Returns the options of roles for the page, besides its address.

    Args:
        given: the address that the user gave. None lets the page take another port than the default one.
        hosts: further names of the page; empty means none.
        read_only: whether the page refuses all actions.
    """
    named = ["--page-host", hosts] if hosts else []
    return {"coordinator": [*named, *["--page-read-only"][:read_only], *["--page-or-any"][: given is None]]}


def announce(cluster: LocalCluster, out: Output, link: str = "") -> None:
    """Prints the addresses of a cluster that is ready, and commands to begin with.

    Args:
        cluster: the cluster.
        out: the command's output.
        link: a link that logs a browser in to its page; empty means the page's URL.
    """
    watch = f"Watch it at {link or cluster.page}\n" if cluster.page else ""
    scheme = "https" if Credentials.find().tls else "http"
    metrics = f"Metrics of the coordinator: {scheme}://{cluster.metrics['coordinator']}/metrics\n"
    workers = sum(process.name.startswith("worker-") for process in cluster.processes)
    submit = f"  shoal submit PACKAGE.MODULE:FACTORY --workers {workers} --follow\n"
    first = submit if workers else "  python SCRIPT    # a script that calls shoal.connect() and opens a session\n"
    out.message(
        f"Shoal runs at {cluster.address}. Ctrl-C stops it. {watch}{metrics}From another terminal:\n"
        f"  export SHOAL_COORDINATOR={cluster.address}\n"
        f"{first}  shoal status",
        {
            "address": cluster.address,
            "page": cluster.page,
            "metrics": cluster.metrics,
            "pids": {process.name: process.pid for process in cluster.processes},
        },
    )


def _login_link(cluster: LocalCluster) -> str:
    """Returns a link that logs a browser in to a cluster's page, or the page's URL if there is no such link."""
    if not cluster.page:
        return ""
    try:
        return cluster.login_link()
    except errors.ShoalError as error:
        _log.warning("cannot make a login link for the page; use `shoal page`", reason=error.message)
        return cluster.page


class Supervisor:
    """Restarts the roles of a cluster that die, and reports what happens.

    Args:
        cluster: a cluster that runs.
        out: the command's output.
        clock: returns seconds.
    """

    def __init__(self, cluster: LocalCluster, out: Output, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster, self._out, self._clock = cluster, out, clock
        self._policies = {process.name: RestartPolicy(clock()) for process in cluster.processes}

    def run(self) -> NoReturn:
        """Looks after the roles until an exception ends it."""
        while True:
            time.sleep(_POLL_S)
            self.poll()

    def poll(self) -> None:
        """Reports roles that have died, and restarts those whose pause is over. The others go on meanwhile."""
        for process in self._cluster.processes:
            policy = self._policies[process.name]
            if policy.death is None and process.returncode is not None:
                self._report(process, policy.died(process.returncode, self._clock()))
            if policy.due(self._clock()):
                self._restart(process, policy)

    def _restart(self, process: RoleProcess, policy: RestartPolicy) -> None:
        policy.restarted(self._clock())
        try:
            again = self._cluster.restart(process.role, process.index)
        except errors.StartFailed:
            return  # the next poll reports the new process if it has ended
        record = {"event": "restarted", "name": again.name, "pid": again.pid, "metrics": again.metrics}
        self._out.message(f"{again.name} runs again", record)

    def _report(self, process: RoleProcess, death: Death) -> None:
        name, pause_s = process.name, None
        ended = f"{name} ended with exit status {death.exit_status}"
        if death.restart_at is not None:
            pause_s = round(death.restart_at - self._clock(), 1)
            text = f"{ended}; it is started again in {pause_s:g} s, and the other roles continue"
        elif death.exit_status == 0:
            text = f"{ended}: it was asked to stop, and is not started again; the other roles continue"
        else:
            log = process.tail()  # empty if the roles log to this terminal
            text = (
                f"{ended}, {death.deaths} times in a row, and is not started again. Correct what its log says, "
                "then end this command with Ctrl-C and start it again." + (f" End of its log:\n{log}" if log else "")
            )
        record = {"event": "ended", "name": name, "exit_status": death.exit_status, "restart_in_s": pause_s}
        self._out.message(text, record)


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


__all__ = ["Supervisor", "announce", "page", "status", "up"]
