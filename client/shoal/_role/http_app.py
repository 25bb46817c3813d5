"""Routes of the pages of a role: what /metrics and /healthz answer.

Imported with the first connection, since it imports the web server.
"""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

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

from shoal._role.web_server import ConnectionLimits, WebServer, in_thread

_HINT = "there is /metrics and /healthz here\n"
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
# A connection is for one request: the time that it has is that of all of it.
_ONCE = {"Connection": "close"}


def make_server(
    listening: socket.socket,
    not_ready: Callable[[], str],
    registry: prometheus_client.CollectorRegistry,
    *,
    connections: int,
    seconds: float,
) -> WebServer:
    """Makes the server of a role's pages.

    Args:
        listening: a socket that listens; the server closes it.
        not_ready: why the role does not serve; empty: it does.
        registry: whose metrics are served.
        connections: at a time; a connection above that gets 503.
        seconds: that a connection lasts at most.
    """
    bounds = ConnectionLimits(connections, patience_s=seconds, longest_s=seconds, refusal=_BUSY)
    return WebServer(listening, lambda _: _make_app(not_ready, registry, connections), bounds)


def _make_app(not_ready: Callable[[], str], registry: prometheus_client.CollectorRegistry, readings: int) -> ASGIApp:
    free = asyncio.Semaphore(readings)

    async def metrics(request: Request) -> Response:
        # In a thread: neither /healthz nor the end of the role waits for a collector that hangs.
        if free.locked():
            raise HTTPException(503, headers=_ONCE)
        await free.acquire()
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        names = request.query_params.getlist("name[]")
        chosen = registry.restricted_registry(names) if names else registry
        try:
            reading = in_thread(lambda: encode(chosen), "pages reading")
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


def _release(loop: asyncio.AbstractEventLoop, semaphore: asyncio.Semaphore) -> None:
    with suppress(RuntimeError):  # the server has ended meanwhile
        loop.call_soon_threadsafe(semaphore.release)


def _text(text: str, status: int) -> Response:
    return PlainTextResponse(text, status, {"Cache-Control": "no-store"} | _ONCE)


__all__ = ["make_server"]
