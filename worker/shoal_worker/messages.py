"""Messages between the daemon and its trainer, one per line.

The daemon sends one line of JSON. Later it may send a command of one word, or a ticket. The trainer sends many lines of
JSON.
"""

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal._rpc import RetryTarget
from shoal._training import Report
from shoal._wire import Cursor
from shoal.status import StepTiming
from shoal.timings import PHASES

# Upper bounds of the buckets of durations, in seconds; one more bucket follows the last bound.
BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
# Word of the daemon: finish the current batch and leave the job.
LEAVE = b"leave\n"
# Word of the daemon: finish the current batch; then the job has nothing left to do.
STOP_AFTER_BATCH = b"stop_after_batch\n"
# Word of the daemon before a `TicketReply`.
TICKET = b"ticket "


@dataclass(frozen=True, slots=True)
class Instructions:
    """First message to a trainer. It gets everything else from the coordinator.

    Attributes:
        coordinator: host:port.
        job: name of the job to train.
        worker: the daemon's member id, under which the trainer pulls and pushes.
        incarnation: the daemon's incarnation.
        assignment: the coordinator's number of this assignment.
        device: "auto", "cpu" or "cuda:N".
        device_memory_limit: limit of GPU memory: bytes, or a share if at most 1; 0 means no limit.
        paths: folders that the program is imported from, before all others.
        allow_programs: patterns of allowed programs; see `shoal_worker.allowed_programs`.
        submitter: the name of the job's submitter; empty if it is not known.
        submitter_role: the access role of the submitter; empty if it is not known.
        retry_for_s: seconds for which unanswered calls are repeated.
        reports_fd: file descriptor that the trainer writes its messages to.
        tls: paths of the trainer's files for TLS: the CA, the certificate and the key. Empty without TLS.
        needs_tickets: whether the cluster asks for tickets. The trainer then requests them from the daemon.
    """

    coordinator: str
    job: str
    worker: str
    incarnation: int
    assignment: int
    device: str
    device_memory_limit: float
    paths: tuple[str, ...]
    allow_programs: tuple[str, ...]
    retry_for_s: float
    reports_fd: int
    submitter: str = ""
    submitter_role: str = ""
    tls: tuple[str, ...] = ()
    needs_tickets: bool = False

    def to_line(self) -> bytes:
        """Returns one line of JSON."""
        return _line(asdict(self))

    @classmethod
    def from_line(cls, line: bytes) -> "Instructions":
        """Parses a line of `to_line`."""
        fields = json.loads(line)
        lists = {name: tuple(fields[name]) for name in ("paths", "allow_programs", "tls")}
        return cls(**{**fields, **lists})


@dataclass(slots=True)
class Durations:
    """Histogram of durations in seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))  # by bucket of BUCKETS_S
    total_s: float = 0.0

    def observe(self, seconds: float) -> None:
        """Adds one duration."""
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.total_s += seconds

    def add(self, other: "Durations") -> None:
        """Adds all durations of another histogram."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total_s += other.total_s


@dataclass(frozen=True, slots=True)
class TrainerReport:
    """Activity of a trainer since its last report.

    Attributes:
        report: the part for the coordinator.
        durations: by phase of a step, for metrics.
        device_memory: current bytes by kind, from `Device.memory`, for metrics.
        retries: number of repeated calls by target, for metrics.
    """

    report: Report
    durations: Mapping[str, Durations]
    device_memory: Mapping[str, int] = field(default_factory=dict)
    retries: Mapping[RetryTarget, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainerOutcome:
    """How a trainer ended.

    The trainer sends it to the daemon and not to the coordinator, so that the job's last log lines, which go through
    the daemon, arrive first.

    Attributes:
        error: the error that the job fails with; empty if it succeeded.
        shards_lost: whether the error is that the job's shards are not on their servers. The job may then restart from
            a checkpoint.
        fenced: this incarnation was fenced, or for long reached no coordinator or no primary of its shards, or was
            refused for now. The trainer neither finished nor failed; `error` has the reason.
        left: the trainer was asked to leave. It neither finished nor failed.
        cursor: without an error, the position in the leased range; None if no range is leased.
    """

    error: str = ""
    shards_lost: bool = False
    fenced: bool = False
    left: bool = False
    cursor: Cursor | None = None


@dataclass(frozen=True, slots=True)
class TicketWanted:
    """Request of a trainer for a ticket. The daemon answers with `TicketReply`.

    Attributes:
        has_one: whether the trainer has a valid ticket. If so, the daemon asks the coordinator only once.
    """

    has_one: bool


@dataclass(frozen=True, slots=True)
class TicketReply:
    """Reply of the daemon to `TicketWanted`.

    Attributes:
        ticket: the ticket.
        valid_s: seconds for which it is valid.
        code: code of the error why there is no ticket; empty if there is one.
        message: text of the error.
    """

    ticket: str = ""
    valid_s: float = 0.0
    code: str = ""
    message: str = ""

    def to_line(self) -> bytes:
        """Returns one line: the word `TICKET`, and JSON."""
        return TICKET + _line(asdict(self))

    @classmethod
    def from_line(cls, line: bytes) -> "TicketReply":
        """Parses a line of `to_line`."""
        return cls(**json.loads(line.removeprefix(TICKET)))


TrainerMessage = TrainerReport | TrainerOutcome | TicketWanted


def encode(message: TrainerMessage) -> bytes:
    """Returns one line of JSON."""
    return _line({type(message).__name__: asdict(message)})


def decode(line: bytes) -> TrainerMessage:
    """Parses a line of `encode`."""
    [(kind, fields)] = json.loads(line).items()
    if kind == "TicketWanted":
        return TicketWanted(**fields)
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
    "LEAVE",
    "PHASES",
    "STOP_AFTER_BATCH",
    "TICKET",
    "Durations",
    "Instructions",
    "TicketReply",
    "TicketWanted",
    "TrainerMessage",
    "TrainerOutcome",
    "TrainerReport",
    "decode",
    "encode",
]
