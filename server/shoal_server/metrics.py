"""What a server counts. Base units; no label has more values than this code names."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal import errors
from shoal.status import ServerLoad
from shoal_server.memory_limit import memory_limit
from shoal_server.pools import CallPool
from shoal_server.shards import AnswerPush, ShardStore

# These labels are there, at 0, from the start. Another transport's label is added when it first counts.
TRANSPORTS = ("shared_memory", "lane", "grpc")
_ON_LANES = ("shared_memory", "lane")

T = TypeVar("T")

_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_WAITS = (*_SECONDS, 30.0, 100.0)
_STEPS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)


class _Pulls:
    """What is counted of pulls."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.calls = Counter("shoal_server_pulls_total", "Pull calls received.", registry=registry)
        self.seconds = Histogram(
            "shoal_server_pull_seconds",
            "Time from a pull's arrival to its answer's last byte, without its wait for the consistency mode.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.wait_seconds = Histogram(
            "shoal_server_pull_wait_seconds",
            "Time that a pull waited for its consistency mode.",
            buckets=_WAITS,
            registry=registry,
        )


class _Pushes:
    """What is counted of pushes and commits."""

    def __init__(self, registry: CollectorRegistry) -> None:
        answers = Counter(
            "shoal_server_pushes_total",
            "Answers to pushes: staged, accepted, dropped_late or skipped. Counted for each shard, without repeats.",
            ["outcome"],
            registry=registry,
        )
        seconds = Histogram(
            "shoal_server_push_seconds",
            "Time from a push's, or a commit's, first message to its answer; gradients may come as they are computed.",
            ["call"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.duplicates = Counter(
            "shoal_server_duplicate_pushes_total",
            "Repeats of pushes that had counted, answered from memory, a shard each.",
            registry=registry,
        )
        self.rejected = Counter(
            "shoal_server_rejected_pushes_total",
            "Pushes and commits refused, by error code.",
            ["reason"],
            registry=registry,
        )
        self.staleness = Histogram(
            "shoal_server_staleness_versions",
            "Versions applied between a gradient's pull and its push, a shard each.",
            buckets=_STEPS,
            registry=registry,
        )
        # Looked up once: that takes as long as counting does.
        self.answers = {it: answers.labels(it) for it in ("staged", "accepted", "dropped_late", "skipped")}
        self.seconds = {it: seconds.labels(it) for it in ("push", "commit")}
        self.rejected.labels(errors.NonFiniteGradient.code.lower())


class _ByTransport(dict[str, T]):
    """What counts, by the name of a transport.

    Args:
        made: makes what counts for one.
        names: of the transports that are there from the start.
    """

    def __init__(self, made: Callable[[str], T], names: Iterable[str]) -> None:
        super().__init__((name, made(name)) for name in names)
        self._made = made

    def __missing__(self, name: str) -> T:
        found = self[name] = self._made(name)
        return found


class _Ways:
    """What is counted of the ways that bytes travel by."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.sent = Counter(
            "shoal_server_sent_bytes_total", "Bytes of values sent to pulls.", ["transport"], registry=registry
        )
        self.received = Counter(
            "shoal_server_received_bytes_total",
            "Bytes of gradients and values received.",
            ["transport"],
            registry=registry,
        )
        segments = Counter(
            "shoal_server_segments_total",
            "Segments of shared memory that clients offered: shared or refused.",
            ["outcome"],
            registry=registry,
        )
        lanes = Gauge("shoal_server_lanes", "Lanes open, by transport.", ["transport"], registry=registry)
        self.segments = {it: segments.labels(it) for it in ("shared", "refused")}
        self.lanes = _ByTransport(lanes.labels, _ON_LANES)


class ServerMetrics:
    """The metrics of one parameter server, all in `registry`.

    Attributes:
        pulls: calls received.
        sent, received: told bytes of values and gradients, by transport.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._pulls, self._pushes, self._ways = _Pulls(registry), _Pushes(registry), _Ways(registry)
        self._updates = Counter("shoal_server_updates_total", "Updates applied, a shard each.", registry=registry)
        self._apply_seconds = Histogram(
            "shoal_server_apply_seconds", "Time to apply one update to one shard.", buckets=_SECONDS, registry=registry
        )
        self.pulls = self._pulls.calls
        # Looked up once, as above.
        self.sent = _ByTransport(lambda it: self._ways.sent.labels(it).inc, TRANSPORTS)
        self.received = _ByTransport(lambda it: self._ways.received.labels(it).inc, TRANSPORTS)

    def pulled(self, serving_s: float, waited_s: float) -> None:
        """One pull was answered, in so many seconds beside those that it waited."""
        self._pulls.seconds.observe(serving_s)
        self._pulls.wait_seconds.observe(waited_s)

    @contextmanager
    def pushing(self, call: Literal["push", "commit"]) -> Iterator[None]:
        """Counts the block's time, or why it was refused."""
        start = time.perf_counter()
        try:
            yield
        except errors.ShoalError as error:
            self._pushes.rejected.labels(error.code.lower()).inc()
            raise
        self._pushes.seconds[call].observe(time.perf_counter() - start)

    def answered(self, answer: AnswerPush) -> None:
        """One shard's answer to one push."""
        if answer.repeated:
            self._pushes.duplicates.inc()
            return
        self._pushes.answers[answer.outcome].inc()
        if answer.outcome == "accepted":
            self._pushes.staleness.observe(answer.staleness)

    def load(self, waiting_pulls: int) -> ServerLoad:
        """What the server has done so far, for its heartbeats."""
        return ServerLoad(
            updates=_sum(self._updates),
            received_bytes=_sum(self._ways.received),
            sent_bytes=_sum(self._ways.sent),
            waiting_pulls=waiting_pulls,
        )

    def applied(self, seconds: float) -> None:
        """One update of one shard, which took so long."""
        self._updates.inc()
        self._apply_seconds.observe(seconds)

    def offered(self, *, shared: bool) -> None:
        """A client's segment was taken, or not."""
        self._ways.segments["shared" if shared else "refused"].inc()

    @contextmanager
    def lane(self, transport: str) -> Iterator[None]:
        """Counts a lane as open while the block runs."""
        opened = self._ways.lanes[transport]
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
            (
                "buffer_pool_free_bytes",
                "Bytes that the buffer pool keeps for the next gradients and copies.",
                self._store.memory.free_bytes,
            ),
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
