"""Short texts for metrics, durations and events."""

import time
from collections.abc import Mapping

from shoal._wire import with_ellipsis
from shoal.events import CheckpointEnded, EvaluationEnded

# The most metrics that fit on a line.
_MOST_METRICS = 6


def first_line(reason: str) -> str:
    """Returns a reason without the traceback that may follow."""
    return reason.partition("\n")[0]


def short_reason(reason: str, most: int = 200) -> str:
    """Returns the first line of a reason, cut to a number of characters, for a table of many."""
    return with_ellipsis(first_line(reason), most)


def counted(number: int, noun: str) -> str:
    """Formats a count with its noun, which takes a plural "s": "1 server", "1,797 samples"."""
    return f"{number:,} {noun}" + ("s" if number != 1 else "")


def format_metrics(values: Mapping[str, float], first: str = "") -> str:
    """Formats metrics by name, `first` before the others: "accuracy 0.93, loss 0.21"."""
    names = sorted(values, key=lambda name: (name != first, name))
    shown = [f"{name} {values[name]:.4g}" for name in names[:_MOST_METRICS]]
    left = len(names) - len(shown)
    return ", ".join(shown) + (f", and {left} more" if left else "")


def format_duration(seconds: float) -> str:
    """Formats a duration in seconds with a suitable unit: "90 s", "3 min", "5 h"."""
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if hours < 2 else f"{hours:.0f} h"


def format_time(when: float) -> str:
    """Formats a time, in seconds since 1970, as the local time of day: "14:03:22"."""
    return time.strftime("%H:%M:%S", time.localtime(when))


def format_checkpoint(event: CheckpointEnded) -> str:
    """Formats the outcome of a checkpoint in one line."""
    if event.saved is None:
        return f"checkpoint failed, training continues: {first_line(event.failure)}"
    saved = event.saved
    return f"checkpoint {saved.number}: step {saved.step:,}, {counted(saved.nbytes, 'byte')} in {event.seconds:.1f} s"


def format_evaluation(event: EvaluationEnded, metric: str = "") -> str:
    """Formats the result of an evaluation in one line, with `metric` first."""
    found = event.result
    best = ", the best so far" if event.best else ""
    return f"evaluation {found.number}: step {found.step:,}, {format_metrics(found.values, metric)}{best}"


__all__ = [
    "counted",
    "first_line",
    "format_checkpoint",
    "format_duration",
    "format_evaluation",
    "format_metrics",
    "format_time",
    "short_reason",
]
