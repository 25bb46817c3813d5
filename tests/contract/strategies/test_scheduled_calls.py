"""Scheduled calls over real connections, with a chief and workers that are threads of this process."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shoal import errors
from shoal_distribute.coordinator import RemoteValue, chief_calls, chief_link, worker_calls, worker_link
from shoal_distribute.coordinator.chief_calls import ChiefCalls
from shoal_distribute.coordinator.execution import CallScheduler
from shoal_distribute.coordinator.local_calls import LocalCalls
from shoal_distribute.coordinator.messages import LinkHello
from shoal_distribute.coordinator.worker_calls import WorkerCalls
from support.ranks import SECURITY, addresses, sockets
from support.waiting import wait_until

WORKERS = 2
Script = Callable[["Tasks", CallScheduler], Any]


class Tasks:
    """A chief and its workers. Each runs the same script in a thread.

    Args:
        script: takes these tasks and its scheduler.
        limits: those of the chief.
    """

    def __init__(self, script: Script, **limits: int) -> None:
        self.script = script
        self.listening = sockets(WORKERS)
        self.addresses = addresses(self.listening)
        self._pool = ThreadPoolExecutor()
        self.barrier = threading.Barrier(WORKERS)
        self.here = threading.local()  # `worker` is the number of the worker whose call runs on the thread
        self.chief: ChiefCalls | None = None
        self._limits = {"max_calls": 100, "kept_bytes": 1 << 20, **limits}
        self._given = dict(enumerate(self.listening))

    def start(self) -> list[Future[Any]]:
        """Starts all tasks, and returns their results: that of the chief first."""
        chief = self._pool.submit(self.run_chief)
        return [chief, *(self.start_worker(number) for number in range(WORKERS))]

    def start_worker(self, number: int) -> Future[Any]:
        """Starts a worker, perhaps again."""
        return self._pool.submit(self.run_worker, number)

    def run_chief(self) -> Any:
        self.chief = ChiefCalls(self.addresses, SECURITY, **self._limits)
        return self.run(self.chief)

    def run_worker(self, number: int) -> Any:
        listening = self._given.pop(number, None)
        if listening is None:
            listening = self._bound(number)

        @contextlib.contextmanager
        def scope() -> Any:
            self.here.worker = number
            yield

        return self.run(WorkerCalls(number, listening, SECURITY, scope))

    def run(self, calls: CallScheduler) -> Any:
        try:
            result = self.script(self, calls)
        except BaseException:
            calls.close(failed=True)
            raise
        calls.close()
        return result

    def results(self) -> list[Any]:
        """Runs all tasks, and returns the results or errors."""
        return [outcome(it) for it in self.start()]

    def _bound(self, number: int) -> socket.socket:
        host, _, port = self.addresses[number].rpartition(":")
        return socket.create_server((host, int(port)))


def outcome(future: Future[Any]) -> Any:
    try:
        return future.result(60)
    except Exception as error:
        return error


def schedule(calls: CallScheduler, function: Callable[..., Any], *args: Any) -> RemoteValue:
    return RemoteValue(calls.schedule(function.__name__, lambda: function(*args)), function.__name__)


def meet(tasks: Tasks, calls: CallScheduler) -> None:
    """Schedules a call for each worker that waits for those of the others, so that all take part."""
    for _ in range(WORKERS):
        schedule(calls, tasks.barrier.wait, 20)


def square(number: int) -> np.ndarray:
    return np.array([number, number**2])


def test_all_tasks_get_the_same_results() -> None:
    def script(tasks: Tasks, calls: CallScheduler) -> Any:
        def who() -> int:
            return int(tasks.here.worker)

        values = [schedule(calls, square, number) for number in range(200)]  # more than may be unfinished
        first = values[0].fetch().tolist()
        calls.join()
        workers = [schedule(calls, who) for _ in range(20)]
        polls = 0
        while not calls.done():
            polls += 1
            time.sleep(0)  # lets other threads run
        return first, [it.fetch().tolist() for it in values], [it.fetch() for it in workers], polls

    tasks = Tasks(script)
    chief, *others = tasks.results()
    assert others == [chief, chief]
    assert chief[0] == [0, 0]
    assert chief[1] == [[number, number**2] for number in range(200)]
    assert {*chief[2]} <= {0, 1}


def test_an_error_is_raised_in_all_tasks_and_they_go_on() -> None:
    def script(tasks: Tasks, calls: CallScheduler) -> Any:
        def fail(number: int) -> int:
            if number == 3:
                raise ValueError("no such file")
            return number

        values = [schedule(calls, fail, number) for number in range(4)]
        with pytest.raises(
            errors.ProgramError, match=r"(?s)call 3 \(fail\) failed on .*ValueError: no such file.*Trace"
        ):
            calls.join()
        calls.join()
        values += [schedule(calls, fail, 5)]
        calls.join()
        with pytest.raises(errors.ProgramError, match="no such file"):
            values[3].fetch()
        return [it.fetch() for number, it in enumerate(values) if number != 3]

    tasks = Tasks(script)
    assert tasks.results() == [[0, 1, 2, 5]] * 3
    assert tasks.run(LocalCalls(contextlib.nullcontext)) == [0, 1, 2, 5]


def test_a_worker_that_dies_is_replaced_and_comes_back() -> None:
    dead: list[int] = []

    def script(tasks: Tasks, calls: CallScheduler) -> Any:
        def step(number: int) -> int:
            if number == 10 and not dead:
                dead.append(tasks.here.worker)
                raise errors.Fenced("this session was declared lost")  # what ends a worker that a test can raise
            return number**2

        values = [schedule(calls, step, number) for number in range(40)]
        calls.join()
        return [it.fetch() for it in values]

    tasks = Tasks(script)
    chief, *workers = tasks.start()
    wait_until(lambda: dead, what="a worker dies")
    assert isinstance(outcome(workers[dead[0]]), errors.Fenced)
    again = tasks.start_worker(dead[0])
    wanted = [number**2 for number in range(40)]
    assert [outcome(it) for it in (chief, workers[1 - dead[0]], again)] == [wanted] * 3


def test_calls_of_a_worker_that_is_silent_go_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker sends no heartbeat: to the chief it looks as one that is stopped. Its late results do not count."""
    monkeypatch.setattr(worker_link, "SILENT_S", 0.3)
    monkeypatch.setattr(chief_link, "HEARTBEAT_INTERVAL_S", 60.0)
    began, lost = threading.Event(), threading.Event()

    def script(tasks: Tasks, calls: CallScheduler) -> Any:
        def step() -> str:
            if began.is_set():
                lost.set()
                return "counts"
            began.set()
            lost.wait(20)
            return "late"

        value = schedule(calls, step)
        calls.join()
        return value.fetch()

    assert Tasks(script).results()[0] == "counts"


