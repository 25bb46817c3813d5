"""Load that a server reports with its heartbeats."""

from prometheus_client import CollectorRegistry

from shoal.status import ServerLoad
from shoal_server.metrics import ServerMetrics


def test_load_has_the_counts_of_the_metrics() -> None:
    metrics = ServerMetrics(CollectorRegistry())
    assert metrics.load(0) == ServerLoad()
    for seconds in (0.001, 100.0):
        metrics.applied(seconds)
    metrics.received["lane"](1 << 40)
    metrics.sent["lane"](3)
    metrics.sent["grpc"](4)
    assert metrics.load(3) == ServerLoad(updates=2, received_bytes=1 << 40, sent_bytes=7, waiting_pulls=3)
