"""Calls that wait for a job: which change wakes which call, and that it wakes once."""

import threading
from collections.abc import Callable, Collection

import pytest

from shoal_coordinator.job_waits import EntryWait, JobWaits, wake_all
from shoal_coordinator.messages import JobRef


class FakeJob:
    """A job that some workers have entered."""

    def __init__(self, submission: int) -> None:
        self.ref = JobRef(f"job-{submission}", submission)
        self.entered: set[str] = set()

    def answerable(self, workers: Collection[str]) -> list[str]:
        return [worker for worker in workers if worker in self.entered]


class Waits(JobWaits):
    def __init__(self) -> None:
        self.lock = threading.Lock()
        super().__init__(self.lock)
        self.woken: list[str] = []

    def wait(self, job: FakeJob, worker: str, until: float = 10.0, name: str = "") -> EntryWait:
        added = EntryWait(job.ref.submission, worker, until, self.waker(name or worker))
        wake_all(self.add(job, added))
        return added

    def waker(self, name: str) -> Callable[[], None]:
        return lambda: self.woken.append(name)


@pytest.fixture
def waits() -> Waits:
    return Waits()


def test_a_change_wakes_the_workers_of_its_job_that_entered(waits: Waits) -> None:
    first, second = FakeJob(1), FakeJob(2)
    for job, worker in ((first, "a"), (first, "b"), (second, "c")):
        waits.wait(job, worker)
        job.entered.add(worker)
    first.entered.remove("b")
    wake_all(waits.changed({1: False}))
    assert waits.woken == [], "new events alone end no wait"
    wake_all(waits.changed({1: True, 7: True}))
    assert waits.woken == ["a"]
    wake_all(waits.changed({1: True}))
    assert waits.woken == ["a"], "once"
    wake_all(waits.changed({1: False, 2: True}))
    assert waits.woken == ["a", "c"]
    assert waits.entries == 1


def test_waits_end_when_their_time_is_over(waits: Waits) -> None:
    job = FakeJob(1)
    for until, worker in ((5.0, "a"), (7.0, "b"), (9.0, "c")):
        waits.wait(job, worker, until)
    wake_all(waits.expired(4.9))
    assert waits.woken == []
    wake_all(waits.expired(7.0))
    assert waits.woken == ["a", "b"]
    wake_all(waits.expired(100.0))
    wake_all(waits.expired(100.0))
    assert waits.woken == ["a", "b", "c"]
    assert waits.entries == 0


def test_a_worker_that_calls_again_ends_its_first_wait(waits: Waits) -> None:
    job = FakeJob(1)
    earlier = waits.wait(job, "a", name="first")
    later = waits.wait(job, "a", name="second")
    assert waits.woken == ["first"]
    wake_all(waits.discard(earlier))
    assert (waits.woken, waits.entries) == (["first"], 1), "the second one waits on"
    wake_all(waits.discard(later))
    wake_all(waits.discard(later))
    assert (waits.woken, waits.entries) == (["first", "second"], 0)


def test_the_end_wakes_all(waits: Waits) -> None:
    for submission in (1, 2):
        waits.wait(FakeJob(submission), f"w{submission}")
    wake_all(waits.end())
    wake_all(waits.end())
    assert (sorted(waits.woken), waits.entries) == (["w1", "w2"], 0)


def test_watchers_share_a_condition_for_each_job(waits: Waits) -> None:
    with waits.lock:
        first = waits.watch(1)
        assert waits.watch(1) is first
        assert waits.watch(2) is not first
        waits.unwatch(1)
        assert waits.watch(1) is first
        for submission in (1, 1, 2):
            waits.unwatch(submission)
        assert waits.watch(1) is not first, "nothing is kept of a job without watchers"
