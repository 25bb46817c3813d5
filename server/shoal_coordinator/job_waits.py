"""Waits for a job: watchers that wait for its events, and workers that wait until they may train.

When jobs have changed, the coordinator looks up only these jobs here. So an event of one job does not wake those that
wait for another job.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from shoal_coordinator.messages import JobRef

Wake = Callable[[], object]


class Entered(Protocol):
    """A job that workers wait to enter."""

    @property
    def ref(self) -> JobRef:
        """The job's name and submission number."""

    def answerable(self, workers: Collection[str]) -> list[str]:
        """Returns those of the workers that need not wait any longer; all of them once the job has ended."""


@dataclass(eq=False, frozen=True, slots=True)
class EntryWait:
    """A worker that waits for its entry.

    Attributes:
        submission: submission of the job.
        worker: id of the worker.
        until: end of the wait, in seconds of Unix time.
        wake: called once, without the lock, when the wait ends.
    """

    submission: int
    worker: str
    until: float
    wake: Wake


@dataclass(eq=False, slots=True)
class _Watched:
    changed: threading.Condition  # the job may have a new event, or the coordinator stops
    watchers: int = 0


@dataclass(eq=False, slots=True)
class _Entries:
    job: Entered
    waits: dict[str, EntryWait] = field(default_factory=dict)  # by worker, never empty


class JobWaits:
    """The watchers of jobs, and the workers that wait to enter them. All methods are called with the lock.

    A worker waits at most once for a job, so the waits are bounded by the members of the cluster.

    Args:
        lock: lock of the coordinator, which the watchers' conditions share.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        # Both by the job's submission.
        self._watched: dict[int, _Watched] = {}
        self._entries: dict[int, _Entries] = {}

    @property
    def entries(self) -> int:
        """The number of workers that wait for their entry."""
        return sum(len(found.waits) for found in self._entries.values())

    # Watchers.

    def watch(self, submission: int) -> threading.Condition:
        """Adds a watcher of a job, which may then wait for the condition. `unwatch` removes it."""
        watched = self._watched.setdefault(submission, _Watched(threading.Condition(self._lock)))
        watched.watchers += 1
        return watched.changed

    def unwatch(self, submission: int) -> None:
        """Removes a watcher of a job."""
        watched = self._watched[submission]
        watched.watchers -= 1
        if not watched.watchers:
            del self._watched[submission]

    def wake_watchers(self) -> None:
        """Makes the watchers of all jobs look again."""
        for watched in self._watched.values():
            watched.changed.notify_all()

    # Workers that enter.

    def add(self, job: Entered, wait: EntryWait) -> list[Wake]:
        """Adds a worker that waits to enter a job. Returns how to wake an earlier call of the same worker."""
        waits = self._entries.setdefault(wait.submission, _Entries(job)).waits
        earlier = waits.pop(wait.worker, None)
        waits[wait.worker] = wait
        return [earlier.wake] if earlier else []

    def discard(self, wait: EntryWait) -> list[Wake]:
        """Ends a wait, if it has not ended. Returns how to wake its call."""
        entries = self._entries.get(wait.submission)
        return self._take(entries, [wait.worker]) if entries and entries.waits.get(wait.worker) is wait else []

    # Ends of waits.

    def changed(self, jobs: Mapping[int, bool]) -> list[Wake]:
        """Wakes the watchers of jobs that have changed.

        Args:
            jobs: by submission, whether the wait of a worker may end now. If not, the job has only new events, such as
                those of a report. A thousand workers may wait, so they are not looked at then.

        Returns:
            How to wake the workers that need not wait any longer.
        """
        wakes: list[Wake] = []
        for submission, may_end in jobs.items():
            if watched := self._watched.get(submission):
                watched.changed.notify_all()
            if may_end and (entries := self._entries.get(submission)):
                wakes += self._take(entries, entries.job.answerable(entries.waits.keys()))
        return wakes

    def expired(self, now: float) -> list[Wake]:
        """Ends the waits whose time is over. Returns how to wake their calls."""
        over = [
            (entries, [worker for worker, wait in entries.waits.items() if wait.until <= now])
            for entries in self._entries.values()
        ]
        return [wake for entries, workers in over for wake in self._take(entries, workers)]

    def end(self) -> list[Wake]:
        """Ends all waits of workers, and wakes all watchers. Returns how to wake the workers' calls."""
        self.wake_watchers()
        wakes = [wait.wake for entries in self._entries.values() for wait in entries.waits.values()]
        self._entries.clear()
        return wakes

    def _take(self, entries: _Entries, workers: Iterable[str]) -> list[Wake]:
        wakes = [entries.waits.pop(worker).wake for worker in workers]
        if not entries.waits:
            self._entries.pop(entries.job.ref.submission, None)
        return wakes


def wake_all(wakes: Iterable[Wake]) -> None:
    """Calls each of these functions, which wake calls that wait."""
    for wake in wakes:
        wake()


__all__ = ["Entered", "EntryWait", "JobWaits", "Wake", "wake_all"]
