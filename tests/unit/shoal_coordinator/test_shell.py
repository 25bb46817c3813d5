"""Shell of the cluster machine, with a store that tests can block: no answer is visible before it is durable."""

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from shoal import errors
from shoal.consistency import Asynchronous
from shoal.events import StateChanged
from shoal.job import Job
from shoal.status import JobState, JobStatus, Role
from shoal.variables import Variable
from shoal_coordinator.cluster import ClusterPolicy
from shoal_coordinator.cluster.shards import placement
from shoal_coordinator.coordinator import Coordinator
from shoal_coordinator.messages import ProgramDescription, Registration, events
from shoal_coordinator.observer import Observer
from shoal_coordinator.persistence.store import MemoryStore
from support.waiting import wait_until


class SlowStore(MemoryStore):
    """A store whose writes wait until they may go on, or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.writing = threading.Event()
        self.transactions: list[dict[str, bytes | None]] = []
        self.error: Exception | None = None

    def apply(self, changes: Mapping[str, bytes | None]) -> None:
        self.writing.set()
        assert self.may_go_on.wait(20)
        if self.error:
            raise self.error
        self.transactions.append(dict(changes))
        super().apply(changes)

    def hold(self) -> None:
        self.may_go_on.clear()
        self.writing.clear()


class Shell:
    def __init__(self, store: SlowStore, heartbeat_timeout_s: float = 60.0) -> None:
        self.failures: list[errors.ShoalError] = []
        policy = ClusterPolicy(heartbeat_timeout_s=heartbeat_timeout_s)
        self.coordinator = Coordinator(store, "reef", policy, on_failure=self.failures.append)
        self.coordinator.start()

    def submit(self, name: str) -> JobStatus:
        return self.coordinator.handle(events.JobSubmitted(Job("m:f", name=name, consistency=Asynchronous())))

    def names(self) -> set[str]:
        with self.coordinator.reading() as (machine, now):
            return {status.name for status in machine.jobs(now)}


@pytest.fixture
def store() -> SlowStore:
    return SlowStore()


def test_silent_members_are_looked_for_twice_a_second_however_long_the_timeout(store: SlowStore) -> None:
    looks: list[float] = []

    def delays() -> tuple[float, int]:
        looks.append(time.monotonic())
        return 0.0, 0

    coordinator = Coordinator(store, "reef", ClusterPolicy(heartbeat_timeout_s=3600.0))
    coordinator.start(delays)
    try:
        wait_until(lambda: len(looks) >= 2, what="the second look")
    finally:
        coordinator.stop()


@pytest.fixture
def shell(store: SlowStore) -> Iterator[Shell]:
    shell = Shell(store)
    shell.submit("first")
    yield shell
    store.may_go_on.set()
    shell.coordinator.stop()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_an_answer_waits_until_it_cannot_be_lost(shell: Shell, store: SlowStore, pool: ThreadPoolExecutor) -> None:
    store.hold()
    answer = pool.submit(shell.submit, "second")
    assert store.writing.wait(20)
    wait_until(lambda: shell.coordinator.unwritten == 1)
    assert not answer.done()
    store.may_go_on.set()
    assert answer.result(20).state is JobState.PENDING
    assert any("spec" in key for key in store.transactions[-1])


def test_readers_refusals_and_watchers_wait_too(shell: Shell, store: SlowStore, pool: ThreadPoolExecutor) -> None:
    watched = pool.submit(lambda: list(shell.coordinator.watch("first", 1, wait=True)))
    store.hold()
    ended = pool.submit(shell.coordinator.handle, events.JobCancelled("first"))
    assert store.writing.wait(20)
    wait_until(lambda: shell.coordinator.unwritten == 1)
    read = pool.submit(shell.names)
    refused = pool.submit(shell.coordinator.handle, events.JobDropped("nope"))
    beaten = pool.submit(shell.coordinator.handle, events.TimePassed())
    store_waits: list[Future[Any]] = [ended, watched, read, refused, beaten]
    assert not any(future.done() for future in store_waits)
    store.may_go_on.set()
    assert ended.result(20).state is JobState.CANCELLED
    last = watched.result(20)[-1]
    assert isinstance(last, StateChanged)
    assert last.state is JobState.CANCELLED
    assert read.result(20) == {"first"}
    assert isinstance(refused.exception(20), errors.UnknownJob)
    assert beaten.result(20) == {}


def test_events_of_one_job_do_not_wake_the_watchers_of_another(shell: Shell, pool: ThreadPoolExecutor) -> None:
    looks: list[float] = []  # of a watcher, at whether its caller is there

    def gone() -> bool:
        looks.append(time.monotonic())
        return False

    watching = pool.submit(lambda: list(shell.coordinator.watch("first", 10_000, wait=True, gone=gone)))
    wait_until(lambda: looks)
    began, before = time.monotonic(), len(looks)
    for number in range(50):
        shell.submit(f"job-{number}")
    allowed = 2 + time.monotonic() - began  # it looks once a second by itself
    found = len(looks) - before
    shell.coordinator.handle(events.JobCancelled("first"))
    watching.result(20)
    assert found <= allowed


def test_a_worker_waits_for_its_entry_at_most_as_long_as_it_may(store: SlowStore) -> None:
    now = [1_000.0]
    coordinator = Coordinator(store, "reef", ClusterPolicy(), clock=lambda: now[0])
    coordinator.start()
    try:
        registered = coordinator.handle(events.RegistrationReceived(Registration(Role.SESSION, "x", "p")))
        coordinator.handle(events.JobSubmitted(Job(name="a", workers=2, consistency=Asynchronous())))
        woken: list[str] = []
        join = events.JoinRequested("a", "x", registered.incarnation, waits=True)
        coordinator.join(join, 5.0, lambda: woken.append("first"))
        assert (woken, coordinator.waiting_workers) == ([], 1)
        now[0] += 4.9
        coordinator.end_expired_waits()
        assert woken == []
        now[0] += 0.2
        coordinator.end_expired_waits()
        assert (woken, coordinator.waiting_workers) == (["first"], 0)
        end = coordinator.join(join, 5.0, lambda: woken.append("second"))
        end()
        end()
        assert woken == ["first", "second"]
        coordinator.join(join, 5.0, lambda: woken.append("third"))
        coordinator.handle(events.JobCancelled("a"))
        assert woken[2:] == ["third"]
        coordinator.join(join, 5.0, lambda: woken.append("ended"))
        coordinator.join(replace(join, job="nope"), 5.0, lambda: woken.append("refused"))
        assert woken[3:] == ["ended", "refused"]
    finally:
        coordinator.stop()
    coordinator.join(join, 5.0, lambda: woken.append("stopped"))
    assert woken[5:] == ["stopped"]


def test_waiting_decisions_are_written_in_one_transaction(
    shell: Shell, store: SlowStore, pool: ThreadPoolExecutor
) -> None:
    store.hold()
    before = len(store.transactions)
    answers = [pool.submit(shell.submit, "first-to-wait")]
    assert store.writing.wait(20)
    answers += [pool.submit(shell.submit, f"job-{number}") for number in range(5)]
    wait_until(lambda: shell.coordinator.unwritten >= 6)  # a tick counts as one more, because it finds changes
    store.may_go_on.set()
    for answer in answers:
        answer.result(20)
    assert len(store.transactions) == before + 2


def test_events_without_changes_are_not_written(shell: Shell, store: SlowStore) -> None:
    before = len(store.transactions)
    with pytest.raises(errors.UnknownJob):
        shell.coordinator.handle(events.JobCancelled("nope"))
    shell.coordinator.handle(events.TimePassed())
    assert shell.names() == {"first"}
    assert len(store.transactions) == before


@pytest.mark.parametrize("error", [errors.StoreFailed("cannot write the store: full"), RuntimeError("a defect")])
def test_a_store_that_fails_is_the_end(
    shell: Shell, store: SlowStore, pool: ThreadPoolExecutor, error: Exception
) -> None:
    store.hold()
    store.error = error
    watched = pool.submit(lambda: list(shell.coordinator.watch("first", 1, wait=True)))
    answers = [pool.submit(shell.submit, name) for name in ("second", "third")]
    store.may_go_on.set()
    for answer in answers:
        with pytest.raises(errors.Unreachable, match="has stopped: cannot write"):
            answer.result(20)
    with pytest.raises(errors.Unreachable):
        watched.result(20)
    for attempt in (lambda: shell.submit("fourth"), shell.names, lambda: shell.coordinator.handle(events.TimePassed())):
        with pytest.raises(errors.Unreachable, match="has stopped"):
            attempt()
    wait_until(lambda: shell.failures, what="the failure's being told")
    assert len(shell.failures) == 1
    shell.coordinator.stop()
    store.error = None
    again = Shell(store)
    try:
        assert again.names() == {"first"}
    finally:
        again.coordinator.stop()


def test_it_writes_all_before_it_stops(store: SlowStore) -> None:
    shell = Shell(store)
    shell.submit("a")
    shell.coordinator.stop()
    with pytest.raises(errors.Unreachable, match="stopping"):
        shell.submit("b")
    again = Shell(store)
    try:
        assert again.names() == {"a"}
        with again.coordinator.reading() as (machine, now):
            assert machine.status(now).cluster == "reef"
    finally:
        again.coordinator.stop()


def test_one_that_was_never_started_stops(store: SlowStore) -> None:
    coordinator = Coordinator(store, "reef", ClusterPolicy())
    coordinator.stop()
    with pytest.raises(errors.Unreachable, match="stopping"):
        coordinator.handle(events.TimePassed())


def test_silence_is_noticed_soon_however_long_the_heartbeat_timeout(store: SlowStore) -> None:
    """A worker is to be out of every barrier within a second after its heartbeat timeout."""
    ticks: list[events.ClusterEvent[Any]] = []
    observer = Observer(handled=lambda event: ticks.append(event) if isinstance(event, events.TimePassed) else None)
    coordinator = Coordinator(store, "reef", ClusterPolicy(heartbeat_timeout_s=600.0), observer)
    coordinator.start()
    try:
        wait_until(lambda: len(ticks) > 2, what="three checks for silent members")
    finally:
        coordinator.stop()


def test_states_of_jobs_and_members_that_drain_or_leave_are_logged_once(store: SlowStore) -> None:
    shell = Shell(store)
    with capture_logs() as logs:
        server = Registration(Role.SERVER, "s0", "p", "127.0.0.1:1")
        member = shell.coordinator.handle(events.RegistrationReceived(server))
        shell.submit("first")
        shell.coordinator.handle(events.JobCancelled("first"))
        for _ in range(2):
            shell.coordinator.handle(events.DrainRequested("s0", member.incarnation))
        shell.coordinator.handle(events.MemberLeft("s0", member.incarnation))
    shell.coordinator.stop()
    said = [(it["event"], it.get("job") or it.get("member")) for it in logs if it["log_level"] == "info"]
    assert said[0] == ("job pending", "first")
    assert said[-3:] == [("job cancelled", "first"), ("member drains", "s0"), ("member left", "s0")]
    with capture_logs() as logs:
        Coordinator(store, "reef", ClusterPolicy()).stop()
    assert [it["event"] for it in logs] == ["restored"], "not the states of an earlier coordinator"


def test_the_shards_of_a_description_are_planned_before_the_decision(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = shell.coordinator
    coordinator.handle(events.RegistrationReceived(Registration(Role.SERVER, "s0", "p-s0", "127.0.0.1:1")))
    worker = coordinator.handle(events.RegistrationReceived(Registration(Role.WORKER, "w0", "p-w0"))).incarnation
    assignment = coordinator.handle(events.HeartbeatReceived("w0", worker)).assignment
    assert assignment
    description = ProgramDescription({"w": Variable((4,))}, 1)
    coordinator.plan_shards("first", description)
    coordinator.plan_shards("unknown", description)

    def fail(*_: object) -> None:
        raise AssertionError("planned with the lock")

    monkeypatch.setattr(placement, "plan_shards", fail)
    coordinator.handle(events.JobDescribed("first", "w0", worker, description, assignment.number))
    with coordinator.reading() as (cluster, _):
        assert cluster.job("first").placement is not None
