"""Where the time of a job's latest steps went, by worker. Pure: no clock, no I/O; in memory alone."""

from collections.abc import Sequence

from shoal._wire.limits import KEPT_TIMINGS
from shoal.status import StepTiming

# Of each worker, and of so many of them; of all together what one answer may carry.
STEPS, WORKERS, IN_ALL = KEPT_TIMINGS, 1_024, 16_384


class StepTimings:
    """The latest steps of the workers of one job, those that are gone among them, for who looks for the reason."""

    def __init__(self) -> None:
        # In order of who reported last; each by step, every step once, and at most `_share` of them.
        self._steps: dict[str, tuple[StepTiming, ...]] = {}
        self._last_reported_at: dict[str, float] = {}  # of those in _steps that trained
        self._share = STEPS

    @property
    def kept(self) -> dict[str, tuple[StepTiming, ...]]:
        """By worker, in order of their names: the latest of its steps, in order."""
        return dict(sorted(self._steps.items()))

    @property
    def last_reported_at(self) -> dict[str, float]:
        """By worker when it last told of a step that it trained in; seconds of Unix time."""
        return dict(self._last_reported_at)

    def add(self, worker: str, timings: Sequence[StepTiming], now: float) -> None:
        """Takes what a worker reports, by step, every step once.

        It replaces what was kept from its first step on: a report that was sent twice counts once, and another life of
        the worker may begin at an earlier step.
        """
        if not timings:
            return
        before = [timing for timing in self._steps.pop(worker, ()) if timing.step < timings[0].step]
        self._steps[worker] = (*before, *timings)[-self._share :]
        if any(timing.own > 0 for timing in timings):
            self._last_reported_at[worker] = now
        if len(self._steps) > WORKERS:
            longest_silent = next(iter(self._steps))
            del self._steps[longest_silent]
            self._last_reported_at.pop(longest_silent, None)
        self._make_room()

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert len(self._steps) <= WORKERS
        assert len(self._steps) * self._share <= IN_ALL
        assert self._last_reported_at.keys() <= self._steps.keys()
        for timings in self._steps.values():
            assert 0 < len(timings) <= self._share
            steps = [timing.step for timing in timings]
            assert steps == sorted(set(steps))

    def _make_room(self) -> None:
        """Halves each worker's share where they are too many for it: seldom, for then all of them are gone through."""
        if len(self._steps) * self._share <= IN_ALL:
            return
        while len(self._steps) * self._share > IN_ALL:
            self._share //= 2
        self._steps = {worker: timings[-self._share :] for worker, timings in self._steps.items()}
