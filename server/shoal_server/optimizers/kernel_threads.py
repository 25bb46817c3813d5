"""Threads of this process that join whoever has work for several: one for every core but the caller's own.

Nobody waits for a helper that has not come. One that has come may lose its core again to another process, and then its
caller has to wait: so that this costs little on a busy machine, nobody is asked for a while then. What the work is, and
how those who do it divide it, is the work's own affair.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any, Generic, TypeVar

from shoal import errors

T = TypeVar("T")

THREADS_VARIABLE = "SHOAL_KERNEL_THREADS"
_MOST_THREADS = 8  # that memory keeps busy
_PATIENCE_S = 5e-4  # a few blocks' time: who ends last has been at work, not without a core
_REST = 20  # times what a caller waited, so that waiting takes a twentieth of the time at most


class _Offer(Generic[T]):
    """Work that helpers may join.

    Attributes:
        work: does its share, and returns when there is nothing left to begin.
        inside: helpers that have begun and not ended.
        results: what helpers returned.
        error: what the first helper to fail raised.
        left: told when a helper ends.
    """

    def __init__(self, work: Callable[[], T], lock: threading.Lock) -> None:
        self.work = work
        self.inside = 0
        self.results: list[T] = []
        self.error: BaseException | None = None
        self.left = threading.Condition(lock)


class KernelThreads:
    """Helpers, and the offers that they may join.

    Their threads start here and end with the process.

    Args:
        helpers: how many; with none, everybody works alone.
        clock: seconds that never go back.
    """

    def __init__(self, helpers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._helpers = helpers
        self._clock = clock
        # Guards all below and the offers' fields. Taken after any other lock; no work is done under it.
        self._lock = threading.Lock()
        self._offered = threading.Condition(self._lock)
        self._open: deque[_Offer[Any]] = deque()  # nobody has come back from these: there may be more to do
        self._resting_until = 0.0  # when helpers are asked again, by the clock
        for number in range(helpers):
            threading.Thread(target=self._help, name=f"idle-core-{number}", daemon=True).start()

    def share(self, work: Callable[[], T]) -> list[T]:
        """Calls `work` here, and at the same time in every helper that comes before it is done.

        Args:
            work: may be called by several threads at once, which it sees to; returns when all has been begun.

        Returns:
            What each call returned, the caller's first. All that began have ended.

        Raises:
            BaseException: what `work` raised, here or in a helper.
        """
        if not self._helpers or self._clock() < self._resting_until:  # read without the lock: an old one does no harm
            return [work()]
        offer = _Offer(work, self._lock)
        with self._lock:
            self._open.append(offer)
            self._offered.notify(self._helpers)
        try:
            own = work()
        finally:
            self._finish(offer)
        if offer.error is not None:
            raise offer.error
        return [own, *offer.results]

    def _finish(self, offer: _Offer[Any]) -> None:
        done = self._clock()
        with self._lock:
            self._close(offer)
            offer.left.wait_for(lambda: not offer.inside)
            now = self._clock()
            if now - done > _PATIENCE_S:
                self._resting_until = now + _REST * (now - done)

    def _close(self, offer: _Offer[Any]) -> None:
        if offer in self._open:
            self._open.remove(offer)

    def _help(self) -> None:
        while True:
            with self._lock:
                self._offered.wait_for(lambda: self._open)
                offer = self._open[0]
                offer.inside += 1
            self._join(offer)
            del offer  # or this thread would hold the arrays until the next one comes

    def _join(self, offer: _Offer[Any]) -> None:
        results: list[Any] = []
        error: BaseException | None = None
        try:
            results.append(offer.work())
        except BaseException as raised:  # it is the caller's
            error = raised
        with self._lock:
            self._close(offer)
            offer.inside -= 1
            offer.results += results
            offer.error = offer.error or error
            offer.left.notify()


def threads() -> int:
    """How many threads may work at one thing, the caller's included.

    As many as this process may use cores, up to 8, unless the environment says SHOAL_KERNEL_THREADS.

    Raises:
        BadRequest: SHOAL_KERNEL_THREADS is not a whole number of 1 or more.
    """
    if not (text := os.environ.get(THREADS_VARIABLE, "")):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(cores, _MOST_THREADS)
    if not text.isdecimal() or int(text) < 1:
        raise errors.BadRequest(f"{THREADS_VARIABLE} is {text!r}; it is a number of threads, 1 or more")
    return int(text)


@cache
def crew() -> KernelThreads:
    """The one of this process; BadRequest as of `threads`."""
    return KernelThreads(threads() - 1)
