"""Streams of server-sent events: the cluster, once a second if it has changed, and a job's events as they occur."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import structlog
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from shoal import errors
from shoal._limits import catalogue
from shoal._security import Principal
from shoal_coordinator.page import responses
from shoal_coordinator.page.reader import EventPosition, JobUpdate, Overview, Reader
from shoal_coordinator.page.responses import encode
from shoal_coordinator.watchers import Watchers

_log = structlog.get_logger(__name__)

# Seconds between two checks for changes of the cluster, and of a job.
_CLUSTER_EVERY_S, _JOB_EVERY_S = 1.0, 0.5
# Seconds between two pings. A page that misses a few of them knows that the connection is dead.
_PING_S = 5
# Seconds after which a stream ends if the browser does not read.
_SEND_S = 20.0
# The limit of current and earlier workers in a job's stream.
_MAX_WORKERS = 200

# Runs a function that may wait in a thread, and returns its result.
Ask = Callable[..., Awaitable[Any]]


class Stream(EventSourceResponse):
    """A stream of events that counts as a watcher from its first byte to its last.

    Args:
        content: Its events.
        watchers: The count that includes it.
        caller: Who watches. None if that is not known.
    """

    def __init__(self, content: AsyncIterator[ServerSentEvent], watchers: Watchers, caller: Principal | None) -> None:
        super().__init__(content, ping=_PING_S, sep="\n", send_timeout=_SEND_S)
        self._watchers, self._caller = watchers, caller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._watchers.one_more(self._caller):
            await super().__call__(scope, receive, send)


class Streams:
    """The factory of streams, which all share one reading of the cluster per second.

    Args:
        reader: Reads the coordinator.
        ask: Runs a method of the reader in a thread.
        stopping: Set when all streams must end.
        most: The limit of concurrent streams.
    """

    def __init__(self, reader: Reader, ask: Ask, stopping: asyncio.Event, most: int) -> None:
        self._reader, self._ask, self._stopping = reader, ask, stopping
        self._watchers = Watchers(catalogue.PAGE_STREAMS, catalogue.CALLER_PAGE_STREAMS, "pages are open", most=most)
        self._looking = asyncio.Lock()  # guards the next two
        self._overview: Overview | None = None
        self._looked_at = float("-inf")

    async def cluster(self, caller: Principal | None, check: Callable[[], object]) -> Stream:
        """Returns a stream of events `cluster`, each with the whole cluster.

        Args:
            caller: Who watches. None if that is not known.
            check: Called about once a second. Raises Unauthenticated once the caller may not watch any longer.

        Raises:
            Overloaded: The limit of streams, or of those of the caller, is reached.
            Unreachable: The coordinator is stopping.
        """
        self._watchers.check(caller)
        await self._look()
        return Stream(self._with_failure(self._cluster_events(check)), self._watchers, caller)

    async def job(
        self, name: str, mark: EventPosition, caller: Principal | None, check: Callable[[], object]
    ) -> Stream:
        """Returns a stream of a job.

        Its events are `begin`, which tells whether all events follow or only those after the mark; `job` with the
        records of the job and its workers; `events` with a list of the job's events; and `end` when no more can come.

        Args:
            name: The name of the job.
            mark: The position after which its events are wanted.
            caller, check: As those of `cluster`.

        Raises:
            Overloaded: The limit of streams, or of those of the caller, is reached.
            UnknownJob: The job does not exist.
        """
        self._watchers.check(caller)
        first: JobUpdate = await self._ask(self._reader.update, name, mark)
        return Stream(self._with_failure(self._job_events(name, first, check)), self._watchers, caller)

    async def _look(self) -> Overview:
        """Returns the cluster as of less than a second ago."""
        async with self._looking:
            now = asyncio.get_running_loop().time()
            if self._overview is None or now - self._looked_at >= _CLUSTER_EVERY_S:
                self._overview = await self._ask(self._reader.overview)
                self._looked_at = now
            return self._overview

    async def _cluster_events(self, check: Callable[[], object]) -> AsyncIterator[ServerSentEvent]:
        key = b""
        while True:
            check()
            overview = await self._look()
            if overview.key != key:
                key = overview.key
                yield _event("cluster", overview.text)
            if await self._stops_within(_CLUSTER_EVERY_S):
                return

    async def _job_events(
        self, name: str, update: JobUpdate, check: Callable[[], object]
    ) -> AsyncIterator[ServerSentEvent]:
        workers: dict[str, None] = {}
        shown, begun = b"", False
        while True:
            check()
            if update.fresh or not begun:
                yield _event("begin", encode({"fresh": update.fresh}))
                begun = True
            for mark, chunk in update.chunks:
                yield _event("events", chunk, str(mark))
            overview = await self._look()
            present = self._workers(overview, update.job, workers)
            key = encode([update.job, [overview.quiet[worker] for worker in present]])
            if key != shown:
                shown = key
                members = [overview.members[worker] for worker in present]
                yield _event("job", encode({"job": update.job, "workers": members, "time": update.time}))
            if update.ended:
                yield _event("end", b"{}")
                return
            if await self._stops_within(_JOB_EVERY_S):
                return
            update = await self._ask(self._reader.update, name, update.mark)

    def _workers(self, overview: Overview, job: dict[str, Any], known: dict[str, None]) -> list[str]:
        """Returns the members that work on a job, or did so at an earlier reading."""
        for worker in job["workers"]:
            if len(known) < _MAX_WORKERS:
                known.setdefault(worker)
        return [worker for worker in known if worker in overview.members]

    async def _with_failure(self, stream: AsyncIterator[ServerSentEvent]) -> AsyncIterator[ServerSentEvent]:
        """Yields the events of a stream, and an event `failure` if it ends with an error."""
        try:
            async for event in stream:
                yield event
        except errors.ShoalError as error:
            yield _event("failure", encode(responses.error_record(error)))
        except Exception:
            _log.exception("a stream of the page has failed")
            defect = errors.InternalError("this is a defect of the page: the coordinator's log has the traceback")
            yield _event("failure", encode(responses.error_record(defect)))

    async def _stops_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return False
        return True


def _event(kind: str, text: bytes, mark: str | None = None) -> ServerSentEvent:
    return ServerSentEvent(data=text.decode(), event=kind, id=mark, sep="\n")


__all__ = ["Stream", "Streams"]
