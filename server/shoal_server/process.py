"""Parameter server process: starts its parts in order and stops them in reverse order."""

import threading
from contextlib import ExitStack
from dataclasses import dataclass

import structlog
from prometheus_client import CollectorRegistry

from shoal import _rpc
from shoal._checkpoint import open_shared_storage, probe
from shoal._limits import catalogue
from shoal._role.audit_log import AuditLog, audit_file
from shoal._role.lifecycle import DrainState
from shoal._rpc import CoordinatorClient, MembershipClient
from shoal._security import NO_CREDENTIALS, AccessRole, Authorizer, Credentials
from shoal._system import memory_limit, open_files_warning
from shoal._transport import remove_stale
from shoal.status import ServerLoad
from shoal.v1 import coordinator_pb2
from shoal_server.calling_server import CallingServer
from shoal_server.checkpoints import CheckpointWriter
from shoal_server.draining import wait_until_drained
from shoal_server.metrics import ServerMetrics
from shoal_server.norm_sender import NormSender
from shoal_server.optimizers import compilation, kernels
from shoal_server.pools import call_pools
from shoal_server.replication import Backups, Copies, CopyPace
from shoal_server.serving import (
    SERVICE,
    DataService,
    EndpointConfig,
    EndpointGroup,
    ParameterServerServicer,
    add_to_server,
)
from shoal_server.shards import ShardStore

_log = structlog.get_logger(__name__)

# Open files of one lane: its socket, and a shared-memory segment while the two sides open it. The second number is for
# everything else: gRPC's connections, checkpoint files and the files of the process itself.
_FILES_PER_LANE, _OTHER_FILES = 2, 512
# The default part of the memory limit for values and slots. Gradients and copies of values need the rest.
_SHARD_PERCENT = 80
# The default part for values that readers use. An update leaves them to the readers, and continues in a copy.
_READER_PERCENT = 25


@dataclass(frozen=True)
class ServerConfig:
    """Configuration of a server. `shoal server --help` explains each field."""

    name: str
    coordinator: str
    listen: str = "127.0.0.1:0"
    advertise: str = ""
    zone: str = ""
    rpc_threads: int = 16
    lane_port: int = 0
    lanes: int = catalogue.LANES.default
    host_lanes: int = catalogue.HOST_LANES.default
    max_shard_bytes: int = 0
    max_reader_bytes: int = 0
    copy_bandwidth: int = 512
    checkpoints: str = ""
    retry_for_s: float = 30.0
    leave_grace_s: float = 60.0
    metrics_address: str = ""
    audit_log: str = ""
    credentials: Credentials = NO_CREDENTIALS


