"""Limits of the wire contract for one message or report. The sender complies with them, the receiver checks them."""

import os

from shoal._limits import catalogue

# A message carries a chunk of about 1 MiB and its framing; larger arrays are sent as several chunks. The environment
# variable is for `make bench BENCH=chunks`, which shows why the size is 1 MiB.
CHUNK_BYTES = int(os.environ.get("SHOAL_CHUNK_BYTES") or 1 << 20)
MAX_MESSAGE_BYTES = catalogue.MAX_MESSAGE_BYTES.default
# Gradients of at most this size need no permit at a server: one message carries them.
PERMIT_FREE_BYTES = CHUNK_BYTES

# Bytes on the wire of small arenas that share a slab. Both ends compute the slabs, so the number is part of the
# contract.
SLAB_BYTES = 1 << 20

# Bytes of a short text that the coordinator keeps: a device, an address, a program's name, a token. In UTF-8.
FIELD_BYTES = catalogue.FIELD_BYTES.default
# Limit of steps and versions: they and their successors fit every integer type on their way, and JSON's numbers.
MAX_STEP = catalogue.MAX_STEP.default
# Limit of the steps between a worker and the furthest one that the receiver knows of. Honest workers are a few steps
# ahead at most, when an update has reached other servers first. Without the limit, one call could use up all steps of
# a job.
MAX_LEAD = catalogue.MAX_LEAD.default
# Steps a second that the coordinator allows a job at most. It hears of no step while it is away, so it allows as many
# steps as the job can have made meanwhile. The fastest workers make some thousand.
MAX_STEPS_PER_S = 100_000

# Lines of a program's output in one report.
LOG_LINES = catalogue.LOG_LINES.default
# Bytes of one line, in UTF-8.
LOG_LINE_BYTES = catalogue.LOG_LINE_BYTES.default
# Bytes of all lines of a report together.
LOG_BYTES = catalogue.LOG_BYTES.default
# Metrics of one step.
METRICS = catalogue.METRICS.default
# Bytes of a metric's name, in UTF-8.
METRIC_NAME_BYTES = catalogue.METRIC_NAME_BYTES.default
# Buckets that count accepted pushes by staleness, from 0. The last one also counts all larger values.
STALENESS_BUCKETS = catalogue.STALENESS_BUCKETS.default
# Steps of a worker: those with timings in one report, and those with timings that the coordinator keeps.
TIMINGS, KEPT_TIMINGS = catalogue.TIMINGS.default, 256

# Seconds that a call of Join waits at most.
JOIN_WAIT_S = 60.0

# Deadline of a transfer: a fixed time, and the time that its bytes take at the slowest accepted rate.
_TRANSFER_S, _SLOWEST_BYTES_A_S = 60.0, 8e6


def transfer_s(nbytes: int) -> float:
    """Returns the seconds after which a transfer of this many bytes fails, even if bytes still arrive."""
    return _TRANSFER_S + nbytes / _SLOWEST_BYTES_A_S


__all__ = [
    "CHUNK_BYTES",
    "FIELD_BYTES",
    "JOIN_WAIT_S",
    "KEPT_TIMINGS",
    "LOG_BYTES",
    "LOG_LINES",
    "LOG_LINE_BYTES",
    "MAX_LEAD",
    "MAX_MESSAGE_BYTES",
    "MAX_STEP",
    "MAX_STEPS_PER_S",
    "METRICS",
    "METRIC_NAME_BYTES",
    "PERMIT_FREE_BYTES",
    "SLAB_BYTES",
    "STALENESS_BUCKETS",
    "TIMINGS",
    "transfer_s",
]
