"""The assembly of a worker in this process: its device, its membership, its health service and its daemon."""

from contextlib import ExitStack

import structlog
from prometheus_client import CollectorRegistry

from shoal._rpc import CoordinatorClient, RpcServer
from shoal._security import AccessRole, Authorizer
from shoal_worker.arrays import choose_device
from shoal_worker.daemon import Daemon, WorkerConfig
from shoal_worker.metrics import WorkerMetrics

_log = structlog.get_logger(__name__)


def start_worker(config: WorkerConfig, registry: CollectorRegistry, metrics_address: str = "") -> Daemon:
    """Starts a worker in this process. Its trainers run in processes of their own.

    Args:
        config: the worker's options.
        registry: registry of the worker's metrics.
        metrics_address: host:port of the metrics endpoint; empty means none.

    Returns:
        The worker's daemon, which is registered.

    Raises:
        ShoalError: the device does not exist, no coordinator answers, or the name or port is in use.
    """
    with ExitStack() as undo:
        chosen = choose_device(config.device)
        device = chosen.name
        _log.info("device chosen", device=device, reason=chosen.reason or None)
        client = CoordinatorClient(
            config.coordinator,
            retry_for_s=config.retry_for_s,
            credentials=config.credentials.for_coordinator(config.coordinator, AccessRole.WORKER),
            on_silence=_log.warning,
        )
        undo.callback(client.close)
        health = RpcServer(
            config.listen,
            [],
            threads=2,
            advertise=config.advertise,
            credentials=config.credentials,
            authorizer=Authorizer(),  # which allows only probes
        )
        undo.callback(health.stop)
        health.start()
        metrics = WorkerMetrics(registry, device, client.retries)
        daemon = Daemon(config, client, health, device, metrics, metrics_address=metrics_address)
        daemon.start()
        undo.pop_all()
    return daemon
