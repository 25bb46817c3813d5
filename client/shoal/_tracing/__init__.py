"""Traces by OpenTelemetry, for every role and for clients: one a step, one a checkpoint. Off unless it is asked for.

The one package that imports OpenTelemetry, once it is asked for. What is traced says so in a line, with a span that is
`NOTHING` where nothing is traced. The context travels as W3C's traceparent (https://www.w3.org/TR/trace-context), in
the stamps of the data plane and in gRPC's metadata; one that cannot be read is ignored. Who begins a trace decides
whether it is sampled; others are not exported. Which spans there are is in docs/how-to/tracing.md.
"""

from shoal._tracing.environment import asked_by
from shoal._tracing.process import start, stop
from shoal._tracing.spans import (
    NOTHING,
    Span,
    Traces,
    bound,
    calling,
    carrier,
    metadata,
    root,
    served,
    served_call,
    span,
    use,
)

__all__ = [
    "NOTHING",
    "Span",
    "Traces",
    "asked_by",
    "bound",
    "calling",
    "carrier",
    "metadata",
    "root",
    "served",
    "served_call",
    "span",
    "start",
    "stop",
    "use",
]
