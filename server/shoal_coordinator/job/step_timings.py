"""Timings of a job's latest steps, by worker. Pure: no clock, no I/O; kept in memory only."""

from collections.abc import Sequence

from shoal._wire.limits import KEPT_TIMINGS
from shoal.status import StepTiming

# Limits of one reply: steps of each worker, workers, and steps of all workers together.
STEPS, WORKERS, IN_ALL = KEPT_TIMINGS, 1_024, 16_384


class StepTimings:
    """The latest steps of one job's workers, including workers that are gone, for diagnosis."""

    def __init__(self) -> None:
        # In the order of the last reports. Each value is in order of step, without repeats, at most `_share` long.
        self._steps: dict[str, tuple[StepTiming, ...]] = {}
        self._last_reported_at: dict[str, float] = {}  # of the workers in `_steps` that have trained
        self._share = STEPS

    @property
    def kept(self) -> dict[str, tuple[StepTiming, ...]]:
        """The latest steps of each worker, in order; the workers in order of name."""
        return dict(sorted(self._steps.items()))

    @property
    def last_reported_at(self) -> dict[str, float]:
        """When each worker last reported a step in which it trained, in seconds of Unix time."""
        return dict(self._last_reported_at)

    @property
    def longest_s(self) -> float:
        """The seconds of the longest of the latest steps, without its wait for other workers; 0 if no step is known."""
        return max((timing.own for timings in self._steps.values() for timing in timings), default=0.0)

    def add(self, worker: str, timings: Sequence[StepTiming], now: float) -> None:
        """Adds a worker's timings. They replace the kept timings of their first step and of all later steps.

        A repeated report therefore counts once, and a new incarnation of the worker can start at an earlier step.

        Args:
            worker: id of the worker.
            timings: in order of step, without repeats.
            now: seconds of Unix time.
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
        """Halves each worker's share until all fit. This is rare, so it may visit all of them."""
        if len(self._steps) * self._share <= IN_ALL:
            return
        while len(self._steps) * self._share > IN_ALL:
            self._share //= 2
        self._steps = {worker: timings[-self._share :] for worker, timings in self._steps.items()}
