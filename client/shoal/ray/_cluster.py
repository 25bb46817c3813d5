"""The cluster, as its driver sees it: how it starts, scales and ends."""

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import ray

from shoal import _rpc, errors
from shoal._engines import (
    ROLES,
    Autoscaler,
    Request,
    RoleSpec,
    WorkerScaling,
    check_resources,
    read_wanted_workers,
    requests,
)
from shoal._security import AccessRole
from shoal._system import check_count, check_seconds
from shoal._system.waits import wait_notice
from shoal.client import Client
from shoal.ray._actor import LEAVE_S, STOP_S
from shoal.ray._actors import CALL_S, RoleActors
from shoal.ray._certificates import ClusterCertificates
from shoal.ray._flags import RoleFlags
from shoal.status import Role
from shoal.v1 import token_pb2

# Seconds in which a worker must start that the cluster adds by itself. If Ray has no room, a later look tries again.
_SCALE_S = 30.0
_STOPPED = "this cluster on Ray does not run; start it, or use it in a `with` statement"


class RayCluster:
    """A coordinator, servers and workers, as actors of Ray.

        ray.init()
        with shoal.ray.cluster(servers=2, workers=4) as cluster, cluster.client() as client:
            print(client.submit(shoal.Job("digits:Digits", workers=4)).wait())

    Each role is a child process of its actor. Ray starts an actor again when the actor or its role dies, and the role
    then has the same name. The servers are spread over the nodes, and the node of a server is its zone. The cluster has
    a CA of its own: all connections use TLS, and each role has its own certificate. Everything ends with the cluster,
    or when this process ends.

    Args:
        servers: number of servers.
        workers: number of workers.
        resources: what each role needs, by role: {"worker": {"CPU": 4, "GPU": 1}}. The default is 0.1 CPU for the
            coordinator, 0.4 for a server and 0.5 for a worker; another amount replaces it, and 0 removes it. A role
            computes with as many threads as the CPUs that it has here. A role without CPUs here has its share of the
            cores of its node: they are divided by `max_workers`. Each role has at least one thread.
        max_workers: largest number of workers. If it is more than `workers`, the cluster adds workers while its jobs
            can use them, and later removes idle ones. 0 means `workers`.
        idle_s: seconds of low demand before idle workers are removed.
        name: name of the cluster, unique in the namespace. Its actors are named NAME:ROLE-N.
        namespace: namespace of the actors. None means that of this process.
        path: folder from which workers import programs, or several of them, the same on each node. With a
            `working_dir` in the runtime environment of Ray, a relative path is in that folder.
        allow_programs: patterns of the programs that jobs may name; see `shoal.LocalCluster`.
        trainer_env: environment variables that programs get; see `shoal.LocalCluster`.
        checkpoints: URL of the checkpoint storage, or a folder that all nodes share. "" means no checkpoints.
        store: file for the coordinator's state, which is kept. "" means a temporary file on that node. To survive the
            loss of the node, it must be on storage that all nodes share, and whose locks and syncs work; not all
            network file systems have them.
        page: whether there is a web page.
        env: environment variables for the roles, in addition to those of Ray's processes.
        flags: further flags by role: {"coordinator": ["--heartbeat-timeout", "2"]}; see `shoal coordinator --help`.
        log_level: "debug", "info", "warning" or "error".
        start_timeout_s: how long the start of all roles may take, in seconds.
        wait_for_nodes: whether to wait for nodes that join later, such as those of Ray's autoscaler, for at most
            `start_timeout_s`. If not, the start fails at once if the present nodes are too small.

    Raises:
        BadRequest: an argument is not valid.
    """

    def __init__(
        self,
        servers: int = 2,
        workers: int = 2,
        *,
        resources: Mapping[str, Mapping[str, float]] | None = None,
        max_workers: int = 0,
        idle_s: float = 30.0,
        name: str = "shoal",
        namespace: str | None = None,
        path: str | Path | Sequence[str | Path] = (".",),
        allow_programs: str | Sequence[str] = (),
        trainer_env: str | Sequence[str] = (),
        checkpoints: str | Path = "",
        store: str | Path = "",
        page: bool = True,
        env: Mapping[str, str] | None = None,
        flags: Mapping[str, Sequence[str]] | None = None,
        log_level: str = "warning",
        start_timeout_s: float = 120.0,
        wait_for_nodes: bool = False,
    ) -> None:
        self._counts = check_count("servers", servers), check_count("workers", workers)
        self._most_workers = max(check_count("max_workers", max_workers), workers)
        check_seconds("idle_s", idle_s)
        check_seconds("start_timeout_s", start_timeout_s)
        self._idle_s, self._wait_for_nodes = idle_s, wait_for_nodes
        self._resources = check_resources(resources)
        # The default amounts are small, so that a cluster fits anywhere. They say nothing about threads.
        given = {role: amounts["CPU"] for role, amounts in (resources or {}).items() if "CPU" in amounts}
        self._threads = {role: max(1, int(cores)) for role, cores in given.items()}
        self._name, self._namespace = name, namespace
        self._flags = RoleFlags(
            path=path,
            allow_programs=allow_programs,
            trainer_env=trainer_env,
            checkpoints=str(checkpoints),
            store=str(store),
            flags=flags,
            log_level=log_level,
        )
        self._environment, self._page, self._start_timeout_s = dict(env or {}), page, start_timeout_s
        self._lock = threading.Lock()  # guards the attributes below; nobody waits with it
        self._roles: RoleActors | None = None  # while the cluster runs, as the next two
        self._certificates: ClusterCertificates | None = None
        self._scaler: Autoscaler | None = None
        self._draining: set[str] = set()  # workers that are being removed

    @property
    def address(self) -> str:
        """The host:port of the coordinator. It changes if Ray starts the coordinator again on another node."""
        return str(self._running.call("coordinator", "address"))

    @property
    def page(self) -> str:
        """The URL of the web page, or "" without one. The page asks for a login; see `login_link`."""
        return str(self.report("coordinator").get("page", ""))

    @property
    def metrics(self) -> dict[str, str]:
        """The host:port of each role's /metrics, by the role's name, such as "server-0". Roles that left have none."""
        found = {}
        for name in self.actors:
            with suppress(errors.StartFailed, errors.BadRequest):
                found[name] = str(self.report(name)["metrics"])
        return found

    @property
    def actors(self) -> dict[str, Any]:
        """The handles of the actors, by the names of their roles."""
        return self._running.handles

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables with which the commands of `shoal` reach this cluster from this machine."""
        return {"SHOAL_COORDINATOR": self.address, **self._issued.variables}

    def report(self, name: str) -> dict[str, Any]:
        """Returns what a role reports, when it is ready.

        Args:
            name: name of the role, such as "server-0".

        Returns:
            `address`, `metrics` and `pid` of the role; `actor`, the process id of its actor; and `node`, the id of its
            node. A coordinator with a page also has `page`.

        Raises:
            BadRequest: there is no such role.
            StartFailed: the role has left the cluster, or cannot start.
            Unreachable: its actor does not answer.
        """
        return self._running.report(name)

    def client(self) -> Client:
        """Returns a new client of this cluster, as an admin. Close it, or use it in a `with` statement."""
        return Client(self.address, credentials=self._issued.credentials)

    def login_link(self) -> str:
        """Returns a new link that opens the web page and logs the browser in. See `LocalCluster.login_link`.

        Raises:
            NotConfigured: the cluster has no page.
            Unreachable: the coordinator does not answer.
        """
        address = self.address
        found = self._issued.credentials.for_coordinator(address, AccessRole.ADMIN)
        with closing(_rpc.CoordinatorClient(address, credentials=found)) as client:
            return client.call(client.tokens.GetLoginLink, token_pb2.GetLoginLinkRequest()).link

    def start(self) -> None:
        """Starts all roles, and returns when they are ready. A `with` statement calls it.

        Raises:
            NotConfigured: Ray is not connected.
            StartFailed: the cluster runs already, the namespace has a cluster of this name, the nodes lack resources,
                or a role did not start.
        """
        if self._roles:
            raise errors.StartFailed("this cluster is already running; stop it first, or create another")
        if not ray.is_initialized():
            raise errors.NotConfigured("this process is not connected to Ray; call ray.init() first")
        deadline = time.monotonic() + self._start_timeout_s
        wanted = requests(*self._counts, self._resources)
        roles = RoleActors(self._name, self._namespace or ray.get_runtime_context().namespace, self._resources)
        roles.check_name()
        with ExitStack() as undo, wait_notice("the start of the cluster on Ray", self._starting):
            undo.callback(self.stop)
            with self._lock:
                self._roles = roles
            roles.place(wanted, deadline, wait_for_nodes=self._wait_for_nodes)
            self._certificates = ClusterCertificates()
            for request in wanted:
                roles.launch(self._spec(request.name))
            roles.wait_ready([request.name for request in wanted], deadline)
            if self._most_workers > self._counts[1]:
                self._start_autoscaler()
            undo.pop_all()

    def stop(self) -> None:
        """Stops all roles, workers first, the coordinator last. The end of a `with` statement calls it."""
        with self._lock:
            roles, self._roles = self._roles, None
            certificates, self._certificates = self._certificates, None
            scaler, self._scaler = self._scaler, None
        with ExitStack() as steps:  # the last one comes first, and each of them although another one has failed
            if certificates:
                steps.callback(certificates.remove)
            if roles:
                roles.refuse()
                steps.callback(roles.close)
                for role in ROLES:
                    steps.callback(_stop_all, roles, role)
            if scaler:
                steps.callback(scaler.stop, _SCALE_S + LEAVE_S)

    def add_worker(self) -> str:
        """Starts one more worker. It joins a running job that `Job.max_workers` allows it to join.

        Returns:
            The name of the worker.

        Raises:
            StartFailed: the nodes lack resources, or the worker did not start.
        """
        name = self._running.name_worker()
        self._add_worker(name, self._start_timeout_s)
        return name

    def remove_worker(self, name: str = "") -> None:
        """Removes a worker. It finishes its batch, and returns the rest of its data.

        Args:
            name: name of the worker, such as "worker-3". "" means the newest one that has no job, or the newest one.

        Raises:
            BadRequest: there is no such worker.
        """
        if not name:
            started = self.actors
            workers = {it: busy for it, busy in self._workers().items() if it in started}
            name = ([it for it, busy in workers.items() if not busy] or [*workers] or [""])[-1]
        with self._lock:
            roles = self._running
            if _role_of(name) != "worker" or name not in roles.handles or name in self._draining:
                raise errors.BadRequest(f"there is no worker {name!r}; `actors` has the names")
            self._draining.add(name)
        try:
            roles.end([name], "leave", LEAVE_S + 5)
        finally:
            with self._lock:
                self._draining.discard(name)

    def __enter__(self) -> "RayCluster":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _running(self) -> RoleActors:
        if self._roles is None:
            raise errors.NotConfigured(_STOPPED)
        return self._roles

    @property
    def _issued(self) -> ClusterCertificates:
        if self._certificates is None:
            raise errors.NotConfigured(_STOPPED)
        return self._certificates

    def _add_worker(self, name: str, timeout_s: float) -> None:
        roles, deadline = self._running, time.monotonic() + timeout_s
        try:
            roles.place([Request(name, self._resources["worker"])], deadline, wait_for_nodes=self._wait_for_nodes)
            roles.launch(self._spec(name))
            roles.wait_ready([name], deadline)
        except BaseException:
            roles.end([name], "stop", STOP_S)
            raise

    def _spec(self, name: str) -> RoleSpec:
        """Returns a role with a new certificate, whose key this process keeps nowhere else."""
        role = _role_of(name)
        # Browsers check the host of the coordinator. Roles and clients check each other's roles.
        hosts = dict.fromkeys(node["NodeManagerAddress"] for node in ray.nodes()) if role == "coordinator" else {}
        certificate, key = self._issued.issue(role, name, [*hosts])
        return RoleSpec(
            cluster=self._issued.cluster,
            role=role,
            name=name,
            ca=self._issued.ca,
            certificate=certificate,
            key=key,
            flags=tuple(self._flags.of(role)),
            environment=self._environment,
            page=self._page,
            threads=self._threads.get(role, 0),
            sharing=self._most_workers,
        )

    def _start_autoscaler(self) -> None:
        self._scaler = Autoscaler(
            WorkerScaling(self._counts[1], self._most_workers, self._idle_s),
            wanted=self._wanted_workers,
            workers=self._workers,
            name=self._running.name_worker,
            add=lambda name: self._add_worker(name, self._start_timeout_s if self._wait_for_nodes else _SCALE_S),
            remove=self.remove_worker,
        )
        self._scaler.start()

    def _workers(self) -> dict[str, bool]:
        """Returns the workers that are not leaving, the oldest first, and whether each of them may have a job.

        A worker that is coming, or starting again, may have one, so only a live worker without a job has none.
        """
        with self.client() as client:
            idle = {it.member for it in client.status().alive(Role.WORKER) if not it.job}
        workers = self._running.workers
        with self._lock:
            return {name: name not in idle for name in workers if name not in self._draining}

    def _wanted_workers(self) -> int:
        """Returns the coordinator's metric."""
        return read_wanted_workers(self.report("coordinator")["metrics"], *self._issued.files, timeout_s=CALL_S)

    def _starting(self) -> str:
        return "for its roles (the first start compiles kernels)" if self._certificates else "for resources of Ray"


def cluster(servers: int = 2, workers: int = 2, **options: Any) -> RayCluster:
    """Returns a cluster on Ray, which starts in a `with` statement.

    Args:
        servers: number of servers.
        workers: number of workers.
        options: further arguments of `RayCluster`.
    """
    return RayCluster(servers, workers, **options)


def _stop_all(roles: RoleActors, role: str) -> None:
    roles.end([name for name in roles.handles if _role_of(name) == role], "stop", STOP_S + 5)


def _role_of(name: str) -> str:
    return name.partition("-")[0]


__all__ = ["RayCluster", "cluster"]
