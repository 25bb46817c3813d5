"""What to do with a job's events while it is waited for: `JobHandle.wait(callbacks=[...])`.

A callback is anything that takes an `Event` (`shoal.events`). It is called in the thread that waits, with each event
once and in order, from the oldest that is kept on. What it raises ends the waiting, as it is; the job goes on.

    def stop_watching_at(event):
        if isinstance(event, shoal.events.Evaluated) and event.result.values["accuracy"] > 0.99:
            handle.cancel()
"""

from collections.abc import Callable
from typing import TypeAlias

from shoal._display import ProgressBar, TensorBoard
from shoal.events import Event

Callback: TypeAlias = Callable[[Event], object]

__all__ = ["Callback", "ProgressBar", "TensorBoard"]
