"""The page's routes: what is asked for by which path. What it says, `reader` reads; who may ask, `guard` says."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from shoal import errors
from shoal_coordinator.page.guard import Guard, Rules
from shoal_coordinator.page.reader import Mark, Reader
from shoal_coordinator.page.responses import answer, failure
from shoal_coordinator.page.streams import Stream, Streams
from shoal_coordinator.page.threads import Threads

_log = structlog.get_logger(__name__)

STATIC = Path(__file__).parent / "static"
# Calls that wait for the coordinator at a time, and for a folder of checkpoints, which may be far away; and how many
# more may wait for one of these to end.
_THREADS, _FOLDER_THREADS = 8, 2
_QUEUED, _FOLDER_QUEUED = 64, 8
# How long an answer may take: less than the page's own patience, so that it is told why.
_ANSWER_S = 10.0
# What a request may bring, and how long that may take.
_BODY_BYTES, _BODY_S = 4_096, 10.0


def make_app(reader: Reader, rules: Rules, stopping: asyncio.Event, max_watchers: int) -> ASGIApp:
    """The page.

    Args:
        reader: reads the coordinator.
        rules: who may ask.
        stopping: set when all streams are to end.
        max_watchers: streams at a time.
    """
    pages = _Pages(reader, stopping, max_watchers)
    job = "/api/jobs/{name}"
    routes = [
        Route("/", pages.overview),
        Route("/jobs/{name}", pages.job),
        Route("/healthz", pages.health),
        Route("/api/cluster", pages.says(reader.cluster)),
        Route("/api/jobs", pages.says(reader.jobs)),
        Route("/api/events", pages.cluster_events),
        Route(job, pages.says_of_job(reader.job)),
        Route(f"{job}/data", pages.says_of_job(reader.data)),
        Route(f"{job}/timings", pages.says_of_job(reader.timings)),
        Route(f"{job}/checkpoints", pages.says_of_job(reader.checkpoints, of_folder=True)),
        Route(f"{job}/events", pages.job_events),
        Route(f"{job}/cancel", pages.does(reader.cancel), methods=["POST"]),
        Route(f"{job}/checkpoint", pages.does(reader.checkpoint), methods=["POST"]),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
        errors.ShoalError: _refuse,
        HTTPException: _refuse_route,
        Exception: _fail,
    }
    return Guard(Starlette(routes=routes, exception_handlers=handlers), rules)


class _Pages:
    """The endpoints. None of them waits on the event loop's thread: what may wait has threads of its own."""

    def __init__(self, reader: Reader, stopping: asyncio.Event, max_watchers: int) -> None:
        self._reader = reader
        self._ask = Threads("the coordinator", _THREADS, _QUEUED, _ANSWER_S).run
        self._ask_folder = Threads("the folder of checkpoints", _FOLDER_THREADS, _FOLDER_QUEUED, _ANSWER_S).run
        self._streams = Streams(reader, self._ask, stopping, max_watchers)

    async def overview(self, _request: Request) -> Response:
        return _shell()

    async def job(self, request: Request) -> Response:
        """The page of a job, which itself says it when there is none."""
        return _shell(200 if await self._ask(self._reader.knows, request.path_params["name"]) else 404)

    async def health(self, _request: Request) -> Response:
        try:
            await self._ask(self._reader.knows, "")
        except errors.ShoalError as error:
            return PlainTextResponse(f"{error.message}\n", 503)
        return PlainTextResponse("ok\n")

    async def cluster_events(self, _request: Request) -> Stream:
        return await self._streams.cluster()

    async def job_events(self, request: Request) -> Stream:
        mark = Mark.parse(request.headers.get("last-event-id", ""))
        return await self._streams.job(request.path_params["name"], mark)

    def says(self, read: Callable[[], bytes]) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint that answers with what is read."""

        async def endpoint(_request: Request) -> Response:
            return answer(await self._ask(read))

        return endpoint

    def says_of_job(
        self, read: Callable[[str], bytes], *, of_folder: bool = False
    ) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint that answers with what is read of a job, or of its folder."""
        ask = self._ask_folder if of_folder else self._ask

        async def endpoint(request: Request) -> Response:
            return answer(await ask(read, request.path_params["name"]))

        return endpoint

    def does(self, act: Callable[[str], bytes]) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint that does something to a job."""

        async def endpoint(request: Request) -> Response:
            await _no_arguments(request)
            name = request.path_params["name"]
            found = answer(await self._ask(act, name))
            _log.info("done from the page", action=request.url.path.rpartition("/")[2], job=name)
            return found

        return endpoint


async def _no_arguments(request: Request) -> None:
    """Takes in a body, which has to be `{}`: actions have no settings yet, and who sends some is to know.

    Raises:
        MessageTooLarge: it is longer than any that makes sense.
        BadRequest: it is something else, or did not come.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > _BODY_BYTES:
                    raise errors.MessageTooLarge(f"the body has more than {_BODY_BYTES} bytes; send {{}}")
        arguments = json.loads(body)
    except (TimeoutError, ClientDisconnect, ValueError, RecursionError) as error:
        raise errors.BadRequest(f"the body is no JSON: {error}; send {{}}") from None
    if arguments != {}:
        raise errors.BadRequest("the body says more than is understood; send {}")


async def _refuse(_request: Request, error: errors.ShoalError) -> Response:
    return failure(error)


async def _fail(request: Request, error: Exception) -> Response:
    """A defect, which nobody else tells of: the server's own log is off."""
    _log.error("a request to the page has failed", method=request.method, path=request.url.path[:200], exc_info=error)
    return failure(errors.InternalError("this is a defect of the page: the coordinator's log has the traceback"))


async def _refuse_route(request: Request, error: HTTPException) -> Response:
    """There is no such path, or it is not for this method."""
    if error.status_code == 404 and not request.url.path.startswith(("/api/", "/static/")):
        return _shell(404)
    code = "NOT_FOUND" if error.status_code == 404 else "BAD_REQUEST"
    text = f"{request.method} {request.url.path[:200]}: {error.detail}; docs/how-to/page.md lists what there is"
    body = json.dumps({"code": code, "message": text}).encode()
    return Response(body, error.status_code, error.headers, media_type="application/json")


def _shell(status: int = 200) -> Response:
    """The one HTML file, whose script looks at the path."""
    return FileResponse(STATIC / "index.html", status, headers={"cache-control": "no-cache"})


__all__ = ["STATIC", "make_app"]
