"""Load that a server reports with its heartbeats."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from shoal import consistency, optim
from shoal.status import ServerLoad, UndeliveredNorm
from shoal_server.metrics import ServerMetrics
from shoal_server.shards import JobShardConfig, Peer, ShardStore


def test_load_has_the_counts_of_the_metrics() -> None:
    metrics = ServerMetrics(CollectorRegistry())
    assert metrics.load(0) == ServerLoad()
    for seconds in (0.001, 100.0):
        metrics.applied(seconds)
    metrics.received["lane"](1 << 40)
    metrics.sent["lane"](3)
    metrics.sent["grpc"](4)
    assert metrics.load(3) == ServerLoad(updates=2, received_bytes=1 << 40, sent_bytes=7, waiting_pulls=3)


class Stuck:
    """Squares that two other servers do not take."""

    def send(self, step: int, squares: Sequence[float]) -> None:
        raise NotImplementedError

    def undelivered(self) -> Sequence[UndeliveredNorm]:
        return [UndeliveredNorm("job", 3, server, seconds, "refused") for server, seconds in (("s1", 4.0), ("s2", 9.0))]

    def close(self) -> None:
        pass


def test_norms_that_are_not_taken_are_in_the_load_and_in_the_metrics() -> None:
    registry = CollectorRegistry()
    metrics, store = ServerMetrics(registry), ShardStore(norms_of=lambda _: Stuck())
    metrics.watch(store, {})
    peers = (Peer("s1", "h:1"), Peer("s2", "h:2"))
    store.create(JobShardConfig("job", 3, {}, optim.SGD(0.1, clip_norm=1.0), consistency.Synchronous(), 0, peers), [])
    assert registry.get_sample_value("shoal_server_undelivered_norms") == 2
    found = store.undelivered_norms()
    assert [norm.server for norm in metrics.load(0, found).undelivered_norms] == ["s2", "s1"]
    assert len(metrics.load(0, found * 99).undelivered_norms) == 32
    store.clear()
