"""OpenTelemetry traces of roles and clients: one for each step and each checkpoint. Off by default.

It is the only package that imports OpenTelemetry, and only if tracing is on. Traced code opens a span, which is
`NOTHING` if tracing is off. The context travels as a W3C traceparent (https://www.w3.org/TR/trace-context) in the
stamps of the data plane and in gRPC metadata. An invalid context is ignored. The process that starts a trace decides
whether to sample it. docs/how-to/tracing.md lists the spans.
"""

from shoal._tracing.environment import enabling_variable
from shoal._tracing.process import start, stop
from shoal._tracing.spans import (
    NOTHING,
    Span,
    Traces,
    carrier,
    client_span,
    in_current_context,
    metadata,
    root,
    server_rpc_span,
    server_span,
    span,
    use,
)

__all__ = [
    "NOTHING",
    "Span",
    "Traces",
    "carrier",
    "client_span",
    "enabling_variable",
    "in_current_context",
    "metadata",
    "root",
    "server_rpc_span",
    "server_span",
    "span",
    "start",
    "stop",
    "use",
]
