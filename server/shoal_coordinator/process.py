"""The assembly of a coordinator in this process: its store, the shell, its services on a port, its page and metrics."""

import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from prometheus_client import CollectorRegistry

from shoal import _rpc, errors
from shoal._checkpoint import CheckpointStorage, open_shared_storage, probe
from shoal._limits import catalogue
from shoal._role.audit_log import AuditLog, audit_file
from shoal._security import NO_CREDENTIALS, AccessFile, AccessRole, Authorizer, CopyGrant, Credentials, open_authorizer
from shoal.v1 import coordinator_pb2_grpc, group_pb2_grpc, job_pb2_grpc, token_pb2_grpc
from shoal_coordinator.access import Access
from shoal_coordinator.api import CoordinatorService, GroupsService, JobsService, TokensService
from shoal_coordinator.cluster import DEAD_KEPT_S, ClusterPolicy, EvenPlacement, JobLimits, PlacementPolicy
from shoal_coordinator.coordinator import Coordinator
from shoal_coordinator.effects import GrantFor
from shoal_coordinator.groups import GroupRegistry
from shoal_coordinator.logins import Logins
from shoal_coordinator.messages import record_keys
from shoal_coordinator.metrics import StateCollector, count_events
from shoal_coordinator.persistence import MEMORY, Store, open_store

if TYPE_CHECKING:
    from shoal_coordinator.page import PageServer

_log = structlog.get_logger(__name__)

