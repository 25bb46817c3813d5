"""Limits of the contract on one message or report. The sender complies with them, and the receiver checks them."""

import os

from shoal._job.checks import MOST_STEPS

# A message carries a chunk of about 1 MiB and its framing; larger arrays are sent as several chunks. The environment
# variable is for `make bench BENCH=chunks`, which shows why the size is 1 MiB.
CHUNK_BYTES = int(os.environ.get("SHOAL_CHUNK_BYTES") or 1 << 20)
MAX_MESSAGE_BYTES = 8 << 20
# Gradients of at most this size need no permit at a server: one message carries them.
PERMIT_FREE_BYTES = CHUNK_BYTES

# Bytes on the wire of small arenas that share a slab. Both ends compute the slabs, so the number is part of the
# contract.
SLAB_BYTES = 1 << 20

# Bytes of a short text that the coordinator keeps: a device, an address, a program's name, a token. In UTF-8.
FIELD_BYTES = 256
# Limit of steps and versions: they and their successors fit every integer type on their way, and JSON's numbers.
MAX_STEP = MOST_STEPS + 1
# Limit of the steps between a worker and the furthest one that the receiver knows of. Honest workers are a few steps
# ahead at most, when an update has reached other servers first. Without the limit, one call could use up all steps of
# a job.
MAX_LEAD = 1 << 20
# Steps a second that the coordinator allows a job at most. It hears of no step while it is away, so it allows as many
# steps as the job can have made meanwhile. The fastest workers make some thousand.
MAX_STEPS_PER_S = 100_000

# Lines of a program's output in one report.
LOG_LINES = 1_000
# Bytes of one line, in UTF-8.
LOG_LINE_BYTES = 8 << 10
# Bytes of all lines of a report together.
LOG_BYTES = 1 << 20
# Metrics of one step.
METRICS = 256
# Bytes of a metric's name, in UTF-8.
METRIC_NAME_BYTES = 256
# Buckets that count accepted pushes by staleness, from 0. The last one also counts all larger values.
STALENESS_BUCKETS = 1_024
# Steps of a worker: those with timings in one report, and those with timings that the coordinator keeps.
TIMINGS, KEPT_TIMINGS = 64, 256

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
