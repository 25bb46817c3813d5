"""Times of a session's steps: how long its calls wait, and how long the user's loop computes between them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from shoal._training import StepClock

T = TypeVar("T")


class StepTimes:
    """Measures the phases of a session's steps.

    Args:
        clock: returns seconds from any origin.

    Attributes:
        steps: the timings of the steps.
        computing: whether the user's loop computes: between a pull and the next push.
        waiting: the call in progress and when it began; None if there is none, or while it runs the user's generator.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.steps = StepClock()
        self.computing = False
        self.waiting: tuple[str, float] | None = None
        self._since = clock()  # end of the last timed block
        self._generating_s = 0.0  # time of the gradient generator within the timed block

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Counts the block as `phase`, and the user's time since the pull and within generators as "compute"."""
        start, self._generating_s = self._clock(), 0.0
        computing_s = start - self._since if self.computing else 0.0
        self.waiting = phase, start
        try:
            yield
        finally:
            self.waiting = None
            self._since = self._clock()
            self.steps.observe(phase, self._since - start - self._generating_s)
            self.steps.observe("compute", computing_s + self._generating_s)

    def generated(self, items: Iterator[T]) -> Iterator[T]:
        """Yields the items of the user's generator, and records the time that it takes."""
        while True:
            start, waiting, self.waiting = self._clock(), self.waiting, None
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                end = self._clock()
                self._generating_s += end - start
                self.waiting = waiting and (waiting[0], end)
            yield item

    def stepped(self, step: int) -> None:
        """Records that the session has taken a step."""
        self.steps.stepped(step)
        self.computing = False


__all__ = ["StepTimes"]
