"""Metrics of the parameter server, in base units.

Every label value is named in this code, so the number of label values is bounded.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal import errors
from shoal._limits import catalogue, refusals
from shoal._system import memory_limit
from shoal.status import BrokenReplica, ServerLoad, UndeliveredNorm
from shoal_server.pools import CallPool
from shoal_server.shards import AnswerPush, ShardStore

# These labels start at 0. Another transport's label is added when it first counts.
TRANSPORTS = ("shared_memory", "lane", "grpc")
_ON_LANES = ("shared_memory", "lane")

T = TypeVar("T")

_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_WAITS = (*_SECONDS, 30.0, 100.0)
_STEPS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)


class _PullMetrics:
    """Metrics of pulls."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.calls = Counter("shoal_server_pulls_total", "Pull calls received.", registry=registry)
        self.seconds = Histogram(
            "shoal_server_pull_seconds",
            "Time from a pull's arrival to the last byte of its answer, without its wait for the consistency mode.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.wait_seconds = Histogram(
            "shoal_server_pull_wait_seconds",
            "Time that a pull waited for its consistency mode.",
            buckets=_WAITS,
            registry=registry,
        )


class _PushMetrics:
    """Metrics of pushes and commits."""

    def __init__(self, registry: CollectorRegistry) -> None:
        answers = Counter(
            "shoal_server_pushes_total",
            "Answers to pushes, by outcome: staged, accepted, dropped_late or skipped. Repeated pushes do not count.",
            ["outcome"],
            registry=registry,
        )
        seconds = Histogram(
            "shoal_server_push_seconds",
            "Time from the first message of a push or commit to its answer, without its wait for a permit. If a worker "
            "computes gradients while it sends them, this includes that computation.",
            ["call"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.wait_seconds = Histogram(
            "shoal_server_push_wait_seconds",
            "Time that a push waited for a permit to send its gradient, if it had to wait.",
            buckets=_WAITS,
            registry=registry,
        )
        self.duplicates = Counter(
            "shoal_server_duplicate_pushes_total",
            "Repeated pushes that were answered from memory.",
            registry=registry,
        )
        self.rejected = Counter(
            "shoal_server_rejected_pushes_total",
            "Pushes and commits rejected, by error code.",
            ["reason"],
            registry=registry,
        )
        self.staleness = Histogram(
            "shoal_server_staleness_versions",
            "Versions applied between a gradient's pull and its push.",
            buckets=_STEPS,
            registry=registry,
        )
        # Looked up once, because a look-up takes as long as counting.
        self.answers = {it: answers.labels(it) for it in ("staged", "accepted", "dropped_late", "skipped")}
        self.seconds = {it: seconds.labels(it) for it in ("push", "commit")}
        self.rejected.labels(errors.NonFiniteGradient.code.lower())


class _ByTransport(dict[str, T]):
    """Metric children by transport name, created when a transport first counts.

    Args:
        make: creates the child for one transport.
        names: the transports whose children exist from the start.
    """

    def __init__(self, make: Callable[[str], T], names: Iterable[str]) -> None:
        super().__init__((name, make(name)) for name in names)
        self._make = make

    def __missing__(self, name: str) -> T:
        found = self[name] = self._make(name)
        return found


class _TransportMetrics:
    """Metrics of the transports."""

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
            "Shared-memory segments that clients offered, by outcome: shared or refused.",
            ["outcome"],
            registry=registry,
        )
        lanes = Gauge("shoal_server_lanes", "Open lanes, by transport.", ["transport"], registry=registry)
        self.segments = {it: segments.labels(it) for it in ("shared", "refused")}
        self.lanes = _ByTransport(lanes.labels, _ON_LANES)


@dataclass(slots=True)
class PushTiming:
    """The time of one push or commit.

    Attributes:
        began_at: when it began, by the clock of `time.perf_counter`.
        waited_s: seconds that it waited for a permit.
        goes_on: whether it has not ended, because its answer waits for the backup.
    """

    began_at: float
    waited_s: float = 0.0
    goes_on: bool = False


class ServerMetrics:
    """Metrics of one parameter server.

    Args:
        registry: gets all of them.

    Attributes:
        pulls: counts pull calls.
        sent, received: functions by transport that count bytes of values and gradients.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._pulls, self._pushes, self._transports = (
            _PullMetrics(registry),
            _PushMetrics(registry),
            _TransportMetrics(registry),
        )
        self._updates = Counter(
            "shoal_server_updates_total", "Updates applied, each to all shards of a job here.", registry=registry
        )
        self._apply_seconds = Histogram(
            "shoal_server_apply_seconds",
            "Time to apply one update to all shards of a job here.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.pulls = self._pulls.calls
        self.sent = _ByTransport(lambda it: self._transports.sent.labels(it).inc, TRANSPORTS)
        self.received = _ByTransport(lambda it: self._transports.received.labels(it).inc, TRANSPORTS)

    def pulled(self, serving_s: float, waited_s: float) -> None:
        """Counts one answered pull.

        Args:
            serving_s: seconds that it took, without its wait.
            waited_s: seconds that it waited for its consistency mode.
        """
        self._pulls.seconds.observe(serving_s)
        self._pulls.wait_seconds.observe(waited_s)

    @contextmanager
    def pushing(self, call: Literal["push", "commit"], earlier: PushTiming | None = None) -> Iterator[PushTiming]:
        """Records the block's time without its wait for a permit, or the error code that it raises.

        Args:
            call: the kind of call.
            earlier: the timing of an earlier block whose call goes on in this one.
        """
        timing = earlier or PushTiming(time.perf_counter())
        timing.goes_on = False
        try:
            yield timing
        except errors.ShoalError as error:
            self._pushes.rejected.labels(error.code.lower()).inc()
            raise
        if timing.goes_on:
            return
        if timing.waited_s:
            self.push_waited(timing.waited_s)
        self._pushes.seconds[call].observe(time.perf_counter() - timing.began_at - timing.waited_s)

    def push_waited(self, seconds: float) -> None:
        """Counts a push that waited for a permit, and the seconds that it waited."""
        self._pushes.wait_seconds.observe(seconds)

    def answered(self, answer: AnswerPush) -> None:
        """Counts the answer to one push or commit."""
        if answer.repeated:
            self._pushes.duplicates.inc()
            return
        self._pushes.answers[answer.outcome].inc()
        if answer.outcome == "accepted":
            self._pushes.staleness.observe(answer.staleness)

    def load(
        self,
        waiting_pulls: int,
        undelivered_norms: Sequence[UndeliveredNorm] = (),
        broken_replicas: Sequence[BrokenReplica] = (),
    ) -> ServerLoad:
        """Returns the server's load for its heartbeats.

        Args:
            waiting_pulls: number of pulls that wait.
            undelivered_norms: norms that other servers have not taken; the load has the first ones.
            broken_replicas: lock groups whose other copy is not reached; the load has the first ones.
        """
        return ServerLoad(
            updates=_sum(self._updates),
            received_bytes=_sum(self._transports.received),
            sent_bytes=_sum(self._transports.sent),
            waiting_pulls=waiting_pulls,
            undelivered_norms=tuple(undelivered_norms[: catalogue.UNDELIVERED_NORMS.default]),
            broken_replicas=tuple(broken_replicas[: catalogue.BROKEN_REPLICAS.default]),
        )

    def applied(self, seconds: float) -> None:
        """Counts one update of a job's shards, and the seconds that it took."""
        self._updates.inc()
        self._apply_seconds.observe(seconds)

    def offered(self, *, shared: bool) -> None:
        """Counts a segment that a client offered, as shared or as refused."""
        self._transports.segments["shared" if shared else "refused"].inc()

    @contextmanager
    def lane(self, transport: str) -> Iterator[None]:
        """Counts a lane as open while the block runs."""
        opened = self._transports.lanes[transport]
        opened.inc()
        try:
            yield
        finally:
            opened.dec()

    def watch(
        self,
        store: ShardStore,
        pools: Mapping[str, CallPool],
    ) -> None:
        """Registers metrics that are read at each scrape.

        Args:
            store: the shards.
            pools: thread pools for gRPC calls, by kind of call.
        """
        self._registry.register(_LoadCollector(store, pools))


class _LoadCollector(Collector):
    """Gauges of what the server hosts and of what waits, read at each scrape."""

    def __init__(
        self,
        store: ShardStore,
        pools: Mapping[str, CallPool],
    ) -> None:
        self._store, self._pools = store, pools
        self._memory_limit = memory_limit()

    def collect(self) -> Iterator[Metric]:
        shards, held = self._store.load()
        waiting, staged, pushes = self._store.queues()
        for name, text, value in (
            ("shards", "Shards hosted.", shards),
            ("shard_bytes", "Bytes of values and slots hosted.", held),
            (
                "reader_bytes",
                "Bytes of values that are being sent to pulls. READER_BYTES limits them.",
                self._store.readers.nbytes,
            ),
            (
                "buffer_pool_free_bytes",
                "Free bytes that the buffer pool keeps for the next gradients and copies.",
                self._store.memory.free_bytes,
            ),
            ("waiting_pulls", "Pulls that wait for their consistency mode.", waiting),
            ("waiting_pushes", "Pushes that wait for a permit to send their gradient.", pushes),
            ("staged_pushes", "Complete pushes that are not committed yet.", staged),
            (
                "undelivered_norms",
                "Norms that could not be sent to other servers for some seconds. The steps of these norms wait.",
                len(self._store.undelivered_norms()),
            ),
            ("memory_limit_bytes", "Memory limit of the container or the machine.", self._memory_limit),
        ):
            yield GaugeMetricFamily(f"shoal_server_{name}", text, value)
        refused = CounterMetricFamily(
            "shoal_server_limits_exceeded",
            "Requests, calls and connections refused, by limit. The reference of limits explains each.",
            labels=["limit"],
        )
        for limit, count in refusals("server").items():
            refused.add_metric([limit], count)
        yield refused
        yield self._of_pools("threads", "Threads for gRPC calls.", lambda pool: pool.threads)
        yield self._of_pools("busy_threads", "Threads that serve gRPC calls now.", lambda pool: pool.busy)
        yield self._of_pools("queued_calls", "gRPC calls that wait for a thread.", lambda pool: pool.queued)

    def _of_pools(self, name: str, text: str, value: Callable[[CallPool], int]) -> Metric:
        family = GaugeMetricFamily(f"shoal_server_{name}", text, labels=["pool"])
        for pool, threads in self._pools.items():
            family.add_metric([pool], value(threads))
        return family


def _sum(counter: Counter) -> int:
    """Returns a counter's sum over all of its labels."""
    samples = (sample for family in counter.collect() for sample in family.samples)
    return round(sum(sample.value for sample in samples if sample.name.endswith("_total")))
