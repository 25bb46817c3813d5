"""Callbacks for the events of a job: `JobHandle.wait(callbacks=[...])`.

A callback is a callable that takes an `Event` (`shoal.events`). The waiting thread calls it once with each event, in
order, and starts with the oldest event that the coordinator still keeps. If a callback raises, `wait` ends with that
exception. The job continues.

    def stop_at_99_percent(event):
        if isinstance(event, shoal.events.EvaluationEnded) and event.result.values["accuracy"] > 0.99:
            handle.cancel()
"""

from collections.abc import Callable
from typing import TypeAlias

from shoal._display import ProgressBar, TensorBoard
from shoal.events import Event

Callback: TypeAlias = Callable[[Event], object]
"""A function that is called with each event of a job. What it returns is ignored."""

__all__ = ["Callback", "ProgressBar", "TensorBoard"]
