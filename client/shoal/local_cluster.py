"""A whole cluster on this machine, as child processes: for trying things out, for notebooks and for tests."""

import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

from shoal import errors
from shoal._role import RoleProcess
from shoal._role.identity import SOURCES
from shoal.client import Client

_ROLES = ("coordinator", "server", "worker")
_LOOPBACK = "127.0.0.1:0"
# How long a role may take to end before it is killed.
_STOP_S = 10.0
# What libraries of linear algebra look at for the number of their threads.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class LocalCluster:
    """A coordinator, servers and workers on loopback.

        with shoal.LocalCluster(servers=2, workers=2, path=["examples"]) as cluster, cluster.client() as client:
            print(client.submit(shoal.Job("digits:Digits", workers=2)).wait())

    No process, port or file outlives it, even if this process is killed. Works in scripts, notebooks and the REPL.

    Args:
        servers: how many.
        workers: how many; 0 for a cluster whose workers are sessions.
        path: folders that workers import programs from.
        checkpoints: folder or URL that checkpoints are written to, which stay. Empty: none are taken, unless `flags` or
            `env` says where.
        store: file that keeps the coordinator's state when the cluster ends, and from which it goes on. Empty: a
            temporary one.
        listen: host:port of the coordinator; port 0 takes any free one.
        page_listen: host:port of the page to watch it; port 0 takes any free one; empty: no page.
        env: environment variables for the roles, beside this process's own. Where neither says how many threads
            linear algebra takes (OMP_NUM_THREADS), each worker gets its share of the cores.
        flags: further flags by role: {"coordinator": ["--lease", "2"]}; see `shoal coordinator --help`.
        log_level: debug, info, warning or error.
        log_dir: folder for the roles' logs, one file each, which stay. None: kept only as long as the cluster runs.
        show_logs: roles log to this process's standard error instead.
        start_timeout_s: how long all of it may take to start. The first start compiles the optimizers' kernels.

    Raises:
        BadRequest: servers or workers is not a whole number, 0 or more.
        StartFailed: on entering: a role did not start; the message has the end of its log.
    """

    def __init__(
        self,
        servers: int = 2,
        workers: int = 2,
        *,
        path: Sequence[str | Path] = (".",),
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
        self._counts = {"server": _checked("servers", servers), "worker": _checked("workers", workers)}
        self._path = [str(Path(folder).resolve()) for folder in path]
        self._checkpoints, self._store = str(checkpoints), str(store)
        self._listen, self._page_listen = listen, page_listen
        told = {**os.environ, **(env or {})}
        # They are told by flags who they are, whatever this process may be to others.
        given = {name: value for name, value in told.items() if name not in SOURCES}
        self._env = given if any(name in given for name in _THREADS) else {**given, **_share_of_cores(workers)}
        self._flags = flags or {}
        self._log_level = log_level
        self._log_dir = None if log_dir is None else Path(log_dir)
        self._show_logs = show_logs
        self._start_timeout_s = start_timeout_s
        self._processes: dict[tuple[str, int], RoleProcess] = {}
        self._state: Path | None = None  # the folder of the coordinator's store, as long as it runs

    @property
    def address(self) -> str:
        """The coordinator's host:port."""
        return self.process("coordinator").address

    @property
    def page(self) -> str:
        """The URL of the page to watch it; empty: it has none."""
        return self.process("coordinator").page

    @property
    def metrics(self) -> dict[str, str]:
        """The host:port of /metrics of each role, by its name ("server-0")."""
        return {process.name: process.metrics for process in self.processes}

    @property
    def processes(self) -> list[RoleProcess]:
        """All roles: the coordinator, the servers, the workers."""
        return list(self._processes.values())

    def process(self, role: str, index: int = 0) -> RoleProcess:
        """One role."""
        return self._processes[role, index]

    def client(self) -> Client:
        """A new client of this cluster; close it, or use it in a `with`."""
        return Client(self.address)

    def start(self) -> None:
        """Starts all roles and returns when they are ready; what `with` does.

        Raises:
            StartFailed: a role did not start, or this cluster was started already and not stopped since.
        """
        if self._processes:
            raise errors.StartFailed("this cluster was started already; stop it first, or make another LocalCluster")
        deadline = time.monotonic() + self._start_timeout_s
        with ExitStack() as undo:
            undo.callback(self.stop)
            self._make_folders()
            self._state = Path(tempfile.mkdtemp(prefix="shoal-"))
            coordinator = self._launch("coordinator", 0, self._listen, self._page_listen)
            coordinator.wait_ready(deadline - time.monotonic())
            members = [self._launch(role, index) for role, count in self._counts.items() for index in range(count)]
            for process in members:
                process.wait_ready(deadline - time.monotonic())
            undo.pop_all()

    def stop(self) -> None:
        """Ends all roles, workers first, the coordinator last; what the end of `with` does."""
        for role in reversed(_ROLES):
            ending = [process for process in self.processes if process.role == role]
            for process in ending:
                process.ask_to_stop()
            for process in ending:
                process.reap(_STOP_S)
                del self._processes[process.role, process.index]
        if self._state:
            shutil.rmtree(self._state, ignore_errors=True)
            self._state = None

    def kill(self, role: str, index: int = 0) -> None:
        """Ends one role as a crash would."""
        self.process(role, index).kill()

    def restart(self, role: str, index: int = 0) -> RoleProcess:
        """Starts a role anew under its name, having killed it if it still runs.

        The coordinator keeps its address, its page's and, unless its flags say `--store memory`, all that it knew.

        Raises:
            StartFailed: it did not start. A killed member is let in again only when its last life's lease has ended.
        """
        old = self.process(role, index)
        old.kill()
        old.reap(_STOP_S)
        if role == "coordinator":
            listen, page_listen = _same_port(self._listen, old.address), _same_port(self._page_listen, old.page)
            process = self._launch(role, index, listen, page_listen)
        else:
            process = self._launch(role, index)
        process.wait_ready(self._start_timeout_s)
        return process

    def add_worker(self) -> RoleProcess:
        """Starts one more worker. It joins a running job that has room for it (`Job.max_workers`).

        Returns:
            Its process; `send_signal(signal.SIGTERM)` has it finish its batch and leave.

        Raises:
            StartFailed: it did not start.
        """
        number = max((process.index for process in self.processes if process.role == "worker"), default=-1) + 1
        process = self._launch("worker", number)
        process.wait_ready(self._start_timeout_s)
        return process

    def __enter__(self) -> "LocalCluster":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _make_folders(self) -> None:
        """A role makes none that it is told of, lest it hide that a volume was forgotten; here nobody mounts any."""
        folders = [Path(self._store).expanduser().parent] if self._store and self._store != "memory" else []
        if self._checkpoints and "://" not in self._checkpoints:
            folders.append(Path(self._checkpoints))
        for folder in folders:
            with suppress(OSError):  # the role says what is wrong
                folder.mkdir(parents=True, exist_ok=True)

    def _launch(self, role: str, index: int, listen: str = _LOOPBACK, page_listen: str = "") -> RoleProcess:
        flags = ["--listen", listen, "--metrics-listen", _LOOPBACK, "--log-level", self._log_level]
        if role == "coordinator":
            # Should this process be killed, it is the coordinator that removes the folder.
            flags += ["--store", self._store or f"{self._state}/coordinator.db", "--scratch", str(self._state)]
            flags += ["--page-listen", page_listen]
        else:
            flags += ["--coordinator", self.address, "--name", f"{role}-{index}"]
        if role != "worker" and self._checkpoints:
            flags += ["--checkpoints", self._checkpoints]
        if role == "worker":
            flags += [flag for folder in self._path for flag in ("--path", folder)]
        process = RoleProcess(
            role,
            index,
            [*flags, *self._flags.get(role, ())],
            env=self._env,
            log_dir=self._log_dir,
            show_log=self._show_logs,
        )
        self._processes[role, index] = process
        return process


def _same_port(listen: str, address: str) -> str:
    """Where to listen again: at the host that was asked for and, if it came so far, at the port that was got."""
    return f"{listen.rpartition(':')[0]}:{address.rpartition(':')[2]}" if address else listen


def _share_of_cores(workers: int) -> dict[str, str]:
    """Else every worker would take all cores, and they would spend them on waiting for each other."""
    share = max(1, (os.cpu_count() or 1) // max(1, workers))
    return dict.fromkeys(_THREADS, str(share))


def _checked(name: str, count: object) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise errors.BadRequest(f"{name} is {count!r}; it must be a whole number, 0 or more", **{name: count})
    return count


__all__ = ["LocalCluster"]
