"""Routes of the page. `reader` reads the data that they return; `guard` decides which requests are allowed."""

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
from shoal._limits import catalogue
from shoal_coordinator.page.guard import Guard, RequestRules
from shoal_coordinator.page.reader import EventPosition, Reader
from shoal_coordinator.page.responses import answer, failure
from shoal_coordinator.page.streams import Stream, Streams
from shoal_coordinator.page.threads import BoundedThreadPool

_log = structlog.get_logger(__name__)

STATIC = Path(__file__).parent / "static"
# Concurrent calls to the coordinator and to the checkpoint storage, which may be slow. A few more may wait.
_THREADS, _STORAGE_THREADS = 8, 2
# Seconds that a reply may take: less than the browser's timeout, so that the browser gets the reason.
ANSWER_S = 10.0
# Seconds that a request's body may take.
_BODY_S = 10.0


def make_app(reader: Reader, rules: RequestRules, stopping: asyncio.Event, max_watchers: int) -> ASGIApp:
    """Returns the page as an ASGI application.

    Args:
        reader: Reads the coordinator.
        rules: Decides which requests are allowed.
        stopping: Set when all streams must end.
        max_watchers: The limit of concurrent streams.
    """
    pages = _Pages(reader, stopping, max_watchers)
    job = "/api/jobs/{name}"
    routes = [
        Route("/", pages.overview),
        Route("/jobs/{name}", pages.job),
        Route("/healthz", pages.health),
        Route("/api/cluster", pages.get_page(reader.cluster)),
        Route("/api/jobs", pages.get_page(reader.jobs)),
        Route("/api/events", pages.cluster_events),
        Route(job, pages.get_of_job(reader.job)),
        Route(f"{job}/data", pages.get_of_job(reader.data)),
        Route(f"{job}/timings", pages.get_of_job(reader.timings)),
        Route(f"{job}/checkpoints", pages.get_of_job(reader.checkpoints, of_storage=True)),
        Route(f"{job}/events", pages.job_events),
        Route(f"{job}/cancel", pages.act(reader.cancel), methods=["POST"]),
        Route(f"{job}/checkpoint", pages.act(reader.checkpoint), methods=["POST"]),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
        errors.ShoalError: _refuse,
        HTTPException: _refuse_route,
        Exception: _fail,
    }
    return Guard(Starlette(routes=routes, exception_handlers=handlers), rules)


class _Pages:
    """The endpoints. None of them blocks the event loop; calls that may wait run in threads."""

    def __init__(self, reader: Reader, stopping: asyncio.Event, max_watchers: int) -> None:
        self._reader = reader
        self._ask = BoundedThreadPool("the coordinator", _THREADS, catalogue.PAGE_REQUESTS, ANSWER_S).run
        self._ask_storage = BoundedThreadPool(
            "the checkpoint storage", _STORAGE_THREADS, catalogue.PAGE_STORAGE_REQUESTS, ANSWER_S
        ).run
        self._streams = Streams(reader, self._ask, stopping, max_watchers)

    async def overview(self, _request: Request) -> Response:
        return _shell()

    async def job(self, request: Request) -> Response:
        """Returns the page of a job. Its script shows a message if the job does not exist."""
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
        mark = EventPosition.parse(request.headers.get("last-event-id", ""))
        return await self._streams.job(request.path_params["name"], mark)

    def get_page(self, read: Callable[[str], bytes]) -> Callable[[Request], Awaitable[Response]]:
        """Returns an endpoint that replies with the page of a list that the query's `page_token` names."""

        async def endpoint(request: Request) -> Response:
            return answer(await self._ask(read, request.query_params.get("page_token", "")))

        return endpoint

    def get_of_job(
        self, read: Callable[[str], bytes], *, of_storage: bool = False
    ) -> Callable[[Request], Awaitable[Response]]:
        """Returns an endpoint that replies with the result of `read` for a job, or for its checkpoint storage."""
        ask = self._ask_storage if of_storage else self._ask

        async def endpoint(request: Request) -> Response:
            return answer(await ask(read, request.path_params["name"]))

        return endpoint

    def act(self, action: Callable[[str], bytes]) -> Callable[[Request], Awaitable[Response]]:
        """Returns an endpoint that performs an action on a job."""

        async def endpoint(request: Request) -> Response:
            await _check_body(request)
            name = request.path_params["name"]
            found = answer(await self._ask(action, name))
            _log.info("action from the page", action=request.url.path.rpartition("/")[2], job=name)
            return found

        return endpoint


async def _check_body(request: Request) -> None:
    """Reads a body, which must be `{}`, because actions have no arguments yet.

    Raises:
        MessageTooLarge: The body is too long.
        BadRequest: The body is something else, or did not arrive in time.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > catalogue.BODY_BYTES.default:
                    raise catalogue.BODY_BYTES.refusal("the body is longer", "send {}")
        arguments = json.loads(body)
    except (TimeoutError, ClientDisconnect, ValueError, RecursionError) as error:
        raise errors.BadRequest(f"the body is not JSON: {error}; send {{}}") from None
    if arguments != {}:
        raise errors.BadRequest("the body has unknown arguments; send {}")


async def _refuse(_request: Request, error: errors.ShoalError) -> Response:
    return failure(error)


async def _fail(request: Request, error: Exception) -> Response:
    """Logs and returns a defect. The web server's own log is off."""
    _log.error("a request to the page has failed", method=request.method, path=request.url.path[:200], exc_info=error)
    return failure(errors.InternalError("this is a defect of the page: the coordinator's log has the traceback"))


async def _refuse_route(request: Request, error: HTTPException) -> Response:
    """Returns the error for an unknown path or a wrong method."""
    if error.status_code == 404 and not request.url.path.startswith(("/api/", "/static/")):
        return _shell(404)
    code = "NOT_FOUND" if error.status_code == 404 else "BAD_REQUEST"
    text = f"{request.method} {request.url.path[:200]}: {error.detail}; docs/how-to/page.md lists all paths"
    body = json.dumps({"code": code, "message": text}).encode()
    return Response(body, error.status_code, error.headers, media_type="application/json")


def _shell(status: int = 200) -> Response:
    """Returns the HTML file. Its script chooses the page by the path."""
    return FileResponse(STATIC / "index.html", status, headers={"cache-control": "no-cache"})


__all__ = ["STATIC", "make_app"]
