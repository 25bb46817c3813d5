"""Timings of a job's latest steps, by worker. Pure: no clock, no I/O; kept in memory only."""

from collections.abc import Sequence

from shoal._wire.limits import KEPT_TIMINGS
from shoal.status import GroupTimings, RankTimes, StepTiming

# Limits of one reply: steps of each worker, workers, steps of all workers together, and ranks of all hybrid groups.
STEPS, WORKERS, IN_ALL, RANKS = KEPT_TIMINGS, 1_024, 16_384, 4_096


class StepTimings:
    """The latest steps of one job's workers, including workers that are gone, for diagnosis."""

    def __init__(self) -> None:
        # In the order of the last reports. Each value is in order of step, without repeats, at most `_share` long.
        self._steps: dict[str, tuple[StepTiming, ...]] = {}
        self._last_reported_at: dict[str, float] = {}  # of the workers in `_steps` that have trained
        # Times of the ranks of hybrid groups, by the worker in `_steps` that reports them, in the order of the reports.
        self._ranks: dict[str, tuple[RankTimes, ...]] = {}
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
    def groups(self) -> dict[str, GroupTimings]:
        """The times of the ranks of each hybrid group, by the session that the group shares."""
        return {worker: GroupTimings(ranks) for worker, ranks in sorted(self._ranks.items())}

    @property
    def longest_s(self) -> float:
        """The seconds of the longest of the latest steps, without its wait for other workers; 0 if no step is known."""
        return max((timing.own for timings in self._steps.values() for timing in timings), default=0.0)

    def add(self, worker: str, timings: Sequence[StepTiming], now: float, ranks: tuple[RankTimes, ...] = ()) -> None:
        """Adds a worker's timings. They replace the kept timings of their first step and of all later steps.

        A repeated report therefore counts once, and a new incarnation of the worker can start at an earlier step.

        Args:
            worker: id of the worker.
            timings: in order of step, without repeats.
            now: seconds of Unix time.
            ranks: times of the ranks of the hybrid group that shares the worker's session. They replace earlier ones.
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
            self._ranks.pop(longest_silent, None)
        self._keep_ranks(worker, ranks)
        self._make_room()

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert len(self._steps) <= WORKERS
        assert len(self._steps) * self._share <= IN_ALL
        assert self._last_reported_at.keys() <= self._steps.keys()
        assert self._ranks.keys() <= self._steps.keys()
        assert sum(map(len, self._ranks.values())) <= RANKS
        for timings in self._steps.values():
            assert 0 < len(timings) <= self._share
            steps = [timing.step for timing in timings]
            assert steps == sorted(set(steps))

    def _keep_ranks(self, worker: str, ranks: tuple[RankTimes, ...]) -> None:
        self._ranks.pop(worker, None)
        if ranks:
            self._ranks[worker] = ranks
        while sum(map(len, self._ranks.values())) > RANKS:
            del self._ranks[next(iter(self._ranks))]

    def _make_room(self) -> None:
        """Halves each worker's share until all fit. This is rare, so it may visit all of them."""
        if len(self._steps) * self._share <= IN_ALL:
            return
        while len(self._steps) * self._share > IN_ALL:
            self._share //= 2
        self._steps = {worker: timings[-self._share :] for worker, timings in self._steps.items()}
