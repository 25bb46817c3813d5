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
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.steps = StepClock()
        self.computing = False
        self._since = clock()  # end of the last timed block
        self._generating_s = 0.0  # time of the gradient generator within the timed block

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Counts the block as `phase`, and the user's time since the pull and within generators as "compute"."""
        start, self._generating_s = self._clock(), 0.0
        computing_s = start - self._since if self.computing else 0.0
        try:
            yield
        finally:
            self._since = self._clock()
            self.steps.observe(phase, self._since - start - self._generating_s)
            self.steps.observe("compute", computing_s + self._generating_s)

    def generated(self, items: Iterator[T]) -> Iterator[T]:
        """Yields the items of the user's generator, and records the time that it takes."""
        while True:
            start = self._clock()
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self._generating_s += self._clock() - start
            yield item

    def stepped(self, step: int) -> None:
        """Records that the session has taken a step."""
        self.steps.stepped(step)
        self.computing = False


__all__ = ["StepTimes"]
