"""Notices about a job that does not run yet, for people who wait for its end."""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

from shoal import errors
from shoal._rpc import CoordinatorClient
from shoal._session.waits import entry_words
from shoal._system.waits import Wait, WaitWatch
from shoal.events import Event, StateChanged
from shoal.status import JobState, JobStatus
from shoal.v1 import job_pb2

_NOT_RUNNING = {JobState.PENDING, JobState.STARTING, JobState.PLACING}


class StartWait:
    """Tells from a job's events since when it waits to run (no I/O).

    Args:
        job: name of the job.
        clock: returns seconds.

    Attributes:
        wait: the wait in progress; None if the job runs or has sent no event. It stays if the job ends without a run.
    """

    def __init__(self, job: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._job, self._clock = job, clock
        self.wait: Wait | None = None

    def observe(self, event: Event) -> None:
        """Records an event of the job."""
        if not isinstance(event, StateChanged) or event.state.finished:
            return
        if event.state not in _NOT_RUNNING:
            self.wait = None
        elif self.wait is None:
            self.wait = Wait(f"job {self._job}", self._clock())


@contextmanager
def start_notice(coordinator: CoordinatorClient, job: str) -> Iterator[StartWait]:
    """Tells a person, during the block, what a job waits for that does not run; see `WaitWatch`.

    Args:
        coordinator: client of the coordinator.
        job: name of the job.

    Yields:
        The receiver of the job's events.
    """

    def detail() -> str:
        request = job_pb2.GetRequest(job=job)
        try:
            status = coordinator.call(coordinator.jobs.Get, request, retry_for_s=0).status
        except errors.Unreachable:
            return "for the coordinator"
        return entry_words(JobStatus.from_proto(status))

    started = StartWait(job)
    watch = WaitWatch(lambda: started.wait, detail)
    watch.start()
    try:
        yield started
    except BaseException:
        watch.stop(goes_on=False)
        raise
    watch.stop(goes_on=started.wait is None)


def events_with_notices(watched: Iterator[Event], coordinator: CoordinatorClient, job: str) -> Iterator[Event]:
    """Yields a job's events, and tells a person meanwhile what the job waits for if it does not run.

    Args:
        watched: the events; a generator, which is closed at the end.
        coordinator: client of the coordinator.
        job: name of the job.
    """
    with start_notice(coordinator, job) as started:
        try:
            for event in watched:
                started.observe(event)
                yield event
        finally:
            if isinstance(watched, Generator):
                watched.close()


__all__ = ["StartWait", "events_with_notices", "start_notice"]
