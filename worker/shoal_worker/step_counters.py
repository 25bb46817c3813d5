"""Counters of a trainer's steps since its last report."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from shoal._training import PushResult, Report, StepClock
from shoal_worker.messages import PHASES, Durations, TrainerReport


class StepCounters:
    """Counters of steps, pushes and durations until the next report.

    Args:
        clock: returns seconds from any origin.
        now: returns seconds of Unix time.
    """

    def __init__(self, clock: Callable[[], float], now: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._steps = StepClock(now)
        self._reset()

    @property
    def age_s(self) -> float:
        """Returns the seconds since the last report."""
        return self._clock() - self._since

    @contextmanager
    def timed(self, phase: str, but: Callable[[], float] = lambda: 0.0) -> Iterator[None]:
        """Adds the block's time to a phase, also if it raises.

        Args:
            phase: one of PHASES.
            but: called at the end; returns the seconds that belong to another phase.
        """
        start = self._clock()
        try:
            yield
        finally:
            self.observe(phase, max(0.0, self._clock() - start - but()))

    def observe(self, phase: str, seconds: float) -> None:
        """Adds seconds to a phase."""
        self._durations[phase].observe(seconds)
        self._steps.observe(phase, seconds)

    def stepped(self, step: int) -> None:
        """Ends a step: later times belong to the next one."""
        self._steps.stepped(step)

    def pushed(self, result: PushResult, samples: int, values: Mapping[str, float]) -> None:
        """Counts an answered push. The metrics of a push that came too late are ignored.

        Args:
            result: the answer.
            samples: samples of its batch.
            values: the step's loss and metrics.
        """
        if result.outcome == "dropped_late":
            self._dropped += 1
            return
        self._accepted += 1
        self._samples += samples
        self._staleness[result.staleness] += 1
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] += 1

    def rejected(self) -> None:
        """Counts a push that was rejected because of NaN or Inf."""
        self._rejected += 1

    def take(self, step: int) -> TrainerReport:
        """Returns the report since the last one, and resets all counters."""
        values = {name: total / self._counts[name] for name, total in self._sums.items()}
        if self._accepted and (age_s := self.age_s):
            busy_s = self._durations["compute"].total_s + self._durations["evaluate"].total_s
            values["wait_share"] = max(0.0, 1 - busy_s / age_s)
        report = Report(
            step=step,
            accepted=self._accepted,
            rejected=self._rejected,
            dropped=self._dropped,
            samples=self._samples,
            values=values,
            staleness=dict(self._staleness),
            timings=self._steps.take(),
        )
        trainer_report = TrainerReport(report, self._durations)
        self._reset()
        return trainer_report

    def _reset(self) -> None:
        self._since = self._clock()
        self._accepted = self._rejected = self._dropped = self._samples = 0
        self._staleness: Counter[int] = Counter()
        self._sums: dict[str, float] = {}
        self._counts: Counter[str] = Counter()
        self._durations = {phase: Durations() for phase in PHASES}


__all__ = ["StepCounters"]
