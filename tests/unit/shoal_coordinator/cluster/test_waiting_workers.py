"""Workers that wait for entry: the job advances without further calls from them, and the right ones are answered.

And jobs that wait for workers or servers: what they tell, and what this costs while others come and go.
"""

from collections.abc import Sequence

import pytest

from shoal.consistency import Asynchronous
from shoal.initializers import Given
from shoal.job import Job
from shoal.status import JobState, Role
from shoal.variables import Variable
from shoal_coordinator.messages import AdmitWorker, CreateShards, DescribeResult, Registration, events
from support.clusters.cluster_rig import Rig
from support.line_counts import lines_of

WORKERS = ("w0", "w1", "w2")
GIVEN = {"w": Variable((8, 4), initializer=Given())}


@pytest.fixture
def rig() -> Rig:
    return Rig().servers("s0", "s1").workers(*WORKERS)


def job(workers: int = 3, name: str = "a") -> Job:
    return Job("m:f", name=name, workers=workers, consistency=Asynchronous())


def submit(rig: Rig, workers: int = 3) -> None:
    rig.submit(job(workers))


def check_waits(rig: Rig, workers: Sequence[str] = WORKERS) -> None:
    for worker in workers:
        assert not rig.enter("a", worker, waits=True).ends_wait


def answerable(rig: Rig) -> list[str]:
    return rig.machine.job("a").answerable(WORKERS)


def test_servers_admit_the_workers_that_wait(rig: Rig) -> None:
    submit(rig)
    check_waits(rig, ("w0", "w1"))
    for worker in WORKERS:
        rig.describe("a", worker)
    done = rig.perform()
    assert [type(effect) for effect in done] == [CreateShards, AdmitWorker, AdmitWorker]
    assert rig.state("a") is JobState.PLACING
    assert answerable(rig) == []
    check_waits(rig, ("w2",))
    rig.perform()
    assert rig.state("a") is JobState.RUNNING
    assert answerable(rig) == [*WORKERS]
    for rank, worker in enumerate(WORKERS):
        joined = rig.enter("a", worker, waits=True)
        assert (joined.ends_wait, joined.ready, joined.rank) == (True, True, rank)


def test_a_worker_that_does_not_wait_is_admitted_when_it_asks_again(rig: Rig) -> None:
    submit(rig, 1)
    rig.enter("a", "w0")
    rig.describe("a", "w0")
    assert [type(effect) for effect in rig.perform()] == [CreateShards]
    rig.enter("a", "w0")
    assert [type(effect) for effect in rig.perform()] == [AdmitWorker]


def test_the_value_sender_is_answered_first(rig: Rig) -> None:
    submit(rig)
    for worker in WORKERS:
        rig.describe("a", worker, GIVEN)
    check_waits(rig)
    rig.perform()
    assert answerable(rig) == ["w0"]
    joined = rig.enter("a", "w0", waits=True)
    assert (joined.ends_wait, joined.ready, joined.assign_values) == (True, False, True)
    rig.leave("w0")
    assert answerable(rig) == ["w0", "w1"], "one has no part any more, and the other one has to send the values"
    rig.workers("w0")
    rig.describe("a", "w0", GIVEN)
    check_waits(rig, ("w0",))
    assert rig.enter("a", "w1", assigned=True, waits=True).assign_values is False
    assert answerable(rig) == []
    rig.perform()
    assert rig.state("a") is JobState.RUNNING
    assert answerable(rig) == [*WORKERS]


def test_a_job_runs_when_the_last_worker_that_was_not_ready_dies(rig: Rig) -> None:
    rig.submit(Job("m:f", name="a", workers=3, min_workers=2, consistency=Asynchronous()))
    for worker in WORKERS:
        rig.describe("a", worker)
    check_waits(rig, ("w0", "w1"))
    rig.perform()
    assert rig.state("a") is JobState.PLACING
    rig.leave("w2")
    assert rig.state("a") is JobState.RUNNING
    assert answerable(rig) == [*WORKERS]


def test_all_are_answered_when_the_job_ends_or_loses_its_shards(rig: Rig) -> None:
    submit(rig)
    for worker in WORKERS:
        rig.describe("a", worker)
    check_waits(rig)
    rig.perform()
    rig.kill("s0")
    assert rig.state("a").finished
    assert answerable(rig) == [*WORKERS]


