"""Threads of parallel calls: each call gets a thread at once, threads are used again, and idle ones end."""

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import pytest

from shoal import errors
from shoal._training.call_threads import CallThreads
from shoal._training.placed_servers import PlacedServers
from shoal._transport import ServerConnection
from shoal._wire import Placement
from shoal.variables import Variable
from shoal_coordinator.cluster import Candidate, assign_shards, plan_shards
from support.waiting import wait_until

SERVERS = 100


@pytest.fixture
def threads() -> Iterator[CallThreads]:
    with closing(CallThreads("calls")) as threads:
        yield threads


def test_results_are_in_the_order_of_the_calls(threads: CallThreads) -> None:
    assert threads.run([partial(int, str(number)) for number in range(5)]) == [0, 1, 2, 3, 4]


def test_one_call_needs_no_thread(threads: CallThreads) -> None:
    assert threads.run([threading.current_thread]) == [threading.current_thread()]
    assert threads.count == 0


def test_all_calls_run_at_once_and_the_next_ones_use_the_same_threads(threads: CallThreads) -> None:
    barrier = threading.Barrier(40)
    for _ in range(3):
        threads.run([lambda: barrier.wait(20)] * 40)
        assert threads.count == 39  # this thread makes one call


def test_calls_of_two_directions_do_not_wait_for_each_other(threads: CallThreads) -> None:
    pulled = threading.Event()
    pulls = threading.Thread(target=threads.run, args=([lambda: pulled.wait(20)] * 20,))
    pulls.start()
    assert threads.run([lambda: True] * 20) == [True] * 20
    pulled.set()
    pulls.join()


def test_the_first_error_is_raised_when_all_calls_have_ended(threads: CallThreads) -> None:
    failed = threading.Event()
    ended = []

    def late() -> None:
        assert failed.wait(20)
        ended.append(True)

    def failing(message: str) -> None:
        failed.set()
        raise errors.Unreachable(message)

    with pytest.raises(errors.Unreachable, match="first"):
        threads.run([late, lambda: failing("first"), lambda: failing("second")])
    assert ended == [True]


def test_an_interrupted_caller_ends_the_other_calls_and_waits_for_them(threads: CallThreads) -> None:
    abandoned, ended = threading.Event(), []

    def other() -> None:
        assert abandoned.wait(20)
        ended.append(True)

    def own() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        threads.run([other, other, own], abandon=abandoned.set)
    assert ended == [True, True]


def test_a_failure_keeps_nothing_of_its_call(threads: CallThreads) -> None:
    """An error's traceback keeps the frames of its calls alive, and so the shared memory that they use."""

    class Memory:
        pass

    def step() -> None:
        memory = Memory()
        held.append(weakref.ref(memory))

        def call() -> None:
            raise errors.Unreachable(f"gone {memory}")

        with pytest.raises(errors.Unreachable):
            threads.run([call, call])

    held: list[weakref.ref[Memory]] = []
    gc.disable()
    try:
        step()
        wait_until(lambda: held[0]() is None, what="the end of the call's memory")
    finally:
        gc.enable()


def test_without_another_thread_calls_are_made_one_after_the_other(
    threads: CallThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert threads.run([lambda: 1, lambda: 2, lambda: 3]) == [1, 2, 3]


def test_idle_threads_end() -> None:
    with closing(CallThreads("calls", idle_s=0.01)) as threads:
        threads.run([lambda: None] * 3)
        wait_until(lambda: threads.count == 0, what="the end of idle threads")
        assert threads.run([lambda: 1] * 3) == [1, 1, 1]


def test_closed_threads_make_no_call() -> None:
    threads = CallThreads("calls")
    threads.run([lambda: None] * 3)
    threads.close()
    assert threads.count == 0
    with pytest.raises(errors.Cancelled):
        threads.run([lambda: None])


def test_all_of_a_hundred_servers_are_called_at_once() -> None:
    """With fewer threads than servers, a pull would take several rounds, or wait forever at a barrier of workers."""
    specs = {f"v{number}": Variable((10,)) for number in range(SERVERS)}
    layouts = plan_shards(specs, SERVERS, None)
    candidates = [Candidate(f"server-{index}", f"127.0.0.1:{index + 1}", 0) for index in range(SERVERS)]
    placement = Placement("job", 1, specs, assign_shards(layouts, candidates))
    servers = PlacedServers(
        placement,
        refresh=lambda: placement,
        worker="",
        incarnation=0,
        retry_for_s=1.0,
        setting="grpc",
        on_retry=lambda: None,
    )
    barrier = threading.Barrier(SERVERS)

    def call(connection: ServerConnection) -> str:
        barrier.wait(20)
        return connection.address

    with closing(servers):
        assert sorted(servers.each(call)) == sorted(each.address for each in candidates)
