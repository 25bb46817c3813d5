"""Routes of the page. `reader` reads the data that they return; `guard` decides which requests are allowed."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
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
from shoal._rpc import CallOutcome, OnOutcome
from shoal._security import PERMISSIONS, Principal
from shoal._system import docs_url
from shoal.v1 import job_pb2
from shoal_coordinator.page.guard import Guard, RequestRules
from shoal_coordinator.page.login import LOGIN_PATH, LOGOUT_PATH, PageLogin, RequestHandler, permitted, principal_of
from shoal_coordinator.page.reader import EventPosition, Reader
from shoal_coordinator.page.responses import answer, encode, failure
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
_CANCEL, _CHECKPOINT = "Jobs/Cancel", "Jobs/TakeCheckpoint"


def make_app(
    reader: Reader,
    rules: RequestRules,
    stopping: asyncio.Event,
    max_watchers: int,
    login: PageLogin | None = None,
    on_outcome: OnOutcome = lambda _: None,
) -> ASGIApp:
    """Returns the page as an ASGI application.

    Args:
        reader: Reads the coordinator.
        rules: Decides which requests are allowed.
        stopping: Set when all streams must end.
        max_watchers: The limit of concurrent streams.
        login: Says who makes a request. None means that the cluster asks for no tokens.
        on_outcome: Called with each login and each action, and with each request that is refused because of its caller.
    """
    pages = _Pages(reader, stopping, max_watchers, login, on_outcome)
    job = "/api/jobs/{name}"
    # Each of these needs the permission of the call that does the same.
    reads = {
        "/api/cluster": ("Coordinator/GetStatus", pages.get_page(reader.cluster)),
        "/api/jobs": ("Jobs/List", pages.get_page(reader.jobs)),
        "/api/events": ("Coordinator/GetStatus", pages.cluster_events),
        "/api/groups": ("Groups/ListGroups", pages.get_page(reader.groups)),
        job: ("Jobs/Get", pages.get_of_job(reader.job)),
        f"{job}/data": ("Jobs/GetData", pages.get_of_job(reader.data)),
        f"{job}/timings": ("Jobs/GetTimings", pages.get_of_job(reader.timings)),
        f"{job}/checkpoints": ("Jobs/Get", pages.get_of_job(reader.checkpoints, of_storage=True)),
        f"{job}/events": ("Jobs/Watch", pages.job_events),
    }
    actions = {
        f"{job}/cancel": (_CANCEL, pages.act(_CANCEL, reader.cancel)),
        f"{job}/checkpoint": (_CHECKPOINT, pages.act(_CHECKPOINT, reader.checkpoint)),
    }

    def allowed(call: str, endpoint: RequestHandler) -> RequestHandler:
        return permitted(f"shoal.v1.{call}", endpoint, on_outcome)

    routes = [
        Route("/", pages.overview),
        Route("/jobs/{name}", pages.job),
        Route("/healthz", pages.health),
        Route("/api/session", pages.session),
        Route(LOGIN_PATH, pages.log_in, methods=["POST"]),
        Route(LOGOUT_PATH, pages.log_out, methods=["POST"]),
        *(Route(path, allowed(call, endpoint)) for path, (call, endpoint) in reads.items()),
        *(Route(path, allowed(call, endpoint), methods=["POST"]) for path, (call, endpoint) in actions.items()),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
        errors.ShoalError: _refuse,
        HTTPException: _refuse_route,
        Exception: _fail,
    }
    return Guard(Starlette(routes=routes, exception_handlers=handlers), rules, login, on_outcome)


class _Pages:
    """The endpoints. None of them blocks the event loop; calls that may wait run in threads."""

    def __init__(
        self,
        reader: Reader,
        stopping: asyncio.Event,
        max_watchers: int,
        login: PageLogin | None,
        on_outcome: OnOutcome,
    ) -> None:
        self._reader, self._login, self._on_outcome = reader, login, on_outcome
        self._ask = BoundedThreadPool("the coordinator", _THREADS, catalogue.PAGE_REQUESTS, ANSWER_S).run
        self._ask_storage = BoundedThreadPool(
            "the checkpoint storage", _STORAGE_THREADS, catalogue.PAGE_STORAGE_REQUESTS, ANSWER_S
        ).run
        self._streams = Streams(reader, self._ask, stopping, max_watchers)

    async def overview(self, _request: Request) -> Response:
        return _shell()

    async def job(self, request: Request) -> Response:
        """Returns the page of a job. Its script shows a message if the job does not exist."""
        try:
            self._check_of(request)()
        except (errors.Unauthenticated, errors.Forbidden):  # says nothing of the job
            return _shell()
        return _shell(200 if await self._ask(self._reader.knows, request.path_params["name"]) else 404)

    async def session(self, request: Request) -> Response:
        """Returns who has logged in, and whether that caller may act."""
        return answer(encode(_session(principal_of(request))))

    async def log_in(self, request: Request) -> Response:
        """Begins a session by a code or a token: sets its cookie, and replies with its key."""
        body = await _body(request)
        given = body if isinstance(body, dict) and set(body) in ({"code"}, {"token"}) else {}
        text = next(iter(given.values()), None)
        if not isinstance(text, str):
            raise errors.BadRequest('the body is not a login; send {"token": "..."} or {"code": "..."}')
        if not self._login:
            return answer(encode(_session(None)))
        with self._noted(request, "page/login", None) as identified:
            code, token = given.get("code", ""), given.get("token", "")
            principal, key, headers = self._login.log_in(code=code, token=token, on_identified=identified)
        found = answer(encode(_session(principal) | {"key": key}))
        found.headers.update(headers)
        return found

    async def log_out(self, request: Request) -> Response:
        """Ends the session, and removes its cookie."""
        await _check_body(request)
        found = answer(b"{}")
        if self._login:
            principal, headers = self._login.log_out(request.headers)
            found.headers.update(headers)
            if principal:
                with self._noted(request, "page/logout", principal):
                    pass
        return found

    async def health(self, _request: Request) -> Response:
        try:
            await self._ask(self._reader.knows, "")
        except errors.ShoalError as error:
            return PlainTextResponse(f"{error.message}\n", 503)
        return PlainTextResponse("ok\n")

    async def cluster_events(self, request: Request) -> Stream:
        return await self._streams.cluster(principal_of(request), self._check_of(request))

    async def job_events(self, request: Request) -> Stream:
        mark = EventPosition.parse(request.headers.get("last-event-id", ""))
        caller, check = principal_of(request), self._check_of(request)
        return await self._streams.job(request.path_params["name"], mark, caller, check)

    @contextmanager
    def _noted(
        self, request: Request, call: str, principal: Principal | None, about: Any = None
    ) -> Iterator[Callable[[Principal], None]]:
        """Notes the outcome of the block for the audit log. Yields a function that takes the caller once known."""
        caller, host = principal, request.client.host if request.client else ""

        def identified(found: Principal) -> None:
            nonlocal caller
            caller = found

        status, reason = "OK", ""
        try:
            yield identified
        except errors.ShoalError as error:
            status, reason = error.status, error.message
            raise
        finally:
            self._on_outcome(CallOutcome(call, caller, host, status, about, reason))

    def _check_of(self, request: Request) -> Callable[[], object]:
        """Returns a function that raises Unauthenticated once the request's login has ended."""
        return partial(self._login.principal, request.headers) if self._login else lambda: None

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

    def act(
        self, call: str, action: Callable[[str, Principal | None], bytes]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Returns an endpoint that performs an action on a job, the one of a call."""

        async def endpoint(request: Request) -> Response:
            await _check_body(request)
            name, principal = request.path_params["name"], principal_of(request)
            with self._noted(request, call, principal, job_pb2.GetRequest(job=name)):
                return answer(await self._ask(action, name, principal))

        return endpoint


async def _check_body(request: Request) -> None:
    """Reads a body, which must be `{}`, because actions have no arguments yet.

    Raises:
        MessageTooLarge, BadRequest: As `_body`, or the body is something else.
    """
    if await _body(request) != {}:
        raise errors.BadRequest("the body has unknown arguments; send {}")


async def _body(request: Request) -> Any:
    """Returns a decoded body.

    Raises:
        MessageTooLarge: The body is too long.
        BadRequest: The body is not JSON, or did not arrive in time.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > catalogue.BODY_BYTES.default:
                    raise catalogue.BODY_BYTES.refusal("the body is longer", "send {}")
        return json.loads(body)
    except (TimeoutError, ClientDisconnect, ValueError, RecursionError) as error:
        raise errors.BadRequest(f"the body is not JSON: {error}; send {{}}") from None


def _session(principal: Principal | None) -> dict[str, object]:
    """Returns the record of a session: who it is, whether that caller may act, and whether the cluster is open."""
    if principal is None:
        return {"name": "", "role": "", "acts": True, "insecure": True}
    acts = principal.role in PERMISSIONS[f"shoal.v1.{_CANCEL}"]
    return {"name": principal.name, "role": principal.role.value, "acts": acts, "insecure": False}


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
    text = f"{request.method} {request.url.path[:200]}: {error.detail}; all paths: {docs_url('how-to/page')}"
    body = json.dumps({"code": code, "message": text}).encode()
    return Response(body, error.status_code, error.headers, media_type="application/json")


def _shell(status: int = 200) -> Response:
    """Returns the HTML file. Its script chooses the page by the path."""
    return FileResponse(STATIC / "index.html", status, headers={"cache-control": "no-cache"})


__all__ = ["STATIC", "make_app"]