def test_a_restart_forgets_who_waits_and_learns_it_again(rig: Rig) -> None:
    submit(rig)
    for worker in WORKERS:
        rig.describe("a", worker)
    check_waits(rig)
    rig.crash()
    assert [type(effect) for effect in rig.perform()] == [CreateShards]
    check_waits(rig)
    assert [type(effect) for effect in rig.perform()] == [AdmitWorker] * 3
    assert answerable(rig) == [*WORKERS]


def test_jobs_that_changed_are_named_once(rig: Rig) -> None:
    submit(rig)
    rig.submit(Job("m:f", name="b", workers=1, consistency=Asynchronous()))
    a, b = (rig.machine.job(name).ref.submission for name in "ab")
    assert rig.machine.take_changed_jobs() == {a: True, b: True}
    rig.beat(*WORKERS)
    assert rig.machine.take_changed_jobs() == {}
    assert rig.describe("a", "w0") == DescribeResult()
    assert rig.machine.take_changed_jobs() == {a: True}
    assert rig.describe("a", "w1") == DescribeResult()
    assert rig.machine.take_changed_jobs() == {}, "no worker can go on because another one has described the program"
    check_waits(rig)
    rig.perform()
    assert rig.state("a") is JobState.RUNNING
    assert rig.machine.take_changed_jobs() == {a: True}
    rig.report("a", "w0", log=("a line",))
    assert rig.machine.take_changed_jobs() == {a: False}, "an event alone lets no worker go on"


def waiting_jobs(count: int, workers: int) -> Rig:
    rig = Rig().workers("w0")
    for number in range(count):
        rig.machine.handle(events.JobSubmitted(job(workers, f"job-{number}")), rig.now)
    rig.write()
    return rig


def test_workers_that_come_and_go_change_what_waiting_jobs_tell_and_no_event_or_record_of_them() -> None:
    rig = waiting_jobs(10, workers=50)
    before = {key: record for key, record in rig.disk.load().items() if key.startswith("job/")}
    told = rig.history("job-7")
    assert told[-1] == ("pending", "waiting for workers: 1 of 50")
    rig.workers(*(f"x{number}" for number in range(9)))  # x0 to x8
    assert rig.status("job-7").reason == "waiting for workers: 10 of 50"
    rig.leave("x0")
    assert rig.status("job-7").reason == "waiting for workers: 9 of 50"
    assert rig.history("job-7") == told
    assert {key: record for key, record in rig.disk.load().items() if key.startswith("job/")} == before
    assert rig.crash().status("job-7").reason == "waiting for workers: 9 of 50"
    assert rig.history("job-7") == told


def test_servers_that_leave_change_what_a_job_tells_and_no_event_of_it() -> None:
    rig = Rig().servers("s0", "s1", "s2").workers("w0")
    for name in ("s0", "s1", "s2"):
        rig.drain(name)
    submit(rig, 1)
    rig.describe("a", "w0")
    events_before = len(rig.history("a"))
    assert rig.status("a").reason == "waiting for servers s0, s1, s2 to restart"
    for name in ("s0", "s1", "s2"):
        rig.leave(name)
    assert rig.status("a").reason.startswith("waiting for servers s0, s1, s2 to restart (until ")
    assert len(rig.history("a")) == events_before


def test_the_cost_of_a_registration_does_not_grow_with_the_idle_workers() -> None:
    def lines(workers: int) -> int:
        rig = waiting_jobs(1, workers=2_000)
        for number in range(workers):
            rig.machine.handle(registration(Role.WORKER, f"x{number}"), rig.now)
        return lines_of(lambda: rig.machine.handle(registration(Role.WORKER, "y"), rig.now))

    assert lines(500) <= 1.5 * lines(10)


def test_the_registration_of_a_session_looks_at_no_job() -> None:
    def lines(jobs: int) -> int:
        rig = waiting_jobs(jobs, workers=2)
        return lines_of(lambda: rig.machine.handle(registration(Role.SESSION, "y"), rig.now))

    assert lines(20) <= 1.5 * lines(1)


def registration(role: Role, name: str) -> events.RegistrationReceived:
    return events.RegistrationReceived(Registration(role, name, f"p-{name}"))
