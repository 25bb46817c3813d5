"""Server-sent events: the cluster once a second if it has changed, and a job's events as they come."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import structlog
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from shoal import errors
from shoal_coordinator.page import responses
from shoal_coordinator.page.reader import JobUpdate, Mark, Overview, Reader
from shoal_coordinator.page.responses import encode

_log = structlog.get_logger(__name__)

# How often one looks for news of the cluster, and of a job.
_CLUSTER_EVERY_S, _JOB_EVERY_S = 1.0, 0.5
# A page that hears nothing for a few of these knows that nobody is there.
_PING_S = 5
# A page that does not take what it is sent.
_SEND_S = 20.0
# Of a job, those that work on it and those that did while a page watches.
_MAX_WORKERS = 200

# Runs a function that may wait in a thread, and gives what it does.
Ask = Callable[..., Awaitable[Any]]


class Watchers:
    """How many streams are open, and may be. Used by the event loop's thread alone.

    Args:
        most: streams at a time.
    """

    def __init__(self, most: int) -> None:
        self.most, self.open = most, 0

    def check(self) -> None:
        """Raises Overloaded if there is no room for one more."""
        if self.open >= self.most:
            raise errors.Overloaded(
                f"as many pages watch already as may at a time ({self.most}); close one, or try again later",
                watchers=self.most,
            )

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Counts a stream; Overloaded if it is one too many."""
        self.check()
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1


class Stream(EventSourceResponse):
    """A stream that counts as a watcher from its first byte to its last.

    Args:
        content: its events.
        watchers: where it counts.
    """

    def __init__(self, content: AsyncIterator[ServerSentEvent], watchers: Watchers) -> None:
        super().__init__(content, ping=_PING_S, sep="\n", send_timeout=_SEND_S)
        self._watchers = watchers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._watchers.one_more():
            await super().__call__(scope, receive, send)


class Streams:
    """Makes the streams; all of them share one look at the cluster a second.

    Args:
        reader: reads the coordinator.
        ask: runs what the reader does in a thread.
        stopping: set when all streams are to end.
        most: streams at a time.
    """

    def __init__(self, reader: Reader, ask: Ask, stopping: asyncio.Event, most: int) -> None:
        self._reader, self._ask, self._stopping = reader, ask, stopping
        self._watchers = Watchers(most)
        self._looking = asyncio.Lock()  # one at a time looks at the cluster; guards the next two
        self._overview: Overview | None = None
        self._looked_at = float("-inf")

    async def cluster(self) -> Stream:
        """The cluster: events `cluster`, each with all of it.

        Raises:
            Overloaded: too many watch.
            Unreachable: the coordinator is stopping.
        """
        self._watchers.check()
        await self._look()
        return Stream(self._told(self._cluster_events()), self._watchers)

    async def job(self, name: str, mark: Mark) -> Stream:
        """A job: `begin`, which says whether what follows is all or goes on behind the mark; then, as they come, `job`
        with its record and its workers', `events` with a list of events; and `end` when no more can come.

        Raises:
            Overloaded: too many watch.
            UnknownJob: there is no such job.
        """
        self._watchers.check()
        first: JobUpdate = await self._ask(self._reader.news, name, mark)
        return Stream(self._told(self._job_events(name, first)), self._watchers)

    async def _look(self) -> Overview:
        """The cluster as it was less than a second ago."""
        async with self._looking:
            now = asyncio.get_running_loop().time()
            if self._overview is None or now - self._looked_at >= _CLUSTER_EVERY_S:
                self._overview = await self._ask(self._reader.overview)
                self._looked_at = now
            return self._overview

    async def _cluster_events(self) -> AsyncIterator[ServerSentEvent]:
        key = b""
        while True:
            overview = await self._look()
            if overview.key != key:
                key = overview.key
                yield _event("cluster", overview.text)
            if await self._stops_within(_CLUSTER_EVERY_S):
                return

    async def _job_events(self, name: str, news: JobUpdate) -> AsyncIterator[ServerSentEvent]:
        workers: dict[str, None] = {}
        shown, begun = b"", False
        while True:
            if news.fresh or not begun:
                yield _event("begin", encode({"fresh": news.fresh}))
                begun = True
            for mark, chunk in news.chunks:
                yield _event("events", chunk, str(mark))
            overview = await self._look()
            there = self._workers(overview, news.job, workers)
            key = encode([news.job, [overview.quiet[worker] for worker in there]])
            if key != shown:
                shown = key
                members = [overview.members[worker] for worker in there]
                yield _event("job", encode({"job": news.job, "workers": members, "time": news.time}))
            if news.ended:
                yield _event("end", b"{}")
                return
            if await self._stops_within(_JOB_EVERY_S):
                return
            news = await self._ask(self._reader.news, name, news.mark)

    def _workers(self, overview: Overview, job: dict[str, Any], known: dict[str, None]) -> list[str]:
        """Those members that work on a job, or did when it was looked at before."""
        for worker in job["workers"]:
            if len(known) < _MAX_WORKERS:
                known.setdefault(worker)
        return [worker for worker in known if worker in overview.members]

    async def _told(self, stream: AsyncIterator[ServerSentEvent]) -> AsyncIterator[ServerSentEvent]:
        """A stream that says why it ends, where that is an error."""
        try:
            async for event in stream:
                yield event
        except errors.ShoalError as error:
            yield _event("failure", encode(responses.told(error)))
        except Exception:
            _log.exception("a stream of the page has failed")
            defect = errors.InternalError("this is a defect of the page: the coordinator's log has the traceback")
            yield _event("failure", encode(responses.told(defect)))

    async def _stops_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return False
        return True


def _event(kind: str, text: bytes, mark: str | None = None) -> ServerSentEvent:
    return ServerSentEvent(data=text.decode(), event=kind, id=mark, sep="\n")


__all__ = ["Stream", "Streams", "Watchers"]