def test_scripts_that_differ_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_calls, "START_S", 10.0)
    monkeypatch.setattr(worker_calls, "GONE_S", 0.2)

    def script(tasks: Tasks, calls: CallScheduler) -> Any:
        if isinstance(calls, ChiefCalls):
            schedule(calls, square, 1)
        else:
            schedule(calls, script)
        calls.join()

    chief, *workers = Tasks(script).results()
    for error in (chief, *(it for it in workers if it is not None)):
        assert isinstance(error, errors.RanksDisagree | errors.Unreachable)
    assert "the script of the chief schedules square as call 0" in chief.message
    assert "script after 0 others" in chief.message


def test_a_worker_says_why_a_chief_cannot_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (LinkHello(run * 16, 0, 1, reports=False) for run in (b"a", b"b"))
    ended, failed = (WorkerCalls(0, it, SECURITY, contextlib.nullcontext) for it in sockets(2))
    ended.admit(first)
    with pytest.raises(errors.RanksDisagree, match="belongs to an earlier run of the chief; start it again"):
        ended.admit(second)
    ended.close(failed=True)
    with pytest.raises(errors.RanksDisagree, match="has ended its script, and leaves; start it again"):
        ended.admit(first)
    monkeypatch.setattr(worker_calls, "GONE_S", 0.0)
    failed.lost(failed.admit(first), left=False)
    with pytest.raises(errors.Unreachable):
        failed.join()
    with pytest.raises(errors.RanksDisagree, match=r"has failed \(the chief does not connect .*\); start it again"):
        failed.admit(first)
    failed.close()


def test_a_script_that_goes_on_after_the_chief_says_so() -> None:
    def script(tasks: Tasks, calls: CallScheduler) -> Any:
        meet(tasks, calls)
        calls.join()
        if not isinstance(calls, ChiefCalls):
            calls.join()

    chief, *workers = Tasks(script).results()
    assert chief is None
    for error in workers:
        assert isinstance(error, errors.RanksDisagree)
        assert "has ended after 3 calls of schedule, join and done" in error.message


def test_workers_end_when_the_chief_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_calls, "GONE_S", 0.2)

    def script(tasks: Tasks, calls: CallScheduler) -> Any:
        meet(tasks, calls)
        calls.join()
        assert not isinstance(calls, ChiefCalls), "the chief's own mistake"
        calls.join()

    chief, *workers = Tasks(script).results()
    assert isinstance(chief, AssertionError)
    for error in workers:
        assert isinstance(error, errors.Unreachable)
        assert "the chief does not connect with worker" in error.message


def test_a_worker_without_a_chief_says_that_it_has_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_calls, "START_S", 0.05)
    calls = WorkerCalls(1, sockets(1)[0], SECURITY, contextlib.nullcontext)
    try:
        with pytest.raises(errors.Unreachable, match="it has not started yet, or cannot reach this worker"):
            calls.join()
    finally:
        calls.close()


def test_a_worker_that_is_too_late_hears_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chief_calls, "LINGER_S", 0.0)

    def script(tasks: Tasks, calls: CallScheduler) -> Any:
        meet(tasks, calls)
        values = [schedule(calls, square, number) for number in range(10)]
        calls.join()
        return values[0].fetch().tolist()

    results = Tasks(script, kept_bytes=1).results()
    assert results[0] == [0, 0]
    for error in results[1:]:
        assert isinstance(error, errors.LimitExceeded)
        assert "give ClusterCoordinator a larger kept_bytes" in error.message


def test_schedule_waits_when_too_many_calls_are_unfinished() -> None:
    most = 3
    ahead: list[int] = []
    ended: list[int] = []

    def script(tasks: Tasks, calls: CallScheduler) -> Any:
        def step(number: int) -> None:
            ended.append(number)

        for number in range(30):
            schedule(calls, step, number)
            if isinstance(calls, ChiefCalls):
                ahead.append(number + 1 - len(ended))
        calls.join()

    assert Tasks(script, max_calls=most).results() == [None] * 3
    assert max(ahead) <= most
    assert sorted(ended) == [*range(30)]
