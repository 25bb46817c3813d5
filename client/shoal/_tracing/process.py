"""Start and stop of tracing in a process, with the exporter of OpenTelemetry's SDK."""

import atexit
import os
import sys
import threading
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

from shoal import errors
from shoal._system.logs import Log
from shoal._tracing import spans
from shoal._tracing.environment import SWITCH, enabling_variable, may_be_wanted, suspects

_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc")
# Seconds for the last export. A role's end does not wait longer for a collector; spans are lost then.
_FLUSH_S = 2.0

_log = Log(__name__)

_processor: Any = None  # flushed by `stop`; None if spans go to the program's provider or nowhere
_lock = threading.RLock()  # held by `start` and `stop`


def start(role: str, member: str = "") -> None:
    """Starts tracing if the environment enables it. Further calls have no effect.

    If a user's process has set up OpenTelemetry, a client's spans go to its provider, unless SHOAL_TRACING is off. In
    such a process, the standard variables may be meant for other libraries: unsupported values are only logged as a
    warning, unless SHOAL_TRACING is on.

    Args:
        role: coordinator, server, worker or client.
        member: the member's name in the cluster.

    Raises:
        BadRequest: tracing is enabled, but OpenTelemetry is not installed or rejects its settings. The message names
            the variables.
    """
    try:
        _begin(role, member)
    except errors.BadRequest as error:
        if role != "client" or os.environ.get(SWITCH) == "on":
            raise
        _log.warning("tracing is off", reason=error.message)


def _begin(role: str, member: str) -> None:
    global _processor
    with _lock:
        if spans.enabled() or not may_be_wanted(os.environ):
            return
        theirs = _provider_of_the_program() if role == "client" else None
        if theirs is not None:
            spans.use(theirs)
            return
        asking = enabling_variable(os.environ)
        if not asking:
            return
        if not all(map(_installed, _PACKAGES)):
            raise errors.BadRequest(
                f"{asking} enables tracing, but OpenTelemetry is not installed; run pip install 'shoal[otel]', "
                f"or set {SWITCH}=off"
            )
        try:
            provider, _processor = _provider(role, member)
        except Exception as error:  # the SDK has no common class for errors in variables
            named = ", ".join(suspects(os.environ, error))
            raise errors.BadRequest(
                f"{asking} enables tracing, but OpenTelemetry rejects its settings ({type(error).__name__}: {error}); "
                f"correct {named or asking}, or set {SWITCH}=off"
            ) from error
        spans.use(provider)
    atexit.register(stop)


def stop(within_s: float = _FLUSH_S) -> None:
    """Stops tracing and exports the recorded spans, for at most `within_s` seconds."""
    global _processor
    with _lock:
        spans.use(None)
        processor, _processor = _processor, None
    if processor:
        # In a daemon thread, because OpenTelemetry's own limit is 30 s.
        flush = threading.Thread(target=processor.shutdown, name="traces end", daemon=True)
        flush.start()
        flush.join(within_s)


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _provider_of_the_program() -> Any:
    """Returns the provider that the program has set up for all its libraries, or None."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    provider = trace.get_tracer_provider() if trace else None
    return None if provider is None or isinstance(provider, trace.ProxyTracerProvider) else provider


def _provider(role: str, member: str) -> tuple[Any, Any]:
    """Returns the provider that the environment configures, and its processor, which exports in the background."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    resource = Resource.create({"service.instance.id": member} if member else {})
    if "OTEL_SERVICE_NAME" not in os.environ and "service.name" not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        resource = resource.merge(Resource({"service.name": f"shoal-{role}"}))
    # The provider's own shutdown at exit may take 30 s; `stop` replaces it.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    with ExitStack() as made:
        exporter = OTLPSpanExporter()
        made.callback(exporter.shutdown)  # closes its channel if the processor cannot be created
        processor = BatchSpanProcessor(exporter)
        made.pop_all()
    provider.add_span_processor(processor)
    return provider, processor


__all__ = ["start", "stop"]
