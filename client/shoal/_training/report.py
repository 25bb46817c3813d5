"""Reports of a worker to the coordinator: figures that add up, cut to what a report may carry."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shoal._wire.limits import METRIC_NAME_BYTES, METRICS, STALENESS_BUCKETS, TIMINGS
from shoal.status import StepTiming

# The wire's width of counts.
_UINT64 = 2**64 - 1
# The metric that is kept where there are too many.
_LOSS = "loss"


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker did since its last report. The figures add up; `values` are means.

    Made of anything, its figures are such that the coordinator takes them; its lines are the `Outbox`'s to bound.

    Attributes:
        step: the worker's own, now.
        accepted: pushes that servers took.
        rejected: pushes refused for NaN or Inf.
        dropped: pushes that came after their step had closed.
        samples: samples in the accepted pushes.
        values: means over the accepted pushes: "loss" and more, METRICS at most; the first ones are kept, and "loss".
        staleness: accepted pushes by their staleness, in STALENESS_BUCKETS.
        log: lines of the program's output.
        timings: of the latest steps, TIMINGS at most, in order; of a step that is there twice the later one.
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

    def __post_init__(self) -> None:
        for name in ("step", "accepted", "rejected", "dropped", "samples"):
            object.__setattr__(self, name, min(getattr(self, name), _UINT64))
        object.__setattr__(self, "values", _bounded_values(self.values))
        object.__setattr__(self, "staleness", _bounded_staleness(self.staleness))
        object.__setattr__(self, "timings", _bounded_timings(self.timings))

    def merged_with(self, later: "Report") -> "Report":
        """This report and a later one as one, for when this one could not be sent."""
        return Report(
            step=later.step or self.step,
            accepted=self.accepted + later.accepted,
            rejected=self.rejected + later.rejected,
            dropped=self.dropped + later.dropped,
            samples=self.samples + later.samples,
            values=self._joined_values(later),
            staleness={
                key: self.staleness.get(key, 0) + later.staleness.get(key, 0)
                for key in sorted({*self.staleness, *later.staleness})
            },
            log=self.log + later.log,
            timings=self.timings + later.timings,
        )

    def _joined_values(self, later: "Report") -> dict[str, float]:
        total = self.accepted + later.accepted
        share = later.accepted / total if total else 1.0
        joined = {**self.values, **later.values}
        both = self.values.keys() & later.values.keys()
        return joined | {key: (1 - share) * self.values[key] + share * later.values[key] for key in both}


def _bounded_values(values: Mapping[str, float]) -> dict[str, float]:
    names = [*values]
    if len(names) > METRICS:
        names = [name for name in names if name != _LOSS][: METRICS - 1] + [_LOSS] * (_LOSS in values)
    return {_bounded_name(name): values[name] for name in names}


def _bounded_name(name: str) -> str:
    return str(name).encode(errors="replace")[:METRIC_NAME_BYTES].decode(errors="ignore")


def _bounded_staleness(counts: Mapping[int, int]) -> dict[int, int]:
    bounded: dict[int, int] = {}
    for staleness, count in counts.items():
        bucket = min(staleness, STALENESS_BUCKETS - 1)
        bounded[bucket] = bounded.get(bucket, 0) + count
    return bounded


def _bounded_timings(timings: Iterable[StepTiming]) -> tuple[StepTiming, ...]:
    by_step = {timing.step: timing for timing in timings}
    return tuple(by_step[step] for step in sorted(by_step)[-TIMINGS:])


__all__ = ["Report"]
