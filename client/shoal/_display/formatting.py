"""How figures, times and events are told to people, in a few words. What goes where is its user's."""

from collections.abc import Mapping

from shoal.events import CheckpointEnded, EvaluationEnded

# More are too many for a line.
_MOST_FIGURES = 6


def first_line(reason: str) -> str:
    """A reason without the traceback that may follow."""
    return reason.partition("\n")[0]


def figures(values: Mapping[str, float], first: str = "") -> str:
    """Figures by name, the one of that name first: "accuracy 0.93, loss 0.21"."""
    names = sorted(values, key=lambda name: (name != first, name))
    told = [f"{name} {values[name]:.4g}" for name in names[:_MOST_FIGURES]]
    left = len(names) - len(told)
    return ", ".join(told) + (f", and {left} more" if left else "")


def duration(seconds: float) -> str:
    """A time to the precision that people care for: "90 s", "3 min", "5 h"."""
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if hours < 2 else f"{hours:.0f} h"


def checkpoint(event: CheckpointEnded) -> str:
    """What became of a checkpoint, in one line."""
    if event.saved is None:
        return f"checkpoint failed, training goes on: {first_line(event.failure)}"
    saved = event.saved
    return f"checkpoint {saved.number}: step {saved.step:,}, {saved.nbytes:,} bytes in {event.seconds:.1f} s"


def evaluation(event: EvaluationEnded, metric: str = "") -> str:
    """What an evaluation found, in one line, the metric first."""
    found = event.result
    best = ", the best so far" if event.best else ""
    return f"evaluation {found.number}: step {found.step:,}, {figures(found.values, metric)}{best}"


__all__ = ["checkpoint", "duration", "evaluation", "figures", "first_line"]
