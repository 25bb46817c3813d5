"""Notes for each step of a worker where its time goes. Trainers and sessions have one."""

import time
from collections import deque
from collections.abc import Callable

from shoal._wire.limits import TIMINGS
from shoal.status import StepTiming


class StepClock:
    """The timings of the latest steps, until they are taken. Costs a step about a microsecond.

    Args:
        now: seconds of Unix time.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._began = now()
        self._phases: dict[str, float] = {}  # of the step under way
        self._steps: deque[tuple[int, float, dict[str, float]]] = deque(maxlen=TIMINGS)

    def observe(self, phase: str, seconds: float) -> None:
        """Counts time of the step under way."""
        self._phases[phase] = self._phases.get(phase, 0.0) + seconds

    def stepped(self, step: int) -> None:
        """That was this step, and the next one begins."""
        self._steps.append((step, self._began, self._phases))
        self._began, self._phases = self._now(), {}

    def take(self) -> tuple[StepTiming, ...]:
        """The steps since the last time, at most the latest TIMINGS, in order."""
        timings = tuple(StepTiming(step, began, **phases) for step, began, phases in self._steps)
        self._steps.clear()
        return timings


__all__ = ["StepClock"]
