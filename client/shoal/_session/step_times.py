"""Times of a session's steps: how long its calls wait, and how long the user's loop computes between them."""

from collections.abc import Callable, Iterator
from typing import TypeVar

from shoal._training import StepClock

T = TypeVar("T")


class StepTimes:
    """Measures the phases of a session's steps.

    Args:
        clock: returns seconds from any origin.

    Attributes:
        steps: the timings of the steps.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.steps = StepClock()
        self._computing = False  # the user's loop computes: between a pull and the next push
        self._call: tuple[str, float] | None = None  # in progress, and its beginning; None while a generator computes
        self._range_since: float | None = None  # since when the session waits for a range of samples
        self._since = clock()  # end of the last timed block
        self._generating_s = 0.0  # time of the gradient generator within the timed block

    @property
    def waiting(self) -> tuple[str, float] | None:
        """What the session may wait in, a call or "batches", and when this began; None if it computes."""
        return self._call if self._range_since is None else ("batches", self._range_since)

    def await_range(self, waits: bool) -> None:
        """Records whether the session waits for a range of samples, in repeated calls."""
        if not waits:
            self._range_since = None
        elif self._range_since is None:
            self._range_since = self._clock()

    def timed(self, phase: str) -> "_Timed":
        """Counts a block as `phase`, and the user's time since the pull and within generators as "compute"."""
        return _Timed(self, phase)

    def begin(self, phase: str) -> tuple[float, float]:
        """Begins a timed block. Returns its beginning, and how long the user's loop had computed before it."""
        start, self._generating_s = self._clock(), 0.0
        self._call = phase, start
        return start, start - self._since if self._computing else 0.0

    def end(self, phase: str, start: float, computing_s: float) -> None:
        """Ends a timed block, with what `begin` returned."""
        self._call = None
        self._since = self._clock()
        self.steps.observe(phase, self._since - start - self._generating_s)
        self.steps.observe("compute", computing_s + self._generating_s)

    def generated(self, items: Iterator[T]) -> Iterator[T]:
        """Yields the items of the user's generator, and records the time that it takes."""
        while True:
            start, call, self._call = self._clock(), self._call, None
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                end = self._clock()
                self._generating_s += end - start
                self._call = call and (call[0], end)
            yield item

    def pulled(self) -> None:
        """Records that the user's loop has got the values, and computes until the next push."""
        self._computing = True

    def stepped(self, step: int) -> None:
        """Records that the session has taken a step."""
        self.steps.stepped(step)
        self._computing = False


class _Timed:
    """A timed block. A class, because a generator would cost each call of a session some microseconds more."""

    __slots__ = ("_began", "_phase", "_times")

    def __init__(self, times: StepTimes, phase: str) -> None:
        self._times, self._phase = times, phase

    def __enter__(self) -> None:
        self._began = self._times.begin(self._phase)

    def __exit__(self, *_: object) -> None:
        self._times.end(self._phase, *self._began)


__all__ = ["StepTimes"]
