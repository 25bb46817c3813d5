"""Command line of `shoal server`: its options and `SHOAL_*` variables."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from prometheus_client import CollectorRegistry

from shoal._numerics import kernels
from shoal._role import flags, lifecycle
from shoal._role.identity import RoleIdentity
from shoal._role.options import command_of
from shoal._system import hidden

if TYPE_CHECKING:
    from shoal_server.process import Server


RpcThreads = Annotated[
    int, typer.Option(envvar="SHOAL_RPC_THREADS", min=2, max=256, help="Number of threads for each kind of gRPC call.")
]
Zone = Annotated[
    str,
    typer.Option(
        envvar="SHOAL_ZONE",
        help="Zone of the server: at most 253 characters of a-z, 0-9, . and -. Servers of one zone may be lost "
        "together, so the two copies of a shard are in different zones if possible.",
        show_default="host of its address",
    ),
]
LanePort = Annotated[
    int,
    typer.Option(
        envvar="SHOAL_LANE_PORT",
        min=0,
        max=65_535,
        help="Port for lanes, on the host of --listen. Port 0 takes any free port.",
    ),
]
Lanes = Annotated[
    int,
    typer.Option(
        envvar="SHOAL_LANES",
        min=0,
        max=65_536,
        help="Limit of open lanes, the fast connections of workers. A worker opens two, and uses gRPC if it gets none.",
    ),
]
HostLanes = Annotated[
    int,
    typer.Option(
        envvar="SHOAL_HOST_LANES",
        min=0,
        max=65_536,
        help="Limit of open lanes of one host. Above the limit, workers of this host use gRPC.",
    ),
]
MaxShardBytes = Annotated[
    int,
    typer.Option(
        envvar="SHOAL_MAX_SHARD_BYTES",
        min=0,
        help="Limit of the bytes of all values and optimizer slots on this server. It refuses shards beyond the limit "
        "before it allocates them. The value 0 means 80% of the memory of the container or the machine.",
    ),
]
MaxReaderBytes = Annotated[
    int,
    typer.Option(
        envvar="SHOAL_MAX_READER_BYTES",
        min=0,
        help="Limit of the bytes of values that are being sent to pulls. An update copies values that are being sent, "
        "so the limit also bounds the copies. One caller gets half of it. The value 0 means 25% of the memory of the "
        "container or the machine.",
    ),
]
CopyBandwidth = Annotated[
    int,
    typer.Option(
        envvar="SHOAL_COPY_BANDWIDTH",
        min=0,
        help="Limit of the MB/s at which this server sends copies of shards to other servers, all copies together. "
        "Training keeps the rest of the network. The value 0 means no limit.",
    ),
]
Grace = Annotated[
    float,
    typer.Option(
        min=0,
        envvar="SHOAL_GRACE_PERIOD",
        help="Seconds that the server waits at most, after SIGTERM, for checkpoints of the jobs whose shards it hosts.",
    ),
]
AuditLog = Annotated[
    str,
    typer.Option(
        envvar="SHOAL_AUDIT_LOG",
        help="File for the audit log, or a folder for it. The value `none` means no log.",
        show_default="none",
    ),
]


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The options of a server. Each field is an option, a `SHOAL_*` variable and a line of help."""

    coordinator: flags.Coordinator = ""
    name: flags.Name = ""
    listen: flags.Listen = ""
    advertise: flags.Advertise = ""
    zone: Zone = ""
    metrics_listen: flags.MetricsListen = flags.ANY_PORT
    rpc_threads: RpcThreads = 16
    lane_port: LanePort = 0
    lanes: Lanes = 1024
    host_lanes: HostLanes = 768
    max_shard_bytes: MaxShardBytes = 0
    max_reader_bytes: MaxReaderBytes = 0
    copy_bandwidth: CopyBandwidth = 512
    checkpoints: flags.Checkpoints = ""
    audit_log: AuditLog = ""
    retry_for: flags.RetryFor = 30.0
    grace_period: Grace = 60.0
    tls_ca: flags.TlsCa = ""
    tls_cert: flags.TlsCertificate = ""
    tls_key: flags.TlsKey = ""
    tls_client_certs: flags.TlsClientCertificates = "required"
    insecure: flags.Insecure = False
    log_format: flags.LogFormat = "console"
    log_level: flags.LogLevel = "info"
    supervised: flags.Supervised = False


def load() -> None:
    """Loads the code and the kernels of a server, without threads: forks of this process then start at once."""
    with kernels.precompiled(), hidden("scipy", "coverage"):  # as `server` does
        from shoal._security import certificate_identity, tokens  # noqa: F401, PLC0415
        from shoal_server import process  # noqa: F401, PLC0415
        from shoal_server.optimizers.compilation import load_kernels  # noqa: PLC0415

        load_kernels()


@command_of(ServerOptions)
def server(options: ServerOptions) -> None:
    """Hosts shards of jobs' variables and applies updates to them.

    SIGTERM drains the server: it serves until its jobs have moved to other servers, or are saved. A second SIGTERM ends
    it at once. `shoal drain` drains it, too, without the limit of --grace-period.
    """
    given = RoleIdentity(
        name=options.name, listen=options.listen, advertise=options.advertise, coordinator=options.coordinator
    )
    identity = lifecycle.identify(
        "server", given, log_format=options.log_format, log_level=options.log_level, zone=options.zone
    )
    credentials = lifecycle.find_credentials("server", options, (identity.listen, options.metrics_listen))

    def start(registry: CollectorRegistry, metrics_address: str) -> "Server":
        # Numba would import scipy for linear algebra and coverage for its measurement; no kernel uses either.
        with hidden("scipy", "coverage"):
            from shoal_server.process import Server, ServerConfig  # noqa: PLC0415 - numba takes half a second to import

        config = ServerConfig(
            name=identity.name,
            coordinator=identity.coordinator,
            listen=identity.listen,
            advertise=identity.advertise,
            zone=options.zone,
            rpc_threads=options.rpc_threads,
            lane_port=options.lane_port,
            lanes=options.lanes,
            host_lanes=options.host_lanes,
            max_shard_bytes=options.max_shard_bytes,
            max_reader_bytes=options.max_reader_bytes,
            copy_bandwidth=options.copy_bandwidth,
            checkpoints=options.checkpoints,
            audit_log=options.audit_log,
            retry_for_s=options.retry_for,
            leave_grace_s=options.grace_period,
            metrics_address=metrics_address,
            credentials=credentials,
        )
        return Server(config, registry)

    with kernels.precompiled():
        lifecycle.run_role(
            "server",
            start,
            metrics_listen=options.metrics_listen,
            advertise=identity.advertise,
            leave=lambda running, stop_now: running.leave(stop_now),
            drain_state=lambda running: running.drain_state,
            member=identity.name,
            log_format=options.log_format,
            log_level=options.log_level,
            supervised=options.supervised,
            tls=credentials.tls,
            insecure=options.insecure,
        )
