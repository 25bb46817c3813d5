"""Timings of a job's steps by phase, and the detection of stragglers. `shoal.status` exports the classes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from shoal._status.rank_times import GroupTimings, RankTimes
from shoal.v1 import job_pb2

PHASES = ("pull", "read", "compute", "push", "wait", "evaluate")
"""The phases of a step. `StepTiming` describes them."""

OWN = ("read", "compute", "push", "evaluate")
"""The phases that do not depend on the speed of other workers."""

# The most and the fewest steps by which workers are compared. Older steps do not show the present; the first ones
# compile code and fill caches.
_RECENT, _FEWEST = 64, 5
# A straggler's own time is this many times the others', and the longest in more than this share of the steps.
_NOTICEABLE, _MOST = 1.2, 0.5
# A worker counts as gone when its last step was reported this many seconds, and this many of its own steps, before the
# latest report of any worker.
_GONE_S, _GONE_STEPS = 10.0, 3.0


@dataclass(frozen=True, slots=True)
class StepTiming:
    """The time of one step of one worker by phase. Work that overlaps with the step does not count.

    Attributes:
        step: number of the step, by the worker's own count.
        began: start of the step, as Unix time in seconds, by the worker's clock.
        pull: seconds of waiting for the values, including a barrier that waits for other workers.
        read: seconds of waiting for the batch.
        compute: seconds of the program, including copies to the device and back.
        push: seconds of the push. With overlap, seconds of waiting for the previous push.
        wait: seconds of waiting for a lease or for a barrier without a pull, and of idle time.
        evaluate: seconds of an evaluation.
    """

    step: int
    began: float
    pull: float = 0.0
    read: float = 0.0
    compute: float = 0.0
    push: float = 0.0
    wait: float = 0.0
    evaluate: float = 0.0

    @property
    def own(self) -> float:
        """Seconds of the phases that do not depend on other workers."""
        return self.read + self.compute + self.push + self.evaluate

    @property
    def seconds(self) -> float:
        """Seconds of all phases."""
        return self.own + self.pull + self.wait

    def to_proto(self) -> job_pb2.StepTiming:
        """Returns the message that carries the timing."""
        return job_pb2.StepTiming(
            step=self.step,
            began=self.began,
            pull=self.pull,
            read=self.read,
            compute=self.compute,
            push=self.push,
            wait=self.wait,
            evaluate=self.evaluate,
        )

    @classmethod
    def from_proto(cls, message: job_pb2.StepTiming) -> "StepTiming":
        """Returns the timing that a message carries."""
        return cls(
            message.step,
            message.began,
            message.pull,
            message.read,
            message.compute,
            message.push,
            message.wait,
            message.evaluate,
        )


@dataclass(frozen=True, slots=True)
class Straggler:
    """A worker whose steps take much longer than those of the others.

    Attributes:
        worker: member id of the worker.
        ratio: its own time per step divided by the others', both as medians.
        seconds: its own time per step minus the others'.
        phase: the phase with the largest difference: "read", "compute", "push" or "evaluate".
    """

    worker: str
    ratio: float
    seconds: float
    phase: str

    def __str__(self) -> str:
        more = f"{self.seconds:.3g} s" if self.seconds >= 1 else f"{1e3 * self.seconds:.3g} ms"
        return (
            f"{self.worker} takes {self.ratio:.1f} times as long as the others: {more} more a step, "
            f"most of it in {self.phase}"
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of the workers of a job.

    Workers that had no data, and workers that are gone, are left out. A worker is gone if its last reported step is
    older than the newest one of all workers by more than 10 s, and by more than three of its own steps.

    Attributes:
        typical: typical step of each worker. Each phase is a median over the common steps that the worker has taken.
            Common steps are the latest 64 steps that two or more workers have taken. If the worker has taken fewer than
            5 common steps, the median is over the latest 64 steps of the worker. The number and the start of a typical
            step are those of the last step in this median.
        slowest: for each worker with common steps, the share of these steps in which its own time (`StepTiming.own`)
            was the longest.
        straggler: the worker with the longest own time of a typical step, if that is at least 1.2 times the others'
            median and the worker was the slowest in more than half of the common steps. None means that there is no
            such worker, or that there are too few steps.
    """

    typical: Mapping[str, StepTiming]
    slowest: Mapping[str, float]
    straggler: Straggler | None


