"""Events of a job, and a stream of them that survives broken connections."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from shoal import _rpc, errors
from shoal._rpc import Backoff, CoordinatorClient
from shoal._system import ENTROPY, check_count, check_seconds, check_type
from shoal.status import Evaluation, JobState, Progress, SavedCheckpoint
from shoal.v1 import job_pb2

# Errors after which a stream begins again. A call that follows a job also waits until fewer others watch jobs.
_BROKEN = (errors.Unreachable, errors.Unauthenticated)
_PASSING = (*_BROKEN, errors.Overloaded)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a job.

    Attributes:
        sequence: number of the event within its job, from 1. `JobHandle.events(after=sequence)` resumes after it.
        time: Unix time in seconds, by the coordinator's clock.
    """

    sequence: int
    time: float


@dataclass(frozen=True, slots=True)
class StateChanged(Event):
    """The job's state, or the reason for it, has changed.

    Attributes:
        state: the state after the change.
        reason: what the job waits for, or why it failed or ended early, or "". If the program failed, the reason
            includes the traceback.
    """

    state: JobState
    reason: str


@dataclass(frozen=True, slots=True)
class MetricsReported(Event):
    """A worker has sent a report.

    Attributes:
        worker: member id of the worker.
        step: the worker's step.
        values: means since the worker's last report, by name: "loss", and the metrics of the program.
        progress: progress of the whole job, including this report.
    """

    worker: str
    step: int
    values: Mapping[str, float]
    progress: Progress


@dataclass(frozen=True, slots=True)
class CheckpointEnded(Event):
    """An attempt to take a checkpoint has ended.

    Attributes:
        attempt: number of the attempt within the job, from 1.
        saved: the complete checkpoint. None means that the attempt failed.
        seconds: time from the cut until the checkpoint was complete or failed.
        failure: why the attempt failed, or "".
    """

    attempt: int
    saved: SavedCheckpoint | None
    seconds: float
    failure: str


@dataclass(frozen=True, slots=True)
class EvaluationEnded(Event):
    """A worker has evaluated the variables on the program's held-out samples.

    Attributes:
        worker: member id of the worker.
        result: the evaluation.
        best: whether it is the best so far, by the metric of the job's `EvaluationPolicy`.
    """

    worker: str
    result: Evaluation
    best: bool


@dataclass(frozen=True, slots=True)
class LogLine(Event):
    """A line of output of a worker's program.

    Attributes:
        worker: member id of the worker.
        text: the line.
    """

    worker: str
    text: str

    def __str__(self) -> str:
        return f"{self.worker}: {self.text}"


def from_proto(message: job_pb2.Event) -> Event:
    """Returns the event that a message carries: a plain `Event` if its kind is newer than this client."""
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


def checked(callbacks: Iterable[Callable[[Event], object]]) -> tuple[Callable[[Event], object], ...]:
    """Returns the callbacks of a wait, which may be given as any iterable.

    Raises:
        BadRequest: they are not an iterable of functions.
    """
    give = "a list of functions or objects of shoal.callbacks, such as [shoal.callbacks.ProgressBar()]"
    check_type("callbacks", callbacks, Iterable, give)
    listed = tuple(callbacks)
    for callback in listed:
        check_type("a callback", callback, Callable, give)  # type: ignore[arg-type] # a class at run time
    return listed


def watch(
    coordinator: CoordinatorClient,
    job: str,
    *,
    after: int = 0,
    follow: bool = True,
    timeout_s: float | None = None,
    sleep: Callable[[float], object] = time.sleep,
    jitter: Callable[[], float] = ENTROPY.random,
) -> Iterator[Event]:
    """Yields a job's events in order, each once, across broken streams and restarts of the coordinator.

    When a stream breaks, the next one starts after the last event received, as soon as the coordinator answers again.

    Args:
        coordinator: client of the coordinator.
        job: name of the job.
        after: sequence number of the last event to leave out; 0 starts with the oldest event.
        follow: whether to wait for more events until the job has ended.
        timeout_s: how long to follow, in seconds. None means until the job ends.
        sleep: waits for a number of seconds.
        jitter: returns a random number in [0, 1) for each backoff.

    Yields:
        The events.

    Raises:
        BadRequest: `after` is not a whole number, or `timeout_s` is not a number.
        UnknownJob: there is no such job, or it was dropped.
        Unauthenticated: the token or the certificate has expired or was revoked, and was not replaced.
        Overloaded: `follow` is false, and too many other calls watch jobs.
        Unreachable: the coordinator did not answer for longer than the client retries.
        DeadlineExceeded: the job has not ended within `timeout_s`. The message has its state and what it waits for.
    """
    after = check_count("after", after)
    check_seconds("timeout_s", timeout_s, optional=True)
    latest: StateChanged | None = None
    end = None if timeout_s is None else time.monotonic() + timeout_s
    backoff, over, passing = Backoff(jitter), False, _PASSING if follow else _BROKEN
    while True:
        try:
            for event in _stream(coordinator, job, after, follow, end):
                yield event
                after = event.sequence
                backoff.reset()
                if isinstance(event, StateChanged):
                    latest = event
                    if event.state.finished:
                        return
            complete = True
        except errors.DeadlineExceeded:
            raise _too_late(job, timeout_s or 0.0, latest) from None
        except passing:
            # The token or the certificate of the stream may have ended. The next call presents what there is now.
            complete = False
        if complete and (over or not follow):
            return
        # A stream that ended before the job may have been cut short. One that began after the job's end was not.
        over = _has_ended(coordinator, job)
        sleep(backoff.next())


def _too_late(job: str, timeout_s: float, latest: StateChanged | None) -> errors.DeadlineExceeded:
    """Returns the error of a job that has not ended in time, with the latest state that was watched."""
    text = f"job {job} has not ended within {timeout_s:g} s"
    if latest:
        reason = latest.reason.partition("\n")[0]  # without a traceback
        text += f"; it is {latest.state.value}" + (f": {reason}" if reason else "")
    return errors.DeadlineExceeded(text, job=job)


def _has_ended(coordinator: CoordinatorClient, job: str) -> bool:
    """Returns whether a job has ended. Waits while the coordinator is unreachable."""
    status = coordinator.call(coordinator.jobs.Get, job_pb2.GetRequest(job=job)).status
    return JobState.from_proto(status.state).finished


def _stream(coordinator: CoordinatorClient, job: str, after: int, follow: bool, end: float | None) -> Iterator[Event]:
    """Yields the events of one call, without retries."""
    left = None if end is None else max(0.0, end - time.monotonic())
    request = job_pb2.WatchRequest(job=job, after=after, no_wait=not follow)
    with _rpc.as_shoal_errors(coordinator.address):
        call = coordinator.jobs.Watch(request, timeout=left, metadata=coordinator.metadata())
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
