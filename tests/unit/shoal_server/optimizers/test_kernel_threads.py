"""Kernel threads: which take part, which the caller waits for, the errors that they raise, and when they rest."""

import gc
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from shoal import errors
from shoal_server.optimizers import kernel_threads
from shoal_server.optimizers.kernel_threads import KernelThreads
from support.waiting import wait_until


class FakeClock:
    """Stands still but when told: on a busy machine helpers would be left alone for a while, as they should."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def here() -> int:
    return threading.get_ident()


def together(threads: int) -> Callable[[], int]:
    """Work that is done when so many threads are at it."""
    barrier = threading.Barrier(threads)

    def work() -> int:
        barrier.wait()
        return here()

    return work


@pytest.mark.parametrize("helpers", [1, 3])
def test_caller_and_every_helper_take_part(helpers: int) -> None:
    pool = KernelThreads(helpers, FakeClock())
    for _ in range(50):
        results = pool.share(together(1 + helpers))
        assert results[0] == here()
        assert len(set(results)) == 1 + helpers


def test_without_helpers_the_caller_works_alone() -> None:
    assert KernelThreads(0, FakeClock()).share(here) == [here()]


def test_helpers_that_are_busy_are_not_waited_for() -> None:
    pool, begun, end = KernelThreads(1, FakeClock()), threading.Event(), threading.Event()

    def busy() -> None:
        begun.set()
        end.wait()

    def wait_for_the_helper() -> None:
        if threading.current_thread() is other:
            begun.wait()
        else:
            busy()

    other = threading.Thread(target=pool.share, args=[wait_for_the_helper])
    other.start()
    begun.wait()
    assert pool.share(here) == [here()]
    end.set()
    other.join()


def test_a_helper_that_has_begun_is_waited_for() -> None:
    pool, begun = KernelThreads(1, FakeClock()), threading.Event()
    ended: list[int] = []
    caller = here()

    def work() -> None:
        if here() == caller:
            begun.wait()
        else:
            begun.set()
            ended.append(here())

    for number in range(1, 100):
        begun.clear()
        pool.share(work)
        assert len(ended) == number


@pytest.mark.parametrize("at_fault", ["caller", "helper"])
def test_exception_reaches_the_caller_after_all_have_ended(at_fault: str) -> None:
    pool, both, caller = KernelThreads(1, FakeClock()), threading.Barrier(2), here()
    ended: list[int] = []

    def work() -> None:
        both.wait()
        ended.append(here())
        if (here() == caller) == (at_fault == "caller"):
            raise ArithmeticError(at_fault)

    with pytest.raises(ArithmeticError, match=at_fault):
        pool.share(work)
    assert len(ended) == 2
    assert len(set(pool.share(together(2)))) == 2  # the helper has survived


def test_many_callers_at_once_all_get_their_own_results() -> None:
    pool = KernelThreads(2, FakeClock())
    failures: list[int] = []

    def call(mine: int) -> None:
        failures.extend(result for _ in range(200) for result in pool.share(lambda: mine) if result != mine)

    callers = [threading.Thread(target=call, args=[number]) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not failures
    assert pool.idle


def test_an_idle_helper_holds_no_arrays() -> None:
    pool, both = KernelThreads(1, FakeClock()), threading.Barrier(2)

    def use(array: np.ndarray) -> None:
        both.wait()
        array[0] = 1

    array = np.zeros(10)
    known = weakref.ref(array)
    pool.share(partial(use, array))
    del array

    def gone() -> bool:
        gc.collect()
        return known() is None

    wait_until(gone, what="the array to be freed")


@pytest.mark.parametrize(("waited", "rest"), [(0.01, 0.2), (0.0001, 0)])
def test_helpers_rest_twenty_times_the_callers_wait(waited: float, rest: float) -> None:
    clock, caller = FakeClock(), here()
    pool, begun, is_waited_for = KernelThreads(1, clock), threading.Event(), threading.Event()

    def slow_helper() -> None:
        if here() == caller:
            begun.wait()
        else:
            begun.set()
            wait_until(lambda: pool.idle, what="the caller to wait")
            clock.now += waited
            is_waited_for.set()

    pool.share(slow_helper)
    assert is_waited_for.is_set()
    if rest:
        clock.now += 0.99 * rest
        assert pool.share(here) == [here()]
        assert pool.idle
        clock.now += 0.02 * rest
    assert len(set(pool.share(together(2)))) == 2


def test_thread_count_is_the_usable_cores_up_to_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernel_threads.THREADS_VARIABLE, raising=False)
    for cores, expected in [({3}, 1), ({0, 5}, 2), (set(range(64)), 8)]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid, cores=cores: cores, raising=False)
        assert kernel_threads.thread_count() == expected
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert kernel_threads.thread_count() == 4


def test_environment_overrides_the_thread_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernel_threads.THREADS_VARIABLE, "12")
    assert kernel_threads.thread_count() == 12
    for wrong in ("0", "-1", "two", "1.5", " "):
        monkeypatch.setenv(kernel_threads.THREADS_VARIABLE, wrong)
        with pytest.raises(errors.BadRequest, match=r"SHOAL_KERNEL_THREADS is .*1 or more"):
            kernel_threads.thread_count()


def test_a_process_has_one_set_of_kernel_threads() -> None:
    assert kernel_threads.kernel_threads() is kernel_threads.kernel_threads()
