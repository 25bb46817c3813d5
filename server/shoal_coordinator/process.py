"""A whole coordinator in this process: its store, the shell, its services on a port, its metrics."""

import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog
from prometheus_client import CollectorRegistry

from shoal import _rpc, errors
from shoal._checkpoint import CheckpointStorage, open_shared_storage, probe
from shoal.v1 import coordinator_pb2_grpc, job_pb2_grpc
from shoal_coordinator.api import CoordinatorService, JobsService
from shoal_coordinator.cluster import DEAD_KEPT_S, ClusterPolicy, EvenPlacement, PlacementPolicy
from shoal_coordinator.coordinator import Coordinator
from shoal_coordinator.metrics import StateCollector, count_events
from shoal_coordinator.persistence import MEMORY, Store, open_store

if TYPE_CHECKING:
    from shoal_coordinator.page import PageServer

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """How a coordinator is run.

    Attributes:
        listen: host:port; port 0 takes any free one.
        advertise: host that others reach this one by; empty: the one bound.
        store: path of the file that has its state; "memory": its state ends with it.
        heartbeat_timeout_s: seconds of silence after which a member is dead.
        heartbeat_interval_s: seconds between two signs of life; less than half a lease, so that one may be lost.
        keep_finished: ended jobs whose variables stay readable.
        checkpoints: their folder, the same as the servers'; empty: none.
        server_return_s: how long jobs wait for a server that said that it was going, and went; 0 to 600.
        placement: which server holds which shard.
        max_watchers: calls that watch jobs at the same time.
        threads: calls of all other kinds that are answered at the same time; they wait for the store alone.
        page_listen: host:port of the page; port 0 takes any free one; empty: no page.
        page_hosts: names that the page is asked for by, beside those of loopback and the host listened at.
        page_read_only: nothing can be changed from the page.
        max_page_watchers: pages that are kept up to date at the same time.
    """

    listen: str = "127.0.0.1:7070"
    advertise: str = ""
    store: str = MEMORY
    heartbeat_timeout_s: float = 5.0
    heartbeat_interval_s: float = 0.5
    keep_finished: int = 8
    checkpoints: str = ""
    server_return_s: float = 60.0
    placement: PlacementPolicy = field(default_factory=EvenPlacement)
    max_watchers: int = 64
    threads: int = 32
    page_listen: str = ""
    page_hosts: tuple[str, ...] = ()
    page_read_only: bool = False
    max_page_watchers: int = 32

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_interval_s < self.heartbeat_timeout_s / 2:
            raise errors.BadRequest(
                f"a heartbeat every {self.heartbeat_interval_s:g} s with a lease of {self.heartbeat_timeout_s:g} s: the heartbeat must be "
                "above 0 and less than half the lease, so that members outlive the loss of one",
                heartbeat_interval_s=self.heartbeat_interval_s,
                heartbeat_timeout_s=self.heartbeat_timeout_s,
            )
        if self.keep_finished < 0:
            raise errors.BadRequest(f"keep_finished is {self.keep_finished}; it must be 0 or more jobs")
        if not 0 <= self.server_return_s <= DEAD_KEPT_S:
            raise errors.BadRequest(
                f"servers are waited for {self.server_return_s:g} s; it must be 0 to {DEAD_KEPT_S:g}, for so "
                "long the dead are remembered",
                server_return_s=self.server_return_s,
            )