class Server:
    """A running parameter server: kernels are compiled, its port is open, and it is a member of its cluster.

    Args:
        config: the configuration.
        registry: gets the server's metrics.

    Raises:
        BadRequest, StorageFailed: the checkpoint storage is invalid or cannot be written.
    """

    def __init__(self, config: ServerConfig, registry: CollectorRegistry) -> None:
        storage = open_shared_storage(config.checkpoints) if config.checkpoints else None
        if storage:
            probe(storage)
        _log.info("kernels are ready", processor=compilation.processor(), seconds=round(kernels.warm_up(), 3))
        _warn_of_few_files(config.lanes)
        self._metrics = metrics = ServerMetrics(registry)
        most_bytes = config.max_shard_bytes or memory_limit() * _SHARD_PERCENT // 100
        self.store = ShardStore(
            metrics.applied,
            most_bytes,
            lambda job: NormSender(job, lambda: self._identity(job.name)),
            config.max_reader_bytes or memory_limit() * _READER_PERCENT // 100,
        )
        self._pools = call_pools(config.rpc_threads)
        if abandoned := remove_stale():
            _log.info("removed shared memory of dead processes", segments=len(abandoned))
        self.authorizer = Authorizer(server=config.name)  # refuses all calls until the server is registered
        backups = Backups(
            self.store, self.authorizer, self._on_broken_copy, incarnation=lambda: self._membership.incarnation
        )
        self._service = DataService(self.store, metrics, self.authorizer, backups)
        self._copies = Copies(
            self.store, self._identity, self._on_broken_copy, CopyPace(config.copy_bandwidth * 1_000_000)
        )
        # What the replies to heartbeats ask of this server. Only the heartbeat thread sets it.
        self.drain_state = DrainState.SERVING
        self._stopping = False
        self._audit = AuditLog("server", audit_file(config.audit_log, config.name), registry)
        with ExitStack() as undo:
            undo.callback(self._audit.close)
            self._endpoints = EndpointGroup(self._service, self._endpoint_config(config))
            undo.callback(self._endpoints.stop)
            self._writer = CheckpointWriter(storage, config.name)
            undo.callback(self._writer.close)
            self._rpc = self._rpc_server(config)
            undo.pop_all()
        metrics.watch(self.store, self._pools)
        self.address = self._rpc.address
        self._endpoints.start(self.address)
        self._rpc.start()
        self._coordinator, self._membership = self._coordinator_clients(config)
        try:
            self._membership.start()
        except BaseException:
            self._close()
            raise
        self._leave_grace_s = config.leave_grace_s
        self._rpc.set_ready(True)

    def _coordinator_clients(self, config: ServerConfig) -> tuple[CoordinatorClient, MembershipClient]:
        """Returns the client of the coordinator, and the one that keeps this server a member of its cluster."""
        coordinator = CoordinatorClient(
            config.coordinator,
            retry_for_s=config.retry_for_s,
            credentials=config.credentials.for_coordinator(config.coordinator, AccessRole.SERVER),
            on_silence=_log.warning,
        )
        registration = coordinator_pb2.RegisterRequest(
            role=coordinator_pb2.SERVER,
            member=config.name,
            address=self.address,
            metrics_address=config.metrics_address,
            zone=config.zone,
        )
        membership = MembershipClient(
            coordinator,
            registration,
            on_reply=self._on_reply,
            on_end=self._on_end_of_life,
            authorizer=self.authorizer,
            load=self._load,
        )
        return coordinator, membership

    def _rpc_server(self, config: ServerConfig) -> _rpc.RpcServer:
        servicer = ParameterServerServicer(
            self.store,
            self._endpoints,
            service=self._service,
            copies=self._copies,
            threads=self._pools,
            writer=self._writer,
        )
        return _rpc.RpcServer(
            config.listen,
            [(SERVICE, add_to_server, servicer)],
            threads=config.rpc_threads,
            advertise=config.advertise,
            credentials=config.credentials,
            values=True,
            authorizer=self.authorizer,
            on_outcome=self._audit.note,
        )

    def leave(self, stop_now: threading.Event) -> None:
        """Keeps serving until every job with shards here has a checkpoint and has resumed from it elsewhere.

        From now on, the health check reports that the server is not ready. If a user has ordered the drain, the
        coordinator has waited for the jobs already.

        Args:
            stop_now: set to end the wait early; the wait takes at most the grace period.
        """
        self._stopping = True
        self._rpc.set_ready(False)  # only probes ask; members are served until the end
        wait_until_drained(
            self._coordinator,
            self._membership,
            stop_now,
            self._leave_grace_s,
            hosted=lambda: [group.config.name for group in self.store.hosted.all() if not group.follows],
        )

    def stop(self) -> None:
        """Leaves the cluster, refuses new calls and frees all resources."""
        self._rpc.set_ready(False)
        self._membership.stop()
        self._close()

    def _endpoint_config(self, config: ServerConfig) -> EndpointConfig:
        return EndpointConfig(
            host=_rpc.parse_address(config.listen)[0],
            advertise=config.advertise,
            lane_port=config.lane_port,
            lanes=config.lanes,
            host_lanes=config.host_lanes,
            credentials=config.credentials,
            senders=self._pools["pull"],
            receivers=self._pools["push"],
            committers=self._pools["commit"],
            authorizer=self.authorizer,
            on_outcome=self._audit.note,
        )

    def _identity(self, job: str) -> CallingServer:
        """Returns who this server is in its calls to the other servers of a job."""
        member = self._membership
        return CallingServer(member.member, member.incarnation, member.credentials_in(job))

    def _load(self) -> tuple[int, int, ServerLoad]:
        # Each heartbeat calls this function, so periodic clean-up happens here.
        self.store.memory.trim()
        self._endpoints.end_stalled()
        self._service.end_refused()
        self._endpoints.end_refused()
        remove_stale()  # removes the names left by clients that were killed before the handshake
        store = self.store
        load = self._metrics.load(store.queues()[0], store.undelivered_norms(), store.broken_replicas())
        return *self.store.load(), load

    def _on_broken_copy(self) -> None:
        self._membership.heartbeat_now()  # the coordinator decides, and answers wait for that

    def _on_reply(self, reply: coordinator_pb2.HeartbeatReply) -> None:
        asked = DrainState.DRAINED if reply.leave else DrainState.DRAINING if reply.drains else DrainState.SERVING
        if asked is self.drain_state:
            return
        if asked is not DrainState.SERVING:
            _log.info("a user has ordered that this server drains", state=asked.value)
        self.drain_state = asked
        self._rpc.set_ready(asked is DrainState.SERVING and not self._stopping)

    def _on_end_of_life(self) -> None:
        # The coordinator has declared this incarnation lost, so its jobs have already lost these shards.
        shards, held = self.store.load()
        _log.warning("dropping the shards of an ended incarnation", shards=shards, bytes=held)
        self._copies.close()
        self.store.clear()
        self._writer.clear()

    def _close(self) -> None:
        self._coordinator.close()
        self._copies.close()
        self.store.clear()  # also ends the waiting pulls
        self._endpoints.stop()
        self._rpc.stop()
        self._writer.close()
        for pool in self._pools.values():
            pool.shutdown(wait=True)
        self._audit.close()


def _warn_of_few_files(lanes: int) -> None:
    if warning := open_files_warning(_FILES_PER_LANE * lanes + _OTHER_FILES, f"{lanes} lanes", "--lanes"):
        _log.warning("connections may be refused", reason=warning)
