"""Callbacks for the events of a job: `JobHandle.wait(callbacks=[...])`.

A callback is a callable that takes an `Event` (`shoal.events`). The waiting thread calls it with each event once, in
order, from the oldest that the coordinator keeps. If a callback raises, `wait` ends with that exception; the job
continues.

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
