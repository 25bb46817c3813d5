"""Kernel threads: helper threads, one for every core but the caller's, that share the work of large updates.

A caller never waits for a helper that has not started. A helper that has started can lose its core to another process.
The caller then waits for this helper. After such a wait, callers use no helpers for a while, which bounds the cost on a
busy machine. All threads call the same function, and the function divides the work among them.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from shoal import errors

T = TypeVar("T")
Claims: TypeAlias = npt.NDArray[np.int64]  # [the first unclaimed element, the end]

THREADS_VARIABLE = "SHOAL_KERNEL_THREADS"
_MOST_THREADS = 8  # more do not gain: memory is the bottleneck
LARGE = 1 << 22  # elements above which helpers are used: waking them costs 0.1 ms, and 2 ms of work can be shared
_PATIENCE_S = 5e-4  # the time of a few blocks; a longer wait means that a helper has lost its core
_REST = 20  # helpers rest this many times the wait, so that at most a twentieth of the time is spent waiting


class _SharedWork(Generic[T]):
    """Work that helpers may join.

    Attributes:
        work: does a share of the work; returns when nothing is left to start.
        helpers_inside: helpers that have started and not ended.
        results: results of helpers.
        error: exception of the first helper that failed.
        helper_ended: notified when a helper ends.
    """

    def __init__(self, work: Callable[[], T], lock: threading.Lock) -> None:
        self.work = work
        self.helpers_inside = 0
        self.results: list[T] = []
        self.error: BaseException | None = None
        self.helper_ended = threading.Condition(lock)


class KernelThreads:
    """Helper threads, and the work that they may join. The threads start here and end with the process.

    Args:
        helpers: number of threads; with none, each caller works alone.
        clock: monotonic clock, in seconds.
    """

    def __init__(self, helpers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._helpers = helpers
        self._clock = clock
        # Guards all below and the fields of shared work. Taken after any other lock; no work is done under it.
        self._lock = threading.Lock()
        self._offered = threading.Condition(self._lock)
        self._open: deque[_SharedWork[Any]] = deque()  # work that may have more to do
        self._resting_until = 0.0  # time at which helpers are used again
        for number in range(helpers):
            threading.Thread(target=self._help, name=f"kernel-thread-{number}", daemon=True).start()

    @property
    def idle(self) -> bool:
        """Whether no work is open to helpers."""
        with self._lock:
            return not self._open

    def share(self, work: Callable[[], T]) -> list[T]:
        """Calls `work` on this thread and, concurrently, on every helper that starts before it is done.

        Args:
            work: thread-safe; divides the work among its callers, and returns when all of it has been started.

        Returns:
            The result of each call, the caller's first. All started calls have ended.

        Raises:
            BaseException: raised by `work`, here or on a helper.
        """
        # Read without the lock: a stale value does no harm.
        if not self._helpers or self._clock() < self._resting_until:
            return [work()]
        shared = _SharedWork(work, self._lock)
        with self._lock:
            self._open.append(shared)
            self._offered.notify(self._helpers)
        try:
            own = work()
        finally:
            self._finish(shared)
        if shared.error is not None:
            raise shared.error
        return [own, *shared.results]

    def _finish(self, shared: _SharedWork[Any]) -> None:
        done = self._clock()
        with self._lock:
            self._close(shared)
            shared.helper_ended.wait_for(lambda: not shared.helpers_inside)
            now = self._clock()
            if now - done > _PATIENCE_S:
                self._resting_until = now + _REST * (now - done)

    def _close(self, shared: _SharedWork[Any]) -> None:
        if shared in self._open:
            self._open.remove(shared)

    def _help(self) -> None:
        while True:
            with self._lock:
                self._offered.wait_for(lambda: self._open)
                shared = self._open[0]
                shared.helpers_inside += 1
            self._run_share(shared)
            del shared  # otherwise this thread would keep the arrays alive until the next work

    def _run_share(self, shared: _SharedWork[Any]) -> None:
        results: list[Any] = []
        error: BaseException | None = None
        try:
            results.append(shared.work())
        except BaseException as raised:  # raised to the caller
            error = raised
        with self._lock:
            self._close(shared)
            shared.helpers_inside -= 1
            shared.results += results
            shared.error = shared.error or error
            shared.helper_ended.notify()


def thread_count() -> int:
    """Returns the number of threads that may share one piece of work, including the caller's.

    It is SHOAL_KERNEL_THREADS if set; otherwise the number of cores that this process may use, up to 8.

    Raises:
        BadRequest: SHOAL_KERNEL_THREADS is not a whole number of 1 or more.
    """
    if not (text := os.environ.get(THREADS_VARIABLE, "")):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(cores, _MOST_THREADS)
    if not text.isdecimal() or int(text) < 1:
        raise errors.BadRequest(f"{THREADS_VARIABLE} is {text!r}; it must be a number of threads, 1 or more")
    return int(text)


@cache
def kernel_threads() -> KernelThreads:
    """Returns the kernel threads of this process.

    Raises:
        BadRequest: SHOAL_KERNEL_THREADS is invalid; see `thread_count`.
    """
    return KernelThreads(thread_count() - 1)


def share(elements: int, work: Callable[[Claims], T]) -> list[T]:
    """Runs a kernel over an arena, on several threads if it is large.

    Several threads call `work` at once, with the same claims. There is one result for each thread, this thread's first.
    """
    claims = np.array([0, elements], np.int64)
    return [work(claims)] if elements < LARGE else kernel_threads().share(lambda: work(claims))
