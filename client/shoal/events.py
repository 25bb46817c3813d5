"""What happens to a job, event by event, and a stream of it that survives a broken connection."""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from shoal import _rpc, errors
from shoal._rpc import Backoff, CoordinatorClient
from shoal.status import Evaluation, JobState, Progress, SavedCheckpoint
from shoal.v1 import job_pb2


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a job.

    Attributes:
        sequence: its number in the job, from 1; resume with `events(after=sequence)`.
        time: seconds of Unix time, by the coordinator's clock.
    """

    sequence: int
    time: float


@dataclass(frozen=True, slots=True)
class StateChanged(Event):
    """The job entered a state.

    Attributes:
        state: the new one.
        reason: why, where there is something to say: of a failure, with the program's traceback where there is one.
    """

    state: JobState
    reason: str


@dataclass(frozen=True, slots=True)
class MetricsReported(Event):
    """A worker reported.

    Attributes:
        worker: its member id.
        step: its own.
        values: means since its last report: "loss", and what the program adds.
        progress: of the whole job, after this report.
    """

    worker: str
    step: int
    values: Mapping[str, float]
    progress: Progress


@dataclass(frozen=True, slots=True)
class CheckpointEnded(Event):
    """An attempt at a checkpoint is over.

    Attributes:
        attempt: counts the job's, from 1.
        saved: the checkpoint, which is whole; None: it was given up.
        seconds: from the cut until it was whole, or given up.
        failure: why it was given up.
    """

    attempt: int
    saved: SavedCheckpoint | None
    seconds: float
    failure: str


@dataclass(frozen=True, slots=True)
class EvaluationEnded(Event):
    """A worker has evaluated the variables on the program's held-out samples.

    Attributes:
        worker: its member id.
        result: what it found.
        best: it is the best so far, by the job's metric.
    """

    worker: str
    result: Evaluation
    best: bool


@dataclass(frozen=True, slots=True)
class LogLine(Event):
    """A line that a worker's program wrote."""

    worker: str
    text: str

    def __str__(self) -> str:
        return f"{self.worker}: {self.text}"


def from_proto(message: job_pb2.Event) -> Event:
    """The event that a message carries; a plain `Event` for a kind that is newer than this client."""
    sequence, when = message.sequence, message.time
    match message.WhichOneof("kind"):
        case "state":
            return StateChanged(sequence, when, JobState.from_proto(message.state.state), message.state.reason)
        case "metrics":
            metrics = message.metrics
            progress = Progress.from_proto(metrics.progress)
            return MetricsReported(sequence, when, metrics.worker, metrics.step, dict(metrics.values), progress)
        case "checkpoint":
            end = message.checkpoint
            saved = SavedCheckpoint.from_proto(end.saved) if end.HasField("saved") else None
            return CheckpointEnded(sequence, when, end.attempt, saved, end.seconds, end.failure)
        case "evaluation":
            evaluated = message.evaluation
            return EvaluationEnded(
                sequence, when, evaluated.worker, Evaluation.from_proto(evaluated.result), evaluated.best
            )
        case "log":
            return LogLine(sequence, when, message.log.worker, message.log.text)
        case _:
            return Event(sequence, when)


def watch(
    coordinator: CoordinatorClient,
    job: str,
    *,
    after: int = 0,
    follow: bool = True,
    timeout_s: float | None = None,
    sleep: Callable[[float], object] = time.sleep,
    jitter: Callable[[], float] = random.random,
) -> Iterator[Event]:
    """Yields a job's events in order, each once, through broken streams and coordinators that come back.

    A stream that breaks is opened anew after the last event that came, once the coordinator answers again.

    Args:
        coordinator: the way to it.
        job: name.
        after: the sequence number to begin behind.
        follow: wait for more until the job has ended, instead of ending with what there is.
        timeout_s: how long to follow; None: as long as the job lives.
        sleep: waits so many seconds.
        jitter: a number in [0, 1), drawn for each pause.

    Raises:
        UnknownJob: there is no such job, or none any more.
        Unreachable: the coordinator was away for longer than it is waited for.
        DeadlineExceeded: `timeout_s` is over.
    """
    end = None if timeout_s is None else time.monotonic() + timeout_s
    pauses, over = Backoff(jitter), False
    while True:
        try:
            for event in _stream(coordinator, job, after, follow, end):
                yield event
                after = event.sequence
                pauses.reset()
                if isinstance(event, StateChanged) and event.state.finished:
                    return
            whole = True
        except errors.DeadlineExceeded:
            raise errors.DeadlineExceeded(f"job {job} has not ended within {timeout_s:g} s", job=job) from None
        except errors.Unreachable:
            whole = False
        if whole and (over or not follow):
            return
        # A stream that ended without the job's end may have been cut short: only one that began after it was not.
        over = _has_ended(coordinator, job)
        sleep(pauses.next())


def _has_ended(coordinator: CoordinatorClient, job: str) -> bool:
    """Whether a job is over; waits for a coordinator that is away."""
    status = coordinator.call(coordinator.jobs.Get, job_pb2.GetRequest(job=job)).status
    return JobState.from_proto(status.state).finished


def _stream(coordinator: CoordinatorClient, job: str, after: int, follow: bool, end: float | None) -> Iterator[Event]:
    """One attempt: the events of one call."""
    left = None if end is None else max(0.0, end - time.monotonic())
    request = job_pb2.WatchRequest(job=job, after=after, no_wait=not follow)
    with _rpc.as_shoal_errors(coordinator.address):
        call = coordinator.jobs.Watch(request, timeout=left)
        try:
            for message in call:
                yield from_proto(message)
        finally:
            call.cancel()


__all__ = [
    "CheckpointEnded",
    "EvaluationEnded",
    "Event",
    "LogLine",
    "MetricsReported",
    "StateChanged",
    "from_proto",
    "watch",
]
