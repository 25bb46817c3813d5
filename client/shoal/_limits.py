"""What one report may carry: the contract's limits, kept by those who build reports and checked by the coordinator."""

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

__all__ = ["LOG_BYTES", "LOG_LINES", "LOG_LINE_BYTES", "METRICS", "METRIC_NAME_BYTES", "STALENESS_BUCKETS"]
