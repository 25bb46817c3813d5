"""Spans of traces. A new span is a child of the span of the current thread, of an RPC's caller, or of a step.

If tracing is off, each span is `NOTHING`. This module uses OpenTelemetry's API. `shoal._tracing.process` configures the
export.
"""

import re
import threading
from collections.abc import Callable, Hashable, Mapping
from types import TracebackType
from typing import Any, TypeVar

from shoal import errors

R = TypeVar("R")

# Steps of one worker that may be open at a time: a push in flight, the current step, and prefetched values.
_OPEN_STEPS = 3
# Limit of an error's text in a span.
_MAX_ERROR_CHARACTERS = 500
# Version, trace, span, flags. Flag 1 means sampled.
_TRACEPARENT = re.compile(rb"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})", re.ASCII)


class Span:
    """A span of a trace. This base class records nothing."""

    __slots__ = ()

    def child(self, _name: str, /, **_attributes: object) -> "Span":
        """Starts a span below this one."""
        return self

    def set_attributes(self, **_attributes: object) -> None:
        """Sets attributes."""

    def end(self, _error: BaseException | None = None, /) -> None:
        """Ends the span, without effect if it has ended. The end of a `with` statement calls it."""

    def __enter__(self) -> "Span":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(error)


NOTHING = Span()


class _Recorded(Span):
    """A recorded span. Within `with`, it is the current span of the thread."""

    __slots__ = ("_otel", "_span", "_token")

    def __init__(self, otel: "_Otel", span: Any) -> None:
        self._otel, self._span = otel, span
        self._token: Any = None

    @property
    def trace(self) -> int:
        """The trace id."""
        return int(self._span.get_span_context().trace_id)

    def child(self, name: str, /, **attributes: object) -> Span:
        return self._otel.begin(name, attributes, self._otel.within(self._span))

    def set_attributes(self, **attributes: object) -> None:
        if self._span.is_recording():
            self._span.set_attributes(_named(attributes))

    def end(self, error: BaseException | None = None, /) -> None:
        if not self._span.is_recording():
            return
        if error is not None:
            what = error.message if isinstance(error, errors.ShoalError) else str(error)
            self._span.set_status(self._otel.failed(f"{_code(error)}: {what}"[:_MAX_ERROR_CHARACTERS]))
            self._span.set_attribute("error.type", _code(error))
        self._span.end()

    def __enter__(self) -> Span:
        self._token = self._otel.attach(self._otel.within(self._span))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._otel.detach(self._token)
        self.end(error)


class _Otel:
    """The parts of OpenTelemetry's API that Shoal uses. The constructor imports them."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry import context, trace  # noqa: PLC0415 - only if tracing is on

        self._trace = trace
        self._start = provider.get_tracer("shoal").start_span
        self.CLIENT, self.SERVER = trace.SpanKind.CLIENT, trace.SpanKind.SERVER
        self.attach, self.detach, self.here = context.attach, context.detach, context.get_current
        self.within, self.nowhere = trace.set_span_in_context, context.Context()

    def begin(self, name: str, attributes: Mapping[str, object], context: Any = None, kind: Any = None) -> Span:
        """Starts a span in `context`, else in the thread's. Returns `NOTHING` if it is not sampled."""
        begun = self._start(name, context, kind or self._trace.SpanKind.INTERNAL, _named(attributes))
        return _Recorded(self, begun) if begun.is_recording() else NOTHING

    def failed(self, why: str) -> Any:
        return self._trace.Status(self._trace.StatusCode.ERROR, why)

    def current(self) -> Any:
        """Returns the context of the thread's current span, or None if there is none or it is not sampled."""
        context = self._trace.get_current_span().get_span_context()
        return context if context.is_valid and context.trace_flags.sampled else None

    def caller(self, parent: bytes) -> Any:
        """Parses the context of a caller. Returns None if it is missing, invalid or not sampled."""
        found = _TRACEPARENT.fullmatch(parent)
        if found is None or not int(found[3], 16) & 1:
            return None
        remote = self._trace.SpanContext(int(found[1], 16), int(found[2], 16), True, self._trace.TraceFlags(1))
        return self.within(self._trace.NonRecordingSpan(remote), self.nowhere) if remote.is_valid else None


# None if tracing is off. Functions read it once, because another thread may stop tracing at any time.
_otel: _Otel | None = None


def use(provider: Any) -> None:
    """Sets the OpenTelemetry provider for all further spans. None switches tracing off."""
    global _otel  # noqa: PLW0603 - a process has one
    _otel = None if provider is None else _Otel(provider)


def enabled() -> bool:
    """Returns whether tracing is on."""
    return _otel is not None


def span(name: str, **attributes: object) -> Span:
    """Starts a span in the thread's trace, or returns `NOTHING` if it has none."""
    otel = _otel
    return NOTHING if otel is None or otel.current() is None else otel.begin(name, attributes)


