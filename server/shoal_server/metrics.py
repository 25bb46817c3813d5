"""What a server counts. Base units; no label has more values than this code names."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal import errors
from shoal.status import ServerLoad
from shoal_server.memory_limit import memory_limit
from shoal_server.pools import CallPool
from shoal_server.shards import AnswerPush, ShardStore

Transport = Literal["shared_memory", "lane", "grpc"]
TRANSPORTS: tuple[Transport, ...] = ("shared_memory", "lane", "grpc")

_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_WAITS = (*_SECONDS, 30.0, 100.0)
_STEPS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)


class ServerMetrics:
    """The metrics of one parameter server, all in `registry`.

    Attributes:
        sent, received: told bytes of values and gradients, by transport.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.pulls = Counter("shoal_server_pulls_total", "Pull calls received.", registry=registry)
        self._pull_seconds = Histogram(
            "shoal_server_pull_seconds",
            "Time from a pull's arrival to its answer's last byte, without its wait for the consistency mode.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._wait_seconds = Histogram(
            "shoal_server_wait_seconds",
            "Time that a pull waited for its consistency mode.",
            buckets=_WAITS,
            registry=registry,
        )
        pushes = Counter(
            "shoal_server_pushes_total",
            "Answers to pushes, a shard each, without those to repeats.",
            ["outcome"],
            registry=registry,
        )
        push_seconds = Histogram(
            "shoal_server_push_seconds",
            "Time from a push's, or a commit's, first message to its answer; gradients may come as they are computed.",
            ["call"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._duplicates = Counter(
            "shoal_server_duplicate_pushes_total",
            "Repeats of pushes that had counted, answered from memory, a shard each.",
            registry=registry,
        )
        self._rejected = Counter(
            "shoal_server_rejected_pushes_total",
            "Pushes and commits refused, by error code.",
            ["reason"],
            registry=registry,
        )
        self._sent = Counter(
            "shoal_server_sent_bytes_total", "Bytes of values sent to pulls.", ["transport"], registry=registry
        )
        self._received = Counter(
            "shoal_server_received_bytes_total",
            "Bytes of gradients and values received.",
            ["transport"],
            registry=registry,
        )
        self._updates = Counter("shoal_server_updates_total", "Updates applied, a shard each.", registry=registry)
        self._apply_seconds = Histogram(
            "shoal_server_apply_seconds", "Time to apply one update to one shard.", buckets=_SECONDS, registry=registry
        )
        self._staleness = Histogram(
            "shoal_server_staleness_versions",
            "Versions applied between a gradient's pull and its push, a shard each.",
            buckets=_STEPS,
            registry=registry,
        )
        segments = Counter(
            "shoal_server_segments_total",
            "Segments of shared memory that clients offered, by what became of them.",
            ["outcome"],
            registry=registry,
        )
        lanes = Gauge("shoal_server_lanes", "Lanes open, by transport.", ["transport"], registry=registry)
        # Looked up once: that takes as long as counting does.
        self.sent = {it: self._sent.labels(it).inc for it in TRANSPORTS}
        self.received = {it: self._received.labels(it).inc for it in TRANSPORTS}
        self._pushes = {it: pushes.labels(it) for it in ("staged", "accepted", "dropped_late", "skipped")}
        self._push_seconds = {it: push_seconds.labels(it) for it in ("push", "commit")}
        self._segments = {it: segments.labels(it) for it in ("shared", "refused")}
        self._lanes = {it: lanes.labels(it) for it in ("shared_memory", "lane")}
        self._rejected.labels(errors.NonFiniteGradient.code.lower())

    def pulled(self, serving_s: float, waited_s: float) -> None:
        """One pull was answered, in so many seconds beside those that it waited."""
        self._pull_seconds.observe(serving_s)
        self._wait_seconds.observe(waited_s)

    @contextmanager
    def pushing(self, call: Literal["push", "commit"]) -> Iterator[None]:
        """Counts the block's time, or why it was refused."""
        start = time.perf_counter()
        try:
            yield
        except errors.ShoalError as error:
            self._rejected.labels(error.code.lower()).inc()
            raise
        self._push_seconds[call].observe(time.perf_counter() - start)

    def answered(self, answer: AnswerPush) -> None:
        """One shard's answer to one push."""
        if answer.repeated:
            self._duplicates.inc()
            return
        self._pushes[answer.outcome].inc()
        if answer.outcome == "accepted":
            self._staleness.observe(answer.staleness)

    def load(self, waiting_pulls: int) -> ServerLoad:
        """What the server has done so far, for its heartbeats."""
        return ServerLoad(
            updates=_sum(self._updates),
            received_bytes=_sum(self._received),
            sent_bytes=_sum(self._sent),
            waiting_pulls=waiting_pulls,
        )

    def applied(self, seconds: float) -> None:
        """One update of one shard, which took so long."""
        self._updates.inc()
        self._apply_seconds.observe(seconds)

    def offered(self, *, shared: bool) -> None:
        """A client's segment was taken, or not."""
        self._segments["shared" if shared else "refused"].inc()

    @contextmanager
    def lane(self, transport: Literal["shared_memory", "lane"]) -> Iterator[None]:
        """Counts a lane as open while the block runs."""
        opened = self._lanes[transport]
        opened.inc()
        try:
            yield
        finally:
            opened.dec()

    def watch(self, store: ShardStore, pools: Mapping[str, CallPool]) -> None:
        """Reads gauges when they are scraped.

        Args:
            store: the shards.
            pools: of threads for calls by gRPC, by what they do.
        """
        self._registry.register(_Load(store, pools))


class _Load(Collector):
    """What the server holds, and what waits there."""

    def __init__(self, store: ShardStore, pools: Mapping[str, CallPool]) -> None:
        self._store, self._pools = store, pools
        self._memory_limit = memory_limit()

    def collect(self) -> Iterator[Metric]:
        shards, held = self._store.load()
        waiting, staged = self._store.queues()
        for name, text, value in (
            ("shards", "Shards hosted.", shards),
            ("shard_bytes", "Bytes of values and slots hosted.", held),
            ("spare_bytes", "Bytes kept for the next gradients and copies.", self._store.memory.free_bytes),
            ("waiting_pulls", "Pulls that wait for their consistency mode, a shard each.", waiting),
            ("staged_pushes", "Pushes that are whole and not yet committed, a shard each.", staged),
            ("memory_limit_bytes", "Memory that the container, or the machine, gives at most.", self._memory_limit),
        ):
            yield GaugeMetricFamily(f"shoal_server_{name}", text, value)
        yield self._of_pools("threads", "Threads for calls by gRPC.", lambda pool: pool.threads)
        yield self._of_pools("busy_threads", "Threads at work on calls by gRPC.", lambda pool: pool.busy)
        yield self._of_pools("queued_calls", "Calls by gRPC that wait for a thread.", lambda pool: pool.queued)

    def _of_pools(self, name: str, text: str, figure: Callable[[CallPool], int]) -> Metric:
        family = GaugeMetricFamily(f"shoal_server_{name}", text, labels=["pool"])
        for pool, threads in self._pools.items():
            family.add_metric([pool], figure(threads))
        return family


def _sum(counter: Counter) -> int:
    """Over all of its labels."""
    samples = (sample for family in counter.collect() for sample in family.samples)
    return round(sum(sample.value for sample in samples if sample.name.endswith("_total")))
