"""A complete cluster of child processes on this machine, for experiments, notebooks and tests."""

import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import NoneType, TracebackType
from typing import Any
from urllib.parse import urlsplit

from shoal import _rpc, errors
from shoal._role import ForkServer, RoleProcess
from shoal._role.identity import SOURCES
from shoal._role.worker_options import THREADS, program_options, repeated, share_of_cores, texts
from shoal._security import AccessRole, Credentials
from shoal._system import check_count, check_type, private_files
from shoal._system.waits import wait_notice
from shoal.client import Client
from shoal.v1 import token_pb2

_ROLES = ("coordinator", "server", "worker")
_AUDIT_LOG = "SHOAL_AUDIT_LOG"
_LOOPBACK = "127.0.0.1:0"
# Time that a role has to stop before it is killed.
_STOP_S = 10.0


class LocalCluster:
    """A coordinator, servers and workers, as child processes that listen on loopback.

        with shoal.LocalCluster(servers=2, workers=2, path=["examples"]) as cluster, cluster.client() as client:
            print(client.submit(shoal.Job("digits:Digits", workers=2)).wait())

    All processes end with the cluster, and all temporary files are removed, even if this process is killed. Works in
    scripts, notebooks and the REPL. A role that dies stays dead until `restart`, unlike with `shoal up`.

    One more process, the fork server, loads the code of all roles once and forks them. So `ps` shows its command line
    for each role, and `ps -o comm` the names, such as shoal:server-0. Environment variables that libraries read when
    they load, such as OMP_NUM_THREADS, are the same for all roles.

    Args:
        servers: number of servers. With 0, jobs wait for a server.
        workers: number of workers. 0 suits a cluster whose workers are sessions.
        path: folder from which workers import programs, or several of them.
        allow_programs: one or more patterns of the programs that jobs may name, as for `shoal worker --allow-program`.
            An empty sequence means the default: the modules under `path`, and `shoal_nn`.
        trainer_env: one or more environment variables that programs get besides those that they always get, as for
            `shoal worker --trainer-env`: "AWS_ACCESS_KEY_ID" passes the worker's value, "NAME=VALUE" sets one.
        checkpoints: folder or URL of the checkpoint storage, which is kept. "" means no checkpoints, unless `flags` or
            `env` sets a storage.
        store: file for the coordinator's state, which is kept. A later cluster with the same file continues from it.
            "" means a temporary file.
        listen: host:port of the coordinator. Port 0 means any free port.
        page_listen: host:port of the web page. Port 0 means any free port, "" means no page.
        env: environment variables for the roles, in addition to those of this process. Programs get only some of them;
            see `trainer_env`. If OMP_NUM_THREADS, OPENBLAS_NUM_THREADS and MKL_NUM_THREADS are not set, the cores are
            divided among the workers.
        flags: further flags by role: {"coordinator": ["--heartbeat-timeout", "2"]}; see `shoal coordinator --help`.
        log_level: "debug", "info", "warning" or "error".
        log_dir: folder for one log file per role, which is kept. None means temporary log files.
        show_logs: whether the roles log to this process's standard error instead of files.
        start_timeout_s: how long the start of all roles may take, in seconds. The first start compiles kernels.

    Raises:
        BadRequest: servers or workers is not a whole number, 0 or more; a folder of `path` does not exist; an address
            is not host:port; or another argument has the wrong type.
    """

    def __init__(
        self,
        servers: int = 2,
        workers: int = 2,
        *,
        path: str | Path | Sequence[str | Path] = (".",),
        allow_programs: str | Sequence[str] = (),
        trainer_env: str | Sequence[str] = (),
        checkpoints: str | Path = "",
        store: str | Path = "",
        listen: str = _LOOPBACK,
        page_listen: str = _LOOPBACK,
        env: Mapping[str, str] | None = None,
        flags: Mapping[str, Sequence[str]] | None = None,
        log_level: str = "warning",
        log_dir: str | Path | None = None,
        show_logs: bool = False,
        start_timeout_s: float = 120.0,
    ) -> None:
        servers, workers = check_count("servers", servers), check_count("workers", workers)
        for address in filter(None, (listen, page_listen)):
            _rpc.parse_address(address)
        self._counts = {"server": servers, "worker": workers}
        self._path = _program_folders(path)
        self._programs = program_options(allow_programs, trainer_env)
        self._checkpoints, self._store = str(checkpoints), str(store)
        self._listen, self._page_listen = listen, page_listen
        for name, place in {"checkpoints": checkpoints, "store": store}.items():
            check_type(name, place, (str, os.PathLike), "a path, or '' for none")
        check_type("env", env, (Mapping, NoneType), "a dict, such as {'OMP_NUM_THREADS': '4'}")
        combined = {**os.environ, **(env or {})}
        # Flags set the identity of each role, so variables for this process's own identity are left out.
        given = {name: value for name, value in combined.items() if name not in SOURCES}
        # Each worker gets its share of the cores, so that the workers do not compete.
        share = {} if any(name in given for name in THREADS) else share_of_cores(os.cpu_count() or 1, workers)
        self._env = {**given, **share}
        self._flags = _flags_by_role(flags or {})
        self._log_level, self._show_logs, self._start_timeout_s = log_level, show_logs, start_timeout_s
        self._log_dir = None if log_dir is None else Path(log_dir)
        self._processes: dict[tuple[str, int], RoleProcess] = {}
        self._fork_server: ForkServer | None = None  # while the cluster runs; see `_forks`
        self._state: Path | None = None  # the coordinator's temporary folder while the cluster runs
        # While the cluster runs: the coordinator's ports, so that a restart finds them free, and what holds the folder.
        self._reserved = ExitStack()
        self._addresses = (listen, page_listen, _LOOPBACK)

    @property
    def address(self) -> str:
        """The host:port of the coordinator."""
        return self.process("coordinator").address

    @property
    def page(self) -> str:
        """The URL of the web page, or "" without one. The page asks for a login; see `login_link`."""
        return self.process("coordinator").page

    @property
    def metrics(self) -> dict[str, str]:
        """The host:port of each role's /metrics, by the role's name, such as "server-0"."""
        return {process.name: process.metrics for process in self.processes}

    @property
    def processes(self) -> list[RoleProcess]:
        """The processes of all roles: the coordinator, the servers and the workers."""
        return list(self._processes.values())

    def process(self, role: str, index: int = 0) -> RoleProcess:
        """Returns the process of one role.

        Args:
            role: "coordinator", "server" or "worker".
            index: number of the role among its kind, from 0.
        """
        return self._processes[role, index]

    def client(self) -> Client:
        """Returns a new client of this cluster. Close it, or use it in a `with` statement."""
        return Client(self.address, credentials=Credentials.find(environment=self._env))

    def login_link(self) -> str:
        """Returns a new link that opens the web page and logs the browser in.

        Each link can be used once, within ten minutes; `shoal page --coordinator ADDRESS` prints another one.

        Raises:
            NotConfigured: the cluster has no page.
            Unreachable: the coordinator does not answer.
        """
        found = Credentials.find(environment=self._env).for_coordinator(self.address, AccessRole.ADMIN)
        with closing(_rpc.CoordinatorClient(self.address, credentials=found)) as client:
            return client.call(client.tokens.GetLoginLink, token_pb2.GetLoginLinkRequest()).link

    def start(self) -> None:
        """Starts all roles, and returns when they are ready. A `with` statement calls it.

        Raises:
            StartFailed: the cluster runs already, or a role did not start. The message has the end of the role's log.
        """
        if self._processes:
            raise errors.StartFailed("this cluster is already running; stop it first, or create another")
        deadline = time.monotonic() + self._start_timeout_s
        with ExitStack() as undo, wait_notice("the start of the local cluster", self._starting):
            undo.callback(self.stop)
            self._make_folders()
            self._state = Path(tempfile.mkdtemp(prefix="shoal-"))
            self._reserved.callback(os.close, private_files.hold(self._state))
            self._addresses = self._reserve(self._listen), self._reserve(self._page_listen), self._reserve(_LOOPBACK)
            coordinator = self._launch("coordinator", 0, *self._addresses)
            for role, count in self._counts.items():
                if count:
                    self._forks().load(role)  # while the coordinator starts
            coordinator.wait_ready(deadline - time.monotonic())
            listen, page, metrics = self._addresses
            if coordinator.page:  # a restart keeps its port, which may be another one than the wanted one
                self._addresses = listen, f"{page.rpartition(':')[0]}:{urlsplit(coordinator.page).port}", metrics
            members = [self._launch(role, index) for role, count in self._counts.items() for index in range(count)]
            for process in members:
                process.wait_ready(deadline - time.monotonic())
            undo.pop_all()

    def stop(self) -> None:
        """Stops all roles, workers first, the coordinator last. The end of a `with` statement calls it."""
        if self._fork_server and not all(process.pid for process in self.processes):
            self._fork_server.kill()  # it would go on loading, to start roles that nobody wants any more
        for role in reversed(_ROLES):
            ending = [process for process in self.processes if process.role == role]
            for process in ending:
                process.ask_to_stop()
            for process in ending:
                process.reap(_STOP_S)
                del self._processes[process.role, process.index]
        if self._fork_server:
            self._fork_server.close()
            self._fork_server = None
        self._reserved.close()
        if self._state:
            shutil.rmtree(self._state, ignore_errors=True)
            self._state = None

    def kill(self, role: str, index: int = 0) -> None:
        """Kills one role, as a crash would.

        Args:
            role: "coordinator", "server" or "worker".
            index: number of the role among its kind, from 0.
        """
        self.process(role, index).kill()

    def restart(self, role: str, index: int = 0) -> RoleProcess:
        """Starts a role again under the same name; kills it first if it still runs.

        A coordinator keeps its address and the addresses of its page and its metrics. It also keeps its state, unless
        its flags have `--store memory`. A killed member can register again only after the heartbeat timeout.

        Args:
            role: "coordinator", "server" or "worker".
            index: number of the role among its kind, from 0.

        Returns:
            The new process.

        Raises:
            StartFailed: the role did not start.
        """
        old = self.process(role, index)
        old.kill()
        old.reap(_STOP_S)
        return self._ready(self._launch(role, index, *(self._addresses if role == "coordinator" else ())), "restart")

    def add_worker(self) -> RoleProcess:
        """Starts one more worker. It joins a running job that `Job.max_workers` allows it to join.

        Returns:
            The process. After `send_signal(signal.SIGTERM)` the worker finishes its batch and leaves.

        Raises:
            StartFailed: the worker did not start.
        """
        return self._add("worker")

    def add_server(self) -> RoleProcess:
        """Starts one more server, which soon gets its share of the shards of running jobs.

        Returns:
            The process. After `send_signal(signal.SIGTERM)` it moves its shards to other servers and leaves.

        Raises:
            StartFailed: it did not start.
        """
        return self._add("server")

    def __enter__(self) -> "LocalCluster":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _add(self, role: str) -> RoleProcess:
        taken = (process.index for process in self.processes if process.role == role)
        return self._ready(self._launch(role, max(taken, default=-1) + 1), "start")

    def _ready(self, process: RoleProcess, what: str) -> RoleProcess:
        with wait_notice(f"the {what} of {process.name}", str):
            process.wait_ready(self._start_timeout_s)
        return process

    def _forks(self) -> ForkServer:
        """Returns the fork server, which is started if it does not run yet, or not any more."""
        if self._fork_server is None or not self._fork_server.running:
            if self._fork_server:
                self._fork_server.close()
            self._fork_server = ForkServer(self._env, show_log=self._show_logs)
        return self._fork_server

    def _make_folders(self) -> None:
        """Creates the folders of the store and the checkpoints.

        A role does not create them, since that would hide a volume that is not mounted. Here there are no volumes.
        """
        missing = [Path(self._store).expanduser().parent] if self._store and self._store != "memory" else []
        if self._checkpoints and "://" not in self._checkpoints:
            missing.append(Path(self._checkpoints))
        for folder in missing:
            with suppress(OSError):  # the role reports what is wrong
                private_files.make_folder(folder)

    def _reserve(self, listen: str) -> str:
        """Reserves an address until the end of the cluster, and returns it with the port that it has."""
        try:
            host, port = _rpc.parse_address(listen)
            holder = self._reserved.enter_context(_rpc.reserve(host, port))
        except (errors.BadRequest, OSError):
            return listen  # "", or an address at which the role cannot listen: the role reports what is wrong
        return f"{host}:{holder.getsockname()[1]}"

    def _starting(self) -> str:
        """Returns the roles that are not ready, for people who wait for them."""
        names = [process.name for process in self.processes if not process.address]
        return f"for {', '.join(names)} (the first start compiles kernels)" if names else ""

    def _audit_flags(self, server: str) -> list[str]:
        """Returns the options for the audit log of a server: a file beside the coordinator's, because roles share none.

        With a folder or `none`, the server itself chooses.
        """
        log = self._env.get(_AUDIT_LOG) or (f"{self._store}.audit.jsonl" if self._store not in ("", "memory") else "")
        if not log or log == "none" or Path(log).is_dir():
            return []
        return ["--audit-log", f"{log.removesuffix('.jsonl')}.{server}.jsonl"]

    def _launch(
        self, role: str, index: int, listen: str = _LOOPBACK, page_listen: str = "", metrics_listen: str = _LOOPBACK
    ) -> RoleProcess:
        flags = ["--listen", listen, "--metrics-listen", metrics_listen, "--log-level", self._log_level]
        if role == "coordinator":
            # If this process is killed, the coordinator removes the folder.
            flags += ["--store", self._store or f"{self._state}/coordinator.db", "--scratch", str(self._state)]
            flags += ["--page-listen", page_listen]
        else:
            flags += ["--coordinator", self.address, "--name", f"{role}-{index}"]
        if role == "server":
            flags += self._audit_flags(f"{role}-{index}")
        if role != "worker" and self._checkpoints:
            flags += ["--checkpoints", self._checkpoints]
        if role == "worker":
            flags += [*repeated("--path", self._path), *self._programs]
        process = RoleProcess(
            role,
            index,
            [*flags, *self._flags.get(role, ())],
            fork_server=self._forks(),
            log_dir=self._log_dir,
            show_log=self._show_logs,
        )
        self._processes[role, index] = process
        return process


def _program_folders(path: Any) -> list[str]:
    """Returns the absolute paths of the folders of programs."""
    check_type("path", path, (str, os.PathLike, Sequence), "a folder, such as 'examples', or a list of folders")
    resolved = []
    for item in path if isinstance(path, Sequence) and not isinstance(path, str) else [path]:
        check_type("path", item, (str, os.PathLike), "a folder, such as 'examples', or a list of folders")
        folder = Path(item).resolve()
        if not folder.is_dir():
            raise errors.BadRequest(f"path {str(item)!r} is not a folder ({folder}); create it, or name another one")
        resolved.append(str(folder))
    return resolved


def _flags_by_role(flags: Any) -> dict[str, list[str]]:
    give = "a dict of lists, such as {'coordinator': ['--heartbeat-timeout', '2']}"
    check_type("flags", flags, Mapping, give)
    for role, given in flags.items():
        if role not in _ROLES or isinstance(given, str):
            raise errors.BadRequest(f"flags has {role!r}: {given!r}; give {give} with the keys {', '.join(_ROLES)}")
    return {role: texts(f"flags[{role!r}]", given, give) for role, given in flags.items()}


__all__ = ["LocalCluster"]
