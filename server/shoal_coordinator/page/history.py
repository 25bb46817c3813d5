"""Downsampling of a job's events for a page that opens late (no I/O)."""

from collections import defaultdict
from collections.abc import Sequence

from shoal.events import EvaluationEnded, Event, LogLine, MetricsReported

# The limit of a job's metrics, shared by its workers, and of its evaluations. They are spread evenly over the curve.
MAX_POINTS = 4_000
# The limit of latest events of any other kind.
MAX_LATEST = 1_000


def downsampled(events: Sequence[Event], points: int = MAX_POINTS, latest: int = MAX_LATEST) -> list[Event]:
    """Returns the events that a page needs to draw a job.

    Args:
        events: All events, in order.
        points: The limit of metrics, and that of evaluations. The last event of each worker is always included.
        latest: The limit of log lines, and that of every other kind.

    Returns:
        The picked events, in order.
    """
    curves: defaultdict[tuple[type[Event], str], list[Event]] = defaultdict(list)
    others: defaultdict[type[Event], list[Event]] = defaultdict(list)
    for event in events:
        match event:
            case MetricsReported() | EvaluationEnded():
                worker = event.worker if isinstance(event, MetricsReported) else ""  # evaluations belong to the job
                curves[type(event), worker].append(event)
            case LogLine():
                others[LogLine].append(event)
            case _:
                others[type(event)].append(event)
    workers = sum(kind is MetricsReported for kind, _ in curves)
    picked = [event for found in others.values() for event in found[-latest:]]
    for (kind, _), found in curves.items():
        picked += _spread(found, max(1, points // workers) if kind is MetricsReported else points)
    return sorted(picked, key=lambda event: event.sequence)


def _spread(events: list[Event], most: int) -> list[Event]:
    """Returns at most `most` events, evenly spread, including the last one."""
    if len(events) <= most:
        return events
    return [events[(number + 1) * len(events) // most - 1] for number in range(most)]


__all__ = ["MAX_LATEST", "MAX_POINTS", "downsampled"]
