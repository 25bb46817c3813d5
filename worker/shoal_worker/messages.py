"""What the daemon and its trainer say to each other: one line of JSON down, perhaps a word later, many lines up."""

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal._rpc import RetryTarget
from shoal._training.participant import Report
from shoal._wire import Cursor
from shoal.status import StepTiming
from shoal.timings import PHASES

# Upper bounds of a duration's buckets, in seconds; above the last one there is one more.
BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
# A second line down, while it trains: finish the batch in hand, and leave.
LEAVE = b"leave\n"
# Another: finish the batch in hand, for then there is nothing left to do.
ENOUGH = b"enough\n"


@dataclass(frozen=True, slots=True)
class Instructions:
    """All that a trainer is told; the rest it asks the coordinator.

    Attributes:
        coordinator: host:port.
        job: to train.
        worker: the daemon's member id, under which the trainer pulls and pushes.
        incarnation: of the daemon.
        assignment: what the coordinator calls this part in the job.
        device: "auto", "cpu" or "cuda:N".
        device_memory_limit: of a GPU: bytes, or a share of it if at most 1; 0: none.
        paths: folders that the program is imported from, before all others.
        retry_for_s: how long calls are repeated while nobody answers, in seconds.
        reports_fd: the file that the trainer writes its lines to.
    """

    coordinator: str
    job: str
    worker: str
    incarnation: int
    assignment: int
    device: str
    device_memory_limit: float
    paths: tuple[str, ...]
    retry_for_s: float
    reports_fd: int

    def to_line(self) -> bytes:
        """One line of JSON."""
        return _line(asdict(self))

    @classmethod
    def from_line(cls, line: bytes) -> "Instructions":
        """Reads `to_line`."""
        fields = json.loads(line)
        return cls(**{**fields, "paths": tuple(fields["paths"])})


@dataclass(slots=True)
class Durations:
    """A histogram of seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))  # by bucket of BUCKETS_S
    total_s: float = 0.0

    def observe(self, seconds: float) -> None:
        """Adds one duration."""
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.total_s += seconds

    def add(self, other: "Durations") -> None:
        """Adds all durations of another."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total_s += other.total_s


@dataclass(frozen=True, slots=True)
class TrainerReport:
    """What a trainer did since its last figures.

    Attributes:
        report: for the coordinator.
        durations: for metrics, by phase of a step.
        device_memory: for metrics, bytes now: what `Device.memory` says.
        retries: for metrics, how often calls were repeated, by what was called.
    """

    report: Report
    durations: Mapping[str, Durations]
    device_memory: Mapping[str, int] = field(default_factory=dict)
    retries: Mapping[RetryTarget, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainerOutcome:
    """How a trainer ended.

    It tells its daemon and not the coordinator, because the job's last log lines are still on their way to the
    daemon: they go first.

    Attributes:
        error: what the job fails with; empty: it ended well.
        lost: the error is that the job's shards are not on their servers (any more): it may go on from a checkpoint.
        fenced: this life of the worker is refused, or was cut off from the others for too long, so it neither finished
            nor failed; `error` says why.
        left: it was told to leave, so it neither finished nor failed.
        cursor: with `left`, how far it is in the range of data that it holds; None: it holds none.
    """

    error: str = ""
    lost: bool = False
    fenced: bool = False
    left: bool = False
    cursor: Cursor | None = None


def encode(message: TrainerReport | TrainerOutcome) -> bytes:
    """One line of JSON."""
    return _line({type(message).__name__: asdict(message)})


def decode(line: bytes) -> TrainerReport | TrainerOutcome:
    """Reads `encode`."""
    [(kind, fields)] = json.loads(line).items()
    if kind == "TrainerOutcome":
        cursor = fields["cursor"]
        return TrainerOutcome(**{**fields, "cursor": Cursor(**cursor) if cursor else None})
    report = fields["report"]
    staleness = {int(key): count for key, count in report["staleness"].items()}
    timings = tuple(StepTiming(**timing) for timing in report["timings"])
    return TrainerReport(
        report=Report(**{**report, "staleness": staleness, "log": tuple(report["log"]), "timings": timings}),
        durations={phase: Durations(**durations) for phase, durations in fields["durations"].items()},
        device_memory=fields["device_memory"],
        retries=fields["retries"],
    )


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


__all__ = [
    "BUCKETS_S",
    "ENOUGH",
    "LEAVE",
    "PHASES",
    "Durations",
    "Instructions",
    "TrainerOutcome",
    "TrainerReport",
    "decode",
    "encode",
]