# A member that cannot make them is declared lost.
ESSENTIAL_CALLS = ("shoal.v1.Coordinator/Register", "shoal.v1.Coordinator/Heartbeat")


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """The configuration of a coordinator.

    Attributes:
        listen: host:port. Port 0 takes any free port.
        advertise: The host under which others reach the coordinator. Empty means the bound host.
        store: Path of the file with its state, or "memory" for a state that ends with the process.
        heartbeat_timeout_s: Seconds without a heartbeat after which a member is dead.
        heartbeat_interval_s: Seconds between two heartbeats of a member in a small cluster. It is less than half the
            timeout, so that a member may miss one heartbeat. In a large cluster the interval is longer.
        keep_finished: The number of newest ended jobs that are kept with their variables. The same number of ended jobs
            without variables is kept.
        checkpoints: URL or path of the checkpoint storage, the same as the servers'. Empty means none.
        server_return_s: Seconds that jobs wait for a drained server to come back, 0 to 600.
        placement: The policy that assigns shards to servers.
        jobs: The limits of jobs.
        holder_members: The limit of live members whose tokens or certificates have the same name.
        max_watchers: Concurrent calls that watch jobs.
        threads: Concurrent calls of all other kinds. They wait only for the store.
        page_listen: host:port of the page. Port 0 takes any free port; empty means no page.
        page_hosts: Further names of the page, beside those of loopback and the host of `page_listen`.
        page_or_any: Whether the page takes any free port if its port is in use.
        page_read_only: Whether the page refuses all actions.
        max_page_watchers: Concurrent streams of updates to pages.
        credentials: What the coordinator presents. With TLS settings, its ports accept TLS only.
        secure: Whether each call must have a token. False allows every caller everything.
        audit_log: File or folder of the audit log. Empty means a file beside the store, and "none" means no log.
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
    jobs: JobLimits = field(default_factory=JobLimits)
    holder_members: int = catalogue.HOLDER_MEMBERS.default
    max_watchers: int = catalogue.WATCHERS.default
    threads: int = 32
    page_listen: str = ""
    page_hosts: tuple[str, ...] = ()
    page_or_any: bool = False
    page_read_only: bool = False
    max_page_watchers: int = catalogue.PAGE_STREAMS.default
    credentials: Credentials = NO_CREDENTIALS
    secure: bool = False
    audit_log: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_interval_s < self.heartbeat_timeout_s / 2:
            raise errors.BadRequest(
                f"the heartbeat interval is {self.heartbeat_interval_s:g} s and the heartbeat timeout is "
                f"{self.heartbeat_timeout_s:g} s: the interval must be above 0 and less than half the timeout, so that "
                "one lost heartbeat does no harm",
                heartbeat_interval_s=self.heartbeat_interval_s,
                heartbeat_timeout_s=self.heartbeat_timeout_s,
            )
        if self.keep_finished < 0:
            raise errors.BadRequest(f"keep_finished is {self.keep_finished} jobs; it must be 0 or more")
        if not 0 <= self.server_return_s <= DEAD_KEPT_S:
            raise errors.BadRequest(
                f"server_return_s is {self.server_return_s:g} s; it must be 0 to {DEAD_KEPT_S:g}, the time for which "
                "the coordinator remembers dead members",
                server_return_s=self.server_return_s,
            )


class CoordinatorProcess:
    """A running coordinator, created by `start_coordinator`.

    Args:
        config: the coordinator's options.
        registry: registry of the coordinator's metrics.
        on_failure: called with the error after which the coordinator cannot continue.

    Attributes:
        address: host:port of its services.
        coordinator: the state machine of the cluster and its jobs, and the threads that drive it.
        page: The URL of its page, or empty if it has none.
        access: The cluster's tokens. None means that it asks for none.
    """

    def __init__(
        self, config: CoordinatorConfig, registry: CollectorRegistry, on_failure: Callable[[errors.ShoalError], None]
    ) -> None:
        policy = ClusterPolicy(
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            heartbeat_interval_s=config.heartbeat_interval_s,
            keep_finished=config.keep_finished,
            checkpoints=bool(config.checkpoints),
            server_return_s=config.server_return_s,
            placement=config.placement,
            jobs=config.jobs,
            holder_members=config.holder_members,
        )
        self.access: Access | None = None
        self._credentials = config.credentials
        self._local_tokens: dict[AccessRole, str] = {}
        self._host = _rpc.parse_address(config.listen)[0]
        self._page: PageServer | None = None
        with ExitStack() as undo:
            self._store = open_store(config.store)
            undo.callback(self._store.close)
            storage = open_shared_storage(config.checkpoints) if config.checkpoints else None
            self.coordinator = _coordinator(
                config, self._store, policy, registry, on_failure, storage, self._credentials_for, self._grant_for
            )
            self._check_store(config)
            self.access = access = self._open_access() if config.secure else None
            self.authorizer = Authorizer(access.verifier, members=access.members) if access else open_authorizer()
            if storage:
                _probe(storage, needed=self.coordinator.has_live_jobs)
            self._audit = AuditLog("coordinator", _audit_file(config), registry)
            undo.callback(self._audit.close)
            self._jobs = JobsService(
                self.coordinator,
                storage,
                max_watchers=config.max_watchers,
                limits=config.jobs,
                has_ended=access.has_ended if access else lambda _: False,
            )
            undo.callback(self._jobs.close)
            logins = Logins(access, time.time) if access else None
            self._groups = GroupRegistry()
            self._server = self._make_server(config, logins)
            undo.callback(self._server.stop)
            self._page = _start_page(config, self.coordinator, self._groups, storage, logins, self._audit.note)
            undo.pop_all()
        state = StateCollector(
            self.coordinator,
            lambda: self._jobs.watchers,
            checkpoints=storage is not None,
        )
        registry.register(state)
        self.address = self._server.address
        self._store.publish_address(self.address)
        self.coordinator.start(self._server.take_essential_delays, self._jobs.end_refused)
        if self.access:
            self.access.start()
        self._give_local_tokens()
        self._server.start()
        self._server.set_ready(True)

    def _make_server(self, config: CoordinatorConfig, logins: Logins | None) -> _rpc.RpcServer:
        self._members = CoordinatorService(
            self.coordinator, heartbeat_timeout_s=config.heartbeat_timeout_s, access=self.access
        )
        tokens = TokensService(self.coordinator, self.access, logins, lambda: self.page, self._give_local_tokens)
        return _rpc.RpcServer(
            config.listen,
            [
                ("shoal.v1.Coordinator", coordinator_pb2_grpc.add_CoordinatorServicer_to_server, self._members),
                (
                    "shoal.v1.Groups",
                    group_pb2_grpc.add_GroupsServicer_to_server,
                    GroupsService(self._groups),
                ),
                ("shoal.v1.Jobs", job_pb2_grpc.add_JobsServicer_to_server, self._jobs),
                ("shoal.v1.Tokens", token_pb2_grpc.add_TokensServicer_to_server, tokens),
            ],
            threads=config.threads,
            advertise=config.advertise,
            essential=ESSENTIAL_CALLS,
            credentials=config.credentials,
            authorizer=self.authorizer if self.access else None,
            on_outcome=self._audit.note,
        )

    @property
    def page(self) -> str:
        """The URL of the page; empty if there is none."""
        return self._page.url if self._page else ""

    def stop(self) -> None:
        """Stops the coordinator. No thread, port or lock remains."""
        self._server.set_ready(False)
        if self._local_tokens:
            for file in self._access_files():
                file.remove(self._local_tokens)
        if self._page:
            self._page.stop()
        self._members.stop()
        self.coordinator.stop()
        self._server.stop()
        self._jobs.close()
        self._audit.close()
        self._store.close()

    def _check_store(self, config: CoordinatorConfig) -> None:
        """Checks that the store is not one of a cluster with tokens if this one has none; warns of the opposite.

        Raises:
            BadRequest: everybody could change the jobs of users whom tokens protected.
        """
        had_tokens = record_keys.ACCESS_KEY in self.coordinator.access_records
        if had_tokens and not config.secure:
            raise errors.BadRequest(
                f"the store {config.store} is one of a cluster that asks for tokens, and with --insecure everybody "
                "could change its jobs and checkpoints; start without --insecure, or with another --store",
                store=config.store,
            )
        if config.secure and not had_tokens and self.coordinator.has_live_jobs:
            _log.warning(
                "the store has jobs that were submitted without tokens",
                consequence="they continue, and only an admin can change them; nobody has proved who submitted them",
                fix="cancel the jobs that you do not know, and start servers and workers again without --insecure",
            )

    def _open_access(self) -> Access:
        return Access(self.coordinator.access_records, self.coordinator.write, time.time)

    def _credentials_for(self, server: str) -> Credentials:
        credentials, access = self._credentials, self.access
        return credentials.with_token(lambda: access.servers.token_for(server)) if access else credentials

    def _grant_for(self, copy: CopyGrant, backup: str, incarnation: int) -> str:
        return copy.signed(self.access.signer, backup, incarnation) if self.access else ""

    def _give_local_tokens(self) -> None:
        """Writes tokens to the file in which this user's processes on this machine find them.

        If the cluster asks for no tokens, those of an earlier start are removed.
        """
        if not self.access:
            for file in self._access_files():
                file.discard()
            return
        tokens = self.access.local_tokens()
        for file in self._access_files():
            file.write(tokens)
        self._local_tokens = tokens

    def _access_files(self) -> list[AccessFile]:
        """Returns the files for the addresses by which processes on this machine may call the coordinator."""
        host, port = _rpc.parse_address(self.address)
        others = [f"127.0.0.1:{port}"] if _rpc.is_everywhere(self._host) and host != "127.0.0.1" else []
        return [AccessFile(address) for address in (self.address, *others)]


def start_coordinator(
    config: CoordinatorConfig,
    registry: CollectorRegistry,
    on_failure: Callable[[errors.ShoalError], None] = lambda _: None,
) -> CoordinatorProcess:
    """Starts a coordinator in this process.

    Args:
        config: Its configuration.
        registry: The registry of its metrics.
        on_failure: Called once, from another thread, when the store has failed. The coordinator then refuses all calls,
            and the caller should stop it.

    Returns:
        The running coordinator.

    Raises:
        PortInUse: Another process listens on its port or on the page's port.
        StoreLocked: Another process has the store open.
        StoreUnreadable: The store is damaged, has a newer schema, or is not a store.
        StoreFailed: The store cannot be opened or created.
        BadRequest: Processes cannot share the checkpoint storage. Or the cluster of the store asked for tokens, and
            this coordinator does not.
        StorageFailed: The checkpoint storage cannot be written, and there are no live jobs.
    """
    return CoordinatorProcess(config, registry, on_failure)


def _audit_file(config: CoordinatorConfig) -> Path | None:
    """Returns the file of the audit log: the given one, or one beside the store; None for no log."""
    beside = None if config.store == MEMORY else Path(f"{config.store}.audit.jsonl")
    return audit_file(config.audit_log, "coordinator", beside)


def _probe(storage: CheckpointStorage, *, needed: bool) -> None:
    """Checks that checkpoints can be written.

    Args:
        storage: The checkpoint storage.
        needed: Whether live jobs need this coordinator. It then starts even if the disk is full.

    Raises:
        StorageFailed: Checkpoints cannot be written, and there are no live jobs.
    """
    try:
        probe(storage)
    except errors.StorageFailed as error:
        if not needed:
            raise
        _log.error("checkpoints cannot be written; jobs continue without them", reason=error.message)


def _start_page(
    config: CoordinatorConfig,
    coordinator: Coordinator,
    groups: GroupRegistry,
    storage: CheckpointStorage | None,
    logins: Logins | None,
    on_outcome: _rpc.OnOutcome,
) -> "PageServer | None":
    """Starts the page, if the configuration has one. Until the coordinator starts, the page reports it unavailable."""
    if not config.page_listen:
        return None
    from shoal_coordinator.page import PageServer  # noqa: PLC0415 - loaded only if the page is wanted

    def serve(listen: str) -> PageServer:
        return PageServer(
            coordinator,
            listen,
            hosts=config.page_hosts,
            storage=storage,
            read_only=config.page_read_only,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            max_watchers=config.max_page_watchers,
            tls=config.credentials.tls,
            logins=logins,
            on_outcome=on_outcome,
            groups=groups,
        )

    try:
        return serve(config.page_listen)
    except errors.PortInUse:
        if not config.page_or_any:
            raise
        return serve(f"{config.page_listen.rpartition(':')[0]}:0")


def _coordinator(
    config: CoordinatorConfig,
    store: Store,
    policy: ClusterPolicy,
    registry: CollectorRegistry,
    on_failure: Callable[[errors.ShoalError], None],
    storage: CheckpointStorage | None,
    credentials_for: Callable[[str], Credentials],
    grant_for: GrantFor,
) -> Coordinator:
    try:
        return Coordinator(
            store,
            secrets.token_hex(8),
            policy,
            count_events(registry),
            on_failure=on_failure,
            storage=storage,
            credentials_for=credentials_for,
            grant_for=grant_for,
        )
    except errors.StoreUnreadable as error:
        if "store" in error.details:
            raise
        raise errors.StoreUnreadable(
            f"the store {config.store} cannot be used: {error.message}. Restore a copy of it, or start with another "
            "--store",
            store=config.store,
        ) from error
