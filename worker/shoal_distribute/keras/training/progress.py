"""Progress bar of `fit`, `evaluate` and `predict`, as Keras shows it."""

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

_WIDTH = 20
_INTERVAL_S = 0.1  # between two updates of the line


class Progbar:
    """Line of steps done, a bar, the time of a step, and metrics.

    Args:
        target: number of steps; None if it is not known.
        verbose: 1: a bar that is updated; 2: one line at the end; 0: nothing.
        write: what is called with text; None means standard output.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        target: int | None,
        verbose: int = 1,
        write: Callable[[str], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._target, self._verbose, self._write, self._clock = target, verbose, write or _to_stdout, clock
        self._started = self._shown = clock()
        self._longest = 0

    def is_due(self) -> bool:
        """Returns whether the line is to be updated: not more often than ten times a second."""
        return self._verbose == 1 and self._clock() - self._shown >= _INTERVAL_S

    def update(self, current: int, values: Mapping[str, float], finished: bool = False) -> None:
        """Shows the line.

        Args:
            current: number of steps done.
            values: metrics by name.
            finished: whether this is the last update.
        """
        now = self._clock()
        if self._verbose == 0 or (self._verbose == 2 and not finished):
            return
        self._shown = now
        target = self._target or (current if finished else 0)
        counted = f"{current}/{target}" if target else f"{current}/Unknown"
        filled = round(_WIDTH * current / target) if target else 0
        bar = "━" * filled + " " * (_WIDTH - filled) if self._verbose == 1 and target else ""
        seconds = now - self._started
        per_step = _per_step(seconds / current) if current else ""
        if finished or not target or not current:
            timing = f"{seconds:.0f}s {per_step}"
        else:
            timing = f"{_clock_time((target - current) * seconds / current)} {per_step}"
        shown = "".join(f" - {name}: {_number(value)}" for name, value in values.items())
        line = " ".join(part for part in (counted, bar, timing.strip()) if part) + shown
        padding = " " * (self._longest - len(line))
        self._longest = max(self._longest, len(line))
        start = "\r" if self._verbose == 1 else ""
        self._write(f"{start}{line}{padding}" + ("\n" if finished else ""))


def _per_step(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.0f}s/step"
    return f"{seconds * 1e3:.0f}ms/step" if seconds >= 1e-3 else f"{seconds * 1e6:.0f}us/step"


def _clock_time(seconds: float) -> str:
    whole = int(seconds)
    if whole >= 3600:
        return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"
    return f"{whole // 60}:{whole % 60:02}" if whole >= 60 else f"{whole}s"


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) >= 1e-3 or value == 0 else f"{value:.4e}"


def _to_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


__all__ = ["Progbar"]