class CoordinatorProcess:
    """A coordinator that runs; made by `start_coordinator`.

    Attributes:
        address: host:port of its services.
        page: the URL of its page; empty: it has none.
    """

    def __init__(
        self, config: CoordinatorConfig, registry: CollectorRegistry, on_failure: Callable[[errors.ShoalError], None]
    ) -> None:
        policy = ClusterPolicy(
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            keep_finished=config.keep_finished,
            checkpoints=bool(config.checkpoints),
            server_return_s=config.server_return_s,
            placement=config.placement,
        )
        with ExitStack() as undo:
            self._store = open_store(config.store)
            undo.callback(self._store.close)
            folder = open_shared_storage(config.checkpoints) if config.checkpoints else None
            self._coordinator = _coordinator(config, self._store, policy, registry, on_failure, folder)
            if folder:
                _probe(folder, needed=self._coordinator.has_live_jobs)
            members = CoordinatorService(
                self._coordinator,
                heartbeat_timeout_s=config.heartbeat_timeout_s,
                heartbeat_interval_s=config.heartbeat_interval_s,
            )
            self._jobs = JobsService(self._coordinator, folder, max_watchers=config.max_watchers)
            undo.callback(self._jobs.close)
            self._server = _rpc.RpcServer(
                config.listen,
                [
                    ("shoal.v1.Coordinator", coordinator_pb2_grpc.add_CoordinatorServicer_to_server, members),
                    ("shoal.v1.Jobs", job_pb2_grpc.add_JobsServicer_to_server, self._jobs),
                ],
                threads=config.threads,
                advertise=config.advertise,
            )
            undo.callback(self._server.stop)
            self._page = _start_page(config, self._coordinator, folder)
            undo.pop_all()
        state = StateCollector(self._coordinator, lambda: self._jobs.watchers, checkpoints=folder is not None)
        registry.register(state)
        self.address = self._server.address
        self._store.publish_address(self.address)
        self.page = self._page.url if self._page else ""
        self._coordinator.start()
        self._server.start()
        self._server.set_ready(True)

    def stop(self) -> None:
        """Ends it: no thread, port or lock is left."""
        self._server.set_ready(False)
        if self._page:
            self._page.stop()
        self._coordinator.stop()
        self._server.stop()
        self._jobs.close()
        self._store.close()


def start_coordinator(
    config: CoordinatorConfig,
    registry: CollectorRegistry,
    on_failure: Callable[[errors.ShoalError], None] = lambda _: None,
) -> CoordinatorProcess:
    """Starts a coordinator in this process.

    Args:
        config: how.
        registry: where its metrics go.
        on_failure: told once, from another thread, that the store has failed. The coordinator answers nothing any more
            then, and is to be stopped.

    Raises:
        PortInUse: another process listens there, or where the page is to be.
        StoreLocked: another process has the store open.
        StoreUnreadable: the store is damaged, of a newer version, or no store.
        StoreFailed: the store cannot be opened or made.
        BadRequest: the folder of checkpoints is none that processes can share.
        StorageFailed: it cannot be written, and no job goes on.
    """
    return CoordinatorProcess(config, registry, on_failure)


def _probe(folder: CheckpointStorage, *, needed: bool) -> None:
    """Looks whether checkpoints can be written.

    Args:
        folder: of them.
        needed: whether jobs wait for this coordinator. They are not to wait until a disk has room again: their
            checkpoints fail, as when that happens later.

    Raises:
        StorageFailed: they cannot, and nobody waits.
    """
    try:
        probe(folder)
    except errors.StorageFailed as error:
        if not needed:
            raise
        _log.error("checkpoints cannot be written; jobs go on without", reason=error.message)


def _start_page(
    config: CoordinatorConfig, coordinator: Coordinator, folder: CheckpointStorage | None
) -> "PageServer | None":
    """The page, if there is to be one; it answers from now on, at first that the coordinator is not there yet."""
    if not config.page_listen:
        return None
    from shoal_coordinator.page import PageServer  # noqa: PLC0415 - only whoever wants it pays for it

    return PageServer(
        coordinator,
        config.page_listen,
        hosts=config.page_hosts,
        folder=folder,
        read_only=config.page_read_only,
        heartbeat_timeout_s=config.heartbeat_timeout_s,
        heartbeat_interval_s=config.heartbeat_interval_s,
        max_watchers=config.max_page_watchers,
    )


def _coordinator(
    config: CoordinatorConfig,
    store: Store,
    policy: ClusterPolicy,
    registry: CollectorRegistry,
    on_failure: Callable[[errors.ShoalError], None],
    folder: CheckpointStorage | None,
) -> Coordinator:
    try:
        return Coordinator(
            store, secrets.token_hex(8), policy, count_events(registry), on_failure=on_failure, folder=folder
        )
    except errors.StoreUnreadable as error:
        if "store" in error.details:
            raise
        raise errors.StoreUnreadable(
            f"the store {config.store} cannot be used: {error.message}. Put back a copy of it, or begin anew with "
            "another --store",
            store=config.store,
        ) from error
