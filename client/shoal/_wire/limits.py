"""The contract's limits: what one message or report may carry. Kept by who builds them, checked by who takes them."""

import os

# One message carries a chunk of about 1 MiB and its framing; larger arrays travel as more chunks. The environment's is
# for `make bench BENCH=chunks`, which shows why it is 1 MiB.
CHUNK_BYTES = int(os.environ.get("SHOAL_CHUNK_BYTES") or 1 << 20)
MAX_MESSAGE_BYTES = 8 << 20

# Lines of a program's output.
LOG_LINES = 1_000
# One line, in UTF-8.
LOG_LINE_BYTES = 8 << 10
# All lines together: a part of the largest message.
LOG_BYTES = 1 << 20
# Metrics of a step, by name.
METRICS = 256
# A metric's name, in UTF-8.
METRIC_NAME_BYTES = 256
# Accepted pushes are counted by staleness, from 0; the last bucket is of this number less 1, and of all above.
STALENESS_BUCKETS = 1_024
# Steps whose timings one report carries, and of which the coordinator keeps them, of each worker.
TIMINGS, KEPT_TIMINGS = 64, 256

# Of a transfer: this long, and as long as its bytes take at a slow pace.
_TRANSFER_S, _SLOWEST_BYTES_A_S = 60.0, 8e6


def transfer_s(nbytes: int) -> float:
    """Seconds after which the transfer of so many bytes is given up, however steadily it creeps on."""
    return _TRANSFER_S + nbytes / _SLOWEST_BYTES_A_S


__all__ = [
    "CHUNK_BYTES",
    "KEPT_TIMINGS",
    "LOG_BYTES",
    "LOG_LINES",
    "LOG_LINE_BYTES",
    "MAX_MESSAGE_BYTES",
    "METRICS",
    "METRIC_NAME_BYTES",
    "STALENESS_BUCKETS",
    "TIMINGS",
    "transfer_s",
]
