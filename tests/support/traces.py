"""Traces for tests: recorded in this process, or received by a collector that speaks OTLP."""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler

from shoal import _tracing


@dataclass(frozen=True)
class Seen:
    """A span that has ended. `parent` is 0 if the span begins its trace."""

    trace: int
    number: int
    parent: int
    name: str
    start: int
    end: int
    attributes: dict[str, Any] = field(compare=False)
    failed: str = ""


class Recording:
    """The spans that this process has recorded."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    @property
    def spans(self) -> list[Seen]:
        return [_seen(span) for span in self._exporter.get_finished_spans()]


def _seen(span: ReadableSpan) -> Seen:
    assert span.context
    assert span.start_time
    assert span.end_time
    return Seen(
        span.context.trace_id,
        span.context.span_id,
        span.parent.span_id if span.parent else 0,
        span.name,
        span.start_time,
        span.end_time,
        dict(span.attributes or {}),
        "" if span.status.is_ok or span.status.is_unset else span.status.description or "failed",
    )


@contextmanager
def recorded(sampler: Sampler | None = None) -> Iterator[Recording]:
    """Traces this process, with all roles that run in it."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    _tracing.use(provider)
    try:
        yield Recording(exporter)
    finally:
        _tracing.stop()


def roots(spans: Sequence[Seen], name: str) -> list[Seen]:
    """Returns the spans of this name that begin a trace, in order of their start."""
    return sorted((span for span in spans if span.name == name and not span.parent), key=lambda span: span.start)


def tree(spans: Sequence[Seen], root: Seen) -> Counter[str]:
    """Returns the number of spans below a root by path: {"pull": 1, "pull/Pull": 2}."""
    by_number = {span.number: span for span in spans}

    def path(span: Seen) -> str:
        above = by_number[span.parent]
        return span.name if above.number == root.number else f"{path(above)}/{span.name}"

    return Counter(path(span) for span in spans if span.trace == root.trace and span.number != root.number)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Receives the exported spans."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _taken
        self._taken: list[tuple[dict[str, str], Seen]] = []

    def Export(self, request: Any, context: Any) -> Any:
        with self._lock:
            for resource in request.resource_spans:
                source = {it.key: it.value.string_value for it in resource.resource.attributes}
                for scope in resource.scope_spans:
                    self._taken += [(source, _received(span)) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Seen]:
        with self._lock:
            return [span for _, span in self._taken]

    def sources(self, trace: int) -> set[tuple[str, str]]:
        """Returns the service and the name of each span of a trace."""
        with self._lock:
            return {(source["service.name"], span.name) for source, span in self._taken if span.trace == trace}

    @property
    def instances(self) -> set[tuple[str, str]]:
        """Returns the service and the member of each exporter."""
        with self._lock:
            return {(source["service.name"], source.get("service.instance.id", "")) for source, _ in self._taken}


def _received(span: Any) -> Seen:
    attributes = {it.key: getattr(it.value, it.value.WhichOneof("value")) for it in span.attributes}
    number = int.from_bytes
    return Seen(
        number(span.trace_id, "big"),
        number(span.span_id, "big"),
        number(span.parent_span_id, "big"),
        span.name,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        attributes,
        span.status.message,
    )


@contextmanager
def collector() -> Iterator[tuple[Collector, dict[str, str]]]:
    """Yields a collector, and the environment variables that make processes export to it."""
    service = Collector()
    pool = ThreadPoolExecutor(2)
    server = grpc.server(pool)
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]  # generated
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield (
            service,
            {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}", "OTEL_TRACES_EXPORTER": "otlp"},
        )
    finally:
        server.stop(0).wait()
        pool.shutdown()
