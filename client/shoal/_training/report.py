"""Reports of a worker to the coordinator: counts and metrics, within the limits of one report."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from shoal._wire import shortened, without_controls
from shoal._wire.limits import MAX_STEP, METRICS, STALENESS_BUCKETS, TIMINGS
from shoal.status import RankTimes, StepTiming

Key = TypeVar("Key", int, str)
# The metric that is kept if there are too many.
_LOSS = "loss"


@dataclass(frozen=True, slots=True)
class Report:
    """A worker's activity since its last report. Counts add up; `values` are means.

    The constructor brings all numbers within the coordinator's limits. `Outbox` limits the lines.

    Attributes:
        step: the worker's current step.
        accepted: pushes that servers accepted.
        rejected: pushes refused for NaN or Inf.
        dropped: pushes that arrived after their step had closed.
        samples: samples in the accepted pushes.
        values: means of metrics over the accepted pushes that gave them, at most METRICS: "loss" and the first other
            ones.
        staleness: accepted pushes by their staleness, in STALENESS_BUCKETS.
        log: lines of the program's output.
        timings: timings of the latest steps, at most TIMINGS, in order; if a step occurs twice, the later one counts.
        ranks: times of the ranks of the hybrid group that shares the worker's session, by rank. The later ones count.
        given: number of accepted pushes that gave each metric. By default, all of them gave it.
    """

    step: int = 0
    accepted: int = 0
    rejected: int = 0
    dropped: int = 0
    samples: int = 0
    values: Mapping[str, float] = field(default_factory=dict)
    staleness: Mapping[int, int] = field(default_factory=dict)
    log: tuple[str, ...] = ()
    timings: tuple[StepTiming, ...] = ()
    ranks: tuple[RankTimes, ...] = ()
    given: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if max(self.step, self.accepted, self.rejected, self.dropped, self.samples) >= MAX_STEP:
            for name in ("step", "accepted", "rejected", "dropped", "samples"):
                object.__setattr__(self, name, min(getattr(self, name), MAX_STEP - 1))
        object.__setattr__(self, "values", _bounded_values(self.values))
        object.__setattr__(self, "given", {name: self.given.get(name, self.accepted) for name in self.values})
        object.__setattr__(self, "staleness", _bounded_staleness(self.staleness))
        if self.timings:
            object.__setattr__(self, "timings", _bounded_timings(self.timings))

    def merged_with(self, later: "Report") -> "Report":
        """Returns the sum of this report and a later one, for a report that could not be sent."""
        return Report(
            step=later.step or self.step,
            accepted=self.accepted + later.accepted,
            rejected=self.rejected + later.rejected,
            dropped=self.dropped + later.dropped,
            samples=self.samples + later.samples,
            values=self._joined_values(later),
            staleness=_summed(self.staleness, later.staleness),
            log=self.log + later.log,
            timings=self.timings + later.timings,
            ranks=later.ranks or self.ranks,
            given=_summed(self.given, later.given),
        )

    def _joined_values(self, later: "Report") -> dict[str, float]:
        """Returns the means over both reports. A push that did not give a metric does not count for it."""
        joined = {**self.values, **later.values}
        for name in self.values.keys() & later.values.keys():
            total = self.given[name] + later.given[name]
            share = later.given[name] / total if total else 1.0
            joined[name] = (1 - share) * self.values[name] + share * later.values[name]
        return joined


def _summed(earlier: Mapping[Key, int], later: Mapping[Key, int]) -> dict[Key, int]:
    total = dict(earlier)
    for key, count in later.items():
        total[key] = total.get(key, 0) + count
    return dict(sorted(total.items())) if len(total) > len(earlier) else total  # of most steps, nothing is new


def _bounded_values(values: Mapping[str, float]) -> dict[str, float]:
    names = [*values]
    if len(names) > METRICS:
        names = [name for name in names if name != _LOSS][: METRICS - 1] + [_LOSS] * (_LOSS in values)
    return {_bounded_name(name): values[name] for name in names}


def _bounded_name(name: str) -> str:
    return shortened(without_controls(str(name)))


def _bounded_staleness(counts: Mapping[int, int]) -> dict[int, int]:
    bounded: dict[int, int] = {}
    for staleness, count in counts.items():
        bucket = min(staleness, STALENESS_BUCKETS - 1)
        bounded[bucket] = min(bounded.get(bucket, 0) + count, MAX_STEP - 1)
    return bounded


def _bounded_timings(timings: Iterable[StepTiming]) -> tuple[StepTiming, ...]:
    by_step = {timing.step: timing for timing in timings if timing.step < MAX_STEP}
    return tuple(by_step[step] for step in sorted(by_step)[-TIMINGS:])


__all__ = ["Report"]
