"""Where the time of a job's steps went, and whom the others wait for: values, which `shoal.status` shows."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from shoal.v1 import job_pb2

# What a step's time goes into. "read": until the batch is there. "wait": barriers, leases and idling. "evaluate": now
# and then, an evaluation.
PHASES = ("pull", "read", "compute", "push", "wait", "evaluate")
# Those that are the worker's own doing, however slow the others are.
OWN = ("read", "compute", "push", "evaluate")

# Workers are compared by so many of their latest steps at most, and not by fewer than the second: who was slow long ago
# is no straggler, and a first step, which compiles and fills caches, says nothing.
_RECENT, _FEWEST = 64, 5
# A straggler takes this much longer than the others, and does so in more than this share of the steps.
_NOTICEABLE, _MOST = 1.2, 0.5
# A worker is gone of which the coordinator has heard nothing for so much longer than of others: so many seconds, and so
# many times its last step's.
_GONE_S, _GONE_STEPS = 10.0, 3.0


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Where the time of one step of one worker went: only what the step waited for, not what ran beside it.

    Attributes:
        step: the worker's own count.
        began: seconds of Unix time, by the worker's clock.
        pull: seconds until the values were there; a barrier that waits for other workers is in it.
        read: seconds until the batch was there.
        compute: seconds that the program took, with copies to the device and back.
        push: seconds; where pushes overlap with computing, what the step waited for the one before it.
        wait: seconds for a lease of data, for a barrier without a pull, idle.
        evaluate: seconds.
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
        """Seconds that were this worker's doing: all but what it waits for others."""
        return self.read + self.compute + self.push + self.evaluate

    @property
    def seconds(self) -> float:
        """Of all its phases."""
        return self.own + self.pull + self.wait

    def to_proto(self) -> job_pb2.StepTiming:
        """The message that carries it."""
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
        """The timing that a message carries."""
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
    """The worker that takes noticeably longer than the others.

    Attributes:
        worker: its member id.
        ratio: its own time of a step by the others'; both are medians.
        seconds: by how much its step takes longer.
        phase: what it spends most of that on: "read", "compute", "push" or "evaluate".
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
    """Workers side by side, without those that are gone (silent for 10 s longer than others) or trained on nothing.

    Attributes:
        typical: by worker a step whose phases are the medians of those that it is compared by: of the latest 64 that
            workers have in common its own; where those are fewer than 5, as each goes at its own pace, its latest 64.
            Its number and beginning are the last one's.
        slowest: by worker the share of the steps in common in which its own time was the longest; of workers that have
            such steps.
        straggler: who holds up the others, or lags behind where nobody waits: the worker whose own time of a typical
            step is the longest, at least 1.2 times the others' median, and was so in more than half of the steps in
            common. None: nobody is, or there are too few steps to say.
    """

    typical: Mapping[str, StepTiming]
    slowest: Mapping[str, float]
    straggler: Straggler | None


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of a job's latest steps went.

    Attributes:
        steps: by worker, in order of the steps: of each the latest, as many as were asked for and at most 256, fewer in
            a job of more than 64 workers. Kept in the coordinator's memory alone. Workers that are gone are among them
            until the job begins anew.
        staleness: accepted pushes by their staleness, in versions; the last bucket, 1,023, is "and above".
        heard: by worker when the coordinator last heard of a step that it trained in: seconds of Unix time, by the
            coordinator's clock. One that is not in it was heard of as lately as any.
    """

    steps: Mapping[str, tuple[StepTiming, ...]] = field(default_factory=dict)
    staleness: Mapping[int, int] = field(default_factory=dict)
    heard: Mapping[str, float] = field(default_factory=dict)

    def compared(self) -> Comparison:
        """The workers side by side."""
        present = _present(self.steps, self.heard)
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
        """Who holds up the others: see `Comparison`."""
        return self.compared().straggler

    def latest(self, last: int) -> "Timings":
        """The same with so many steps of each worker at most, the latest."""
        return replace(self, steps={worker: steps[-last:] for worker, steps in self.steps.items()})

    @classmethod
    def from_proto(cls, message: job_pb2.GetTimingsReply) -> "Timings":
        """The timings that a message carries."""
        steps = {each.worker: tuple(map(StepTiming.from_proto, each.steps)) for each in message.workers}
        heard = {each.worker: each.heard for each in message.workers if each.heard}
        return cls(steps, dict(sorted(message.staleness.items())), heard)


def _present(steps: Mapping[str, Sequence[StepTiming]], heard: Mapping[str, float]) -> dict[str, list[StepTiming]]:
    """By worker the steps that were trained on something: who has no data passes its steps by, and is fast at it."""
    trained = {worker: [timing for timing in timings if timing.own > 0] for worker, timings in sorted(steps.items())}
    latest = max(heard.values(), default=0.0)
    return {
        worker: timings
        for worker, timings in trained.items()
        if timings and latest - heard.get(worker, latest) <= max(_GONE_S, _GONE_STEPS * timings[-1].seconds)
    }


def _common(steps: Mapping[str, Sequence[StepTiming]]) -> list[dict[str, StepTiming]]:
    """The latest steps that two workers at least have taken: of each what it took them; none if there are too few."""
    rows: dict[int, dict[str, StepTiming]] = {}
    for worker, timings in steps.items():
        for timing in timings:
            rows.setdefault(timing.step, {})[worker] = timing
    shared = [rows[step] for step in sorted(rows) if len(rows[step]) > 1]
    return shared[-_RECENT:] if len(shared) >= _FEWEST else []


def _median(timings: Sequence[StepTiming]) -> StepTiming:
    """Each phase by itself."""
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
