"""HTTP app of a role: the routes /metrics and /healthz.

Importing this module also imports the web server, which is slow. `http_endpoints` therefore imports this module only at
the first connection.
"""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import prometheus_client
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from shoal import errors
from shoal._limits import catalogue, count_refusal
from shoal._role.web_server import ConnectionLimits, WebServer, certificate_of, in_thread
from shoal._security import token_in

if TYPE_CHECKING:
    from shoal._security.tls import TlsFiles

_HINT = "not found; this server has /metrics and /healthz\n"
_HEADER_HINT = 'Over HTTP, the token is in a header: curl --header "Authorization: Bearer $(cat FILE)" URL\n'
# Decides from the token of a request, and from a function that returns the certificate of its client as PEM.
Authorize = Callable[[str, Callable[[], bytes]], object]
# A connection serves one request, so its time limit covers the whole request.
_ONCE = {"Connection": "close"}


def make_server(
    listening: socket.socket,
    not_ready: Callable[[], str],
    authorize: Authorize,
    registry: prometheus_client.CollectorRegistry,
    *,
    connections: int,
    host_connections: int,
    seconds: float,
    tls: "TlsFiles | None" = None,
) -> WebServer:
    """Returns the server of a role's HTTP endpoints.

    Args:
        listening: a listening socket, which the server closes.
        not_ready: returns the reason why the role does not serve, or an empty string if it serves.
        authorize: called for each request for metrics. Raises Unauthenticated, Forbidden or Unreachable.
        registry: the metrics to serve.
        connections: largest number of connections at a time. A further one replaces an earlier one.
        host_connections: largest number of connections of one host at a time.
        seconds: the longest duration of a connection.
        tls: TLS settings. None means no TLS.

    Returns:
        The server. The caller runs it.
    """
    limits = ConnectionLimits(
        catalogue.HTTP_CONNECTIONS,
        connections,
        idle_timeout_s=seconds,
        longest_s=seconds,
        host_limit=catalogue.HOST_HTTP_CONNECTIONS,
        host_connections=host_connections,
        replaces=True,
    )
    return WebServer(
        listening,
        lambda _: _make_app(not_ready, authorize, registry),
        limits,
        tls,
        client_certificates=True,
    )


def _make_app(
    not_ready: Callable[[], str],
    authorize: Authorize,
    registry: prometheus_client.CollectorRegistry,
) -> ASGIApp:
    # Less than the connections of a host, so that those which read the metrics are not replaced for /healthz.
    readings = catalogue.METRICS_REQUESTS.default
    free = asyncio.Semaphore(readings)

    async def metrics(request: Request) -> Response:
        try:
            authorize(token_in(request.headers.items()), lambda: certificate_of(request))
        except errors.ShoalError as error:
            return _refused(error)
        # The collectors run in a thread, so that one that hangs delays neither /healthz nor the end of the role.
        if free.locked():
            refused = catalogue.METRICS_REQUESTS.refusal(f"{readings} requests read the metrics", "try again later")
            count_refusal(refused)
            raise HTTPException(503, refused.message, _ONCE)
        await free.acquire()
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        names = request.query_params.getlist("name[]")
        chosen = registry.restricted_registry(names) if names else registry
        try:
            reading = in_thread(lambda: encode(chosen), "metrics reading")
        except BaseException:
            free.release()
            raise
        loop = asyncio.get_running_loop()
        reading.add_done_callback(lambda _: _release(loop, free))
        return Response(await asyncio.wrap_future(reading), headers={"Content-Type": content_type} | _ONCE)

    async def health(_request: Request) -> Response:
        reason = not_ready()
        return _text(f"{reason or 'ok'}\n", 503 if reason else 200)

    async def hint(_request: Request, _error: Exception) -> Response:
        return _text(_HINT, 404)

    app = Starlette(
        routes=[Route("/metrics", metrics), Route("/healthz", health)],
        exception_handlers={404: hint},
        middleware=[Middleware(GZipMiddleware, minimum_size=0)],
    )
    app.router.redirect_slashes = False
    return app


def _refused(error: errors.ShoalError) -> Response:
    """Returns the response to a scrape that may not read the metrics."""
    status = {"UNAUTHENTICATED": 401, "PERMISSION_DENIED": 403}.get(error.status, 503)
    if status != 401:
        return PlainTextResponse(f"{error.message}\n", status, _ONCE)
    return PlainTextResponse(f"{error.message}\n{_HEADER_HINT}", status, {"WWW-Authenticate": "Bearer"} | _ONCE)


def _release(loop: asyncio.AbstractEventLoop, semaphore: asyncio.Semaphore) -> None:
    with suppress(RuntimeError):  # the server has ended meanwhile
        loop.call_soon_threadsafe(semaphore.release)


def _text(text: str, status: int) -> Response:
    return PlainTextResponse(text, status, {"Cache-Control": "no-store"} | _ONCE)


__all__ = ["make_server"]
