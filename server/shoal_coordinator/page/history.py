"""Which of a job's events a page that comes late is told: so few that it can draw them. Pure."""

from collections import defaultdict
from collections.abc import Sequence

from shoal.events import EvaluationEnded, Event, LogLine, MetricsReported

# Of a job's figures, shared by its workers, and of its evaluations: spread evenly, for the shape of curves.
MAX_POINTS = 4_000
# Of any other kind: the latest.
MAX_LATEST = 1_000


def downsampled(events: Sequence[Event], points: int = MAX_POINTS, latest: int = MAX_LATEST) -> list[Event]:
    """Picks events.

    Args:
        events: in order.
        points: how many figures, and how many evaluations. The last of each worker is among them.
        latest: how many log lines, and how many of every other kind.

    Returns:
        Those picked, in order.
    """
    curves: defaultdict[tuple[type[Event], str], list[Event]] = defaultdict(list)
    others: defaultdict[type[Event], list[Event]] = defaultdict(list)
    for event in events:
        match event:
            case MetricsReported() | EvaluationEnded():
                worker = event.worker if isinstance(event, MetricsReported) else ""  # evaluations are of the job
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
    """At most so many, evenly spread, the last one among them."""
    if len(events) <= most:
        return events
    return [events[(number + 1) * len(events) // most - 1] for number in range(most)]


__all__ = ["MAX_LATEST", "MAX_POINTS", "downsampled"]
