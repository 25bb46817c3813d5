"""Bounded threads with a short queue, for calls that would block the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from shoal import errors
from shoal._limits import Limit
from shoal._role.web_server import in_thread

T = TypeVar("T")


class BoundedThreadPool:
    """A pool of threads. Only the event loop's thread uses it.

    A function that does not return keeps its thread, but its caller stops waiting after `timeout_s`. The threads end
    with the process, whatever they wait for.

    Args:
        what: What the functions wait for, for messages.
        most: The limit of concurrent threads.
        limit: The limit of calls, with those that wait for a thread.
        timeout_s: Seconds that a call may take.
    """

    def __init__(self, what: str, most: int, limit: Limit, timeout_s: float) -> None:
        self._what, self._limit, self._timeout_s = what, limit, timeout_s
        self._free = asyncio.Semaphore(most)
        self._waiting = 0

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Runs a function in a thread and returns its result.

        Raises:
            Overloaded: Too many calls wait already.
            DeadlineExceeded: The function takes too long. It may still complete.
        """
        if self._waiting >= self._limit.default:
            raise self._limit.refusal(f"{self._waiting} requests wait for {self._what}", "try again later")
        self._waiting += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._free.acquire()
                return await asyncio.wrap_future(self._started(function, arguments))
        except TimeoutError:
            raise errors.DeadlineExceeded(
                f"{self._what} did not answer within {self._timeout_s:g} s; the action may still complete",
                seconds=self._timeout_s,
            ) from None
        finally:
            self._waiting -= 1

    def _started(self, function: Callable[..., T], arguments: tuple[object, ...]) -> Future[T]:
        loop = asyncio.get_running_loop()

        def perform() -> T:
            try:
                return function(*arguments)
            finally:
                with suppress(RuntimeError):  # the page has ended in the meantime
                    loop.call_soon_threadsafe(self._free.release)

        try:
            return in_thread(perform, "page call")
        except RuntimeError:  # the system has no more threads
            self._free.release()
            raise


__all__ = ["BoundedThreadPool"]