@dataclass(frozen=True, slots=True)
class Timings:
    """The timings of a job's latest steps.

    Attributes:
        steps: latest steps of each worker in order, at most 256, fewer in a job of more than 64 workers. The
            coordinator keeps them in memory only. Lost workers are included until the job restarts.
        staleness: number of accepted pushes by staleness in versions. The last bucket, 1,023, includes all above.
        last_reported_at: for each worker, when it last reported a step with data, in seconds of Unix time by
            the coordinator's clock. A worker without an entry counts as up to date.
        groups: for each session that a hybrid group shares, the times of the group's ranks over the last minute.
    """

    steps: Mapping[str, tuple[StepTiming, ...]] = field(default_factory=dict)
    staleness: Mapping[int, int] = field(default_factory=dict)
    last_reported_at: Mapping[str, float] = field(default_factory=dict)
    groups: Mapping[str, GroupTimings] = field(default_factory=dict)

    def compared(self) -> Comparison:
        """Returns the comparison of the workers."""
        present = _present(self.steps, self.last_reported_at)
        common = _common(present)
        shared = {worker: [row[worker] for row in common if worker in row] for worker in present}
        longest = Counter(max(row, key=lambda worker: row[worker].own) for row in common)
        slowest = {worker: longest[worker] / len(steps) for worker, steps in shared.items() if steps}
        chosen = {
            worker: shared[worker] if len(shared[worker]) >= _FEWEST else steps[-_RECENT:]
            for worker, steps in present.items()
        }
        typical = {worker: _median(steps) for worker, steps in chosen.items()}
        known = {worker: typical[worker] for worker, steps in chosen.items() if len(steps) >= _FEWEST}
        return Comparison(typical, slowest, _straggler(known, slowest))

    def straggler(self) -> Straggler | None:
        """Returns the straggler, or None: see `Comparison`."""
        return self.compared().straggler

    def latest(self, last: int) -> "Timings":
        """Returns a copy with at most the `last` latest steps of each worker."""
        return replace(self, steps={worker: steps[-last:] for worker, steps in self.steps.items()})

    @classmethod
    def from_proto(cls, message: job_pb2.GetTimingsReply) -> "Timings":
        """Returns the timings that a message carries."""
        steps = {each.worker: tuple(map(StepTiming.from_proto, each.steps)) for each in message.workers}
        last_reported_at = {each.worker: each.last_reported_at for each in message.workers if each.last_reported_at}
        groups = {
            each.worker: GroupTimings(tuple(map(RankTimes.from_proto, each.ranks)))
            for each in message.workers
            if each.ranks
        }
        return cls(steps, dict(sorted(message.staleness.items())), last_reported_at, groups)


def _present(
    steps: Mapping[str, Sequence[StepTiming]], last_reported_at: Mapping[str, float]
) -> dict[str, list[StepTiming]]:
    """Returns the steps with data of each worker that is not gone. A worker without data skips its steps quickly."""
    trained = {worker: [timing for timing in timings if timing.own > 0] for worker, timings in sorted(steps.items())}
    latest = max(last_reported_at.values(), default=0.0)
    return {
        worker: timings
        for worker, timings in trained.items()
        if timings and latest - last_reported_at.get(worker, latest) <= max(_GONE_S, _GONE_STEPS * timings[-1].seconds)
    }


def _common(steps: Mapping[str, Sequence[StepTiming]]) -> list[dict[str, StepTiming]]:
    """Returns the latest common steps, each as timings by worker, or [] if there are fewer than `_FEWEST`."""
    rows: dict[int, dict[str, StepTiming]] = {}
    for worker, timings in steps.items():
        for timing in timings:
            rows.setdefault(timing.step, {})[worker] = timing
    shared = [rows[step] for step in sorted(rows) if len(rows[step]) > 1]
    return shared[-_RECENT:] if len(shared) >= _FEWEST else []


def _median(timings: Sequence[StepTiming]) -> StepTiming:
    """Returns a step whose phases are the medians of the given steps' phases."""
    medians = {phase: median(getattr(timing, phase) for timing in timings) for phase in PHASES}
    return StepTiming(timings[-1].step, timings[-1].began, **medians)


def _straggler(typical: Mapping[str, StepTiming], slowest: Mapping[str, float]) -> Straggler | None:
    if len(typical) < 2:
        return None
    worker = max(typical, key=lambda worker: typical[worker].own)
    its, others = typical[worker], _median([step for each, step in typical.items() if each != worker])
    noticeable = its.own >= _NOTICEABLE * others.own > 0
    if not noticeable or slowest.get(worker, 1.0) <= _MOST:
        return None
    phase = max(OWN, key=lambda phase: getattr(its, phase) - getattr(others, phase))
    return Straggler(worker, its.own / others.own, its.own - others.own, phase)


__all__ = ["OWN", "PHASES", "Comparison", "StepTiming", "Straggler", "Timings"]