def root(name: str, **attributes: object) -> Span:
    """Starts a span in the thread's trace, or in a new trace if it has none."""
    otel = _otel
    return NOTHING if otel is None else otel.begin(name, attributes)


def client_span(request: object) -> Span:
    """Starts the client span of a call in the thread's trace. Its name is that of the request without "Request"."""
    otel = _otel
    if otel is None or otel.current() is None:
        return NOTHING
    return otel.begin(type(request).__name__.removesuffix("Request"), {}, kind=otel.CLIENT)


def server_span(name: str, stamp: Any) -> Span:
    """Starts the server span of a message with a stamp, or returns `NOTHING` if the stamp has no context."""
    otel = _otel
    if otel is None or (parent := otel.caller(stamp.trace)) is None:
        return NOTHING
    return otel.begin(name, {"job": stamp.job, "worker": stamp.worker, "step": stamp.step}, parent, otel.SERVER)


def server_rpc_span(name: str, context: Any) -> Span:
    """Starts the server span of a gRPC call, or returns `NOTHING` if its metadata has no context.

    Args:
        name: name of the RPC.
        context: gRPC context of the call.
    """
    otel = _otel
    if otel is None:
        return NOTHING
    sent = next((value for key, value in context.invocation_metadata() or () if key == "traceparent"), b"")
    parent = otel.caller(sent if isinstance(sent, bytes) else sent.encode())
    return NOTHING if parent is None else otel.begin(name, {}, parent, otel.SERVER)


def carrier() -> bytes:
    """Returns the traceparent of the thread's trace, or an empty string if it has none."""
    otel = _otel
    context = None if otel is None else otel.current()
    return b"" if context is None else b"00-%032x-%016x-01" % (context.trace_id, context.span_id)


def metadata() -> tuple[tuple[str, str], ...] | None:
    """Returns the traceparent as gRPC metadata, or None if the thread has no trace."""
    parent = carrier()
    return (("traceparent", parent.decode()),) if parent else None


def in_current_context(call: Callable[..., R]) -> Callable[..., R]:
    """Returns a function that makes the call in this thread's trace, on any thread."""
    otel = _otel
    if otel is None or otel.current() is None:
        return call
    context = otel.here()

    def called(*args: Any) -> R:
        token = otel.attach(context)
        try:
            return call(*args)
        finally:
            otel.detach(token)

    return called


class Traces:
    """Traces of one kind, such as the steps of a worker, each with a root span that stays open until `end`.

    Any thread may start spans of any open trace. A trace starts with its first span. If too many traces are open, the
    oldest is ended.

    Args:
        name: name of the root spans, and of the attribute that identifies the trace.
        most: largest number of traces that are open at a time.
        attributes: attributes of the root spans.
    """

    def __init__(self, name: str, most: int = _OPEN_STEPS, **attributes: object) -> None:
        self._name, self._most, self._attributes = name, most, attributes
        self._lock = threading.Lock()  # guards _open; only OpenTelemetry takes other locks under it
        self._open: dict[Hashable, Span] = {}  # in order of start; NOTHING if not sampled

    def span(self, which: Hashable, name: str, **attributes: object) -> Span:
        """Starts a span of a trace, below the thread's current span if that is of the same trace.

        Args:
            which: identifies the trace.
            name: name of the span.
            attributes: attributes of the span.
        """
        otel = _otel
        if otel is None:
            return NOTHING
        first = self._first(otel, which)
        current = otel.current()
        if current and isinstance(first, _Recorded) and current.trace_id == first.trace:
            return otel.begin(name, attributes)
        return first.child(name, **attributes)

    def end(self, which: Hashable, **attributes: object) -> None:
        """Ends a trace, without effect if it is not open."""
        if self._open:
            with self._lock:
                first = self._open.pop(which, NOTHING)
            first.set_attributes(**attributes)
            first.end()

    def close(self) -> None:
        """Ends all open traces."""
        for which in list(self._open):
            self.end(which, outcome="left")

    def _first(self, otel: _Otel, which: Hashable) -> Span:
        with self._lock:
            first = self._open.get(which)
            if first is None:
                attributes = {**self._attributes, self._name: which}
                self._open[which] = first = otel.begin(self._name, attributes, otel.nowhere)
            over = [self._open.pop(next(iter(self._open))) for _ in range(len(self._open) - self._most)]
        for each in over:
            each.end()
        return first


def _named(attributes: Mapping[str, object]) -> dict[str, object]:
    return {f"shoal.{name}": value for name, value in attributes.items()}


def _code(error: BaseException) -> str:
    return error.code if isinstance(error, errors.ShoalError) else type(error).__name__


__all__ = [
    "NOTHING",
    "Span",
    "Traces",
    "carrier",
    "client_span",
    "enabled",
    "in_current_context",
    "metadata",
    "root",
    "server_rpc_span",
    "server_span",
    "span",
    "use",
]
