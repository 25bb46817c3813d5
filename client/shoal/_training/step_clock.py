"""Step clock: records where the time of each step goes, for trainers and sessions."""

import time
from collections import deque
from collections.abc import Callable

from shoal._wire.limits import TIMINGS
from shoal.status import StepTiming


class StepClock:
    """Timings of the latest steps, until they are taken. It costs a step about a microsecond.

    One thread records the steps, and another one may take them.

    Args:
        now: returns Unix time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._began = now()
        self._phases: dict[str, float] = {}  # of the current step
        self._steps: deque[tuple[int, float, dict[str, float]]] = deque(maxlen=TIMINGS)

    def observe(self, phase: str, seconds: float) -> None:
        """Adds seconds to a phase of the current step."""
        self._phases[phase] = self._phases.get(phase, 0.0) + seconds

    def stepped(self, step: int) -> None:
        """Ends the current step under this number, and begins the next one."""
        self._steps.append((step, self._began, self._phases))
        self._began, self._phases = self._now(), {}

    def take(self) -> tuple[StepTiming, ...]:
        """Returns the steps since the last call, at most the latest TIMINGS, in order."""
        taken = [self._steps.popleft() for _ in range(len(self._steps))]  # steps may be added meanwhile
        return tuple(StepTiming(step, began, **phases) for step, began, phases in taken)


__all__ = ["StepClock"]
