"""Threads for what may wait, so that the event loop never does: so many at a time, and a short queue for these."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from shoal import errors
from shoal._role import in_thread

T = TypeVar("T")


class Threads:
    """Runs functions in threads; used by the event loop's thread alone.

    What does not come back keeps its thread, and others wait for it no longer than they would otherwise. The threads
    end with the process, whatever they wait for.

    Args:
        what: is waited for, in words.
        most: threads at a time.
        queued: how many more may wait for one.
        patience_s: how long an answer may take.
    """

    def __init__(self, what: str, most: int, queued: int, patience_s: float) -> None:
        self._what, self._bound, self._patience_s = what, most + queued, patience_s
        self._free = asyncio.Semaphore(most)
        self._asked = 0

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """What a function gives.

        Raises:
            Overloaded: too many wait already.
            DeadlineExceeded: it takes too long; what it does may yet be done.
        """
        if self._asked >= self._bound:
            raise errors.Overloaded(
                f"as many requests as may ({self._bound}) wait for {self._what} already; try again later",
                requests=self._bound,
            )
        self._asked += 1
        try:
            async with asyncio.timeout(self._patience_s):
                await self._free.acquire()
                return await asyncio.wrap_future(self._started(function, arguments))
        except TimeoutError:
            raise errors.DeadlineExceeded(
                f"{self._what} did not answer within {self._patience_s:g} s; what was to be done may be done yet",
                seconds=self._patience_s,
            ) from None
        finally:
            self._asked -= 1

    def _started(self, function: Callable[..., T], arguments: tuple[object, ...]) -> Future[T]:
        loop = asyncio.get_running_loop()

        def perform() -> T:
            try:
                return function(*arguments)
            finally:
                with suppress(RuntimeError):  # the page has ended meanwhile
                    loop.call_soon_threadsafe(self._free.release)

        try:
            return in_thread(perform, "page call")
        except RuntimeError:  # the system has none left
            self._free.release()
            raise


__all__ = ["Threads"]
