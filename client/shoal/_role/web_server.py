"""Web server of a role: uvicorn with bounds on connections, run by a thread that it blocks.

It serves the coordinator's page and the pages of all roles. Importing it imports uvicorn, about 130 ms, so a role that
may never be asked imports it with its first connection. What is served is not here.
"""

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

T = TypeVar("T")

# Seconds that answers in progress have when the server stops.
_GRACE_S = 2


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of connections.

    Attributes:
        connections: at a time.
        patience_s: seconds that a connection may be open without a complete request, at first and after each answer.
        longest_s: seconds after which a connection is closed whatever it does; None: no limit.
        refusal: bytes that a connection above the limit gets; empty: it is reset.
    """

    connections: int
    patience_s: float
    longest_s: float | None = None
    refusal: bytes = b""


class WebServer:
    """Serves an app until it is stopped.

    Args:
        listening: a socket that listens; the server closes it.
        make_app: makes the app, in the event loop's thread; given an event that is set when streams are to end.
        bounds: of connections.
    """

    def __init__(
        self, listening: socket.socket, make_app: Callable[[asyncio.Event], ASGIApp], bounds: ConnectionLimits
    ) -> None:
        self._listening, self._make_app, self._bounds = listening, make_app, bounds
        self._lock = threading.Lock()  # guards _loop and _stopped
        self._loop: asyncio.AbstractEventLoop | None = None  # while `run` serves
        self._stopped = False

    def run(self) -> None:
        """Serves in this thread until `stop`."""
        try:
            asyncio.run(self._main())
        finally:
            self._listening.close()

    def stop(self) -> None:
        """Has `run` end its streams and connections, and return; from any thread, before `run` too."""
        with self._lock:
            self._stopped = True
            if self._loop:
                self._loop.call_soon_threadsafe(self._end)

    async def _main(self) -> None:
        stopping = self._stopping = asyncio.Event()
        bounds = self._bounds

        class Connection(_Connection):
            limits = bounds

        config = uvicorn.Config(
            self._make_app(stopping),
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_GRACE_S,
        )
        self._server = uvicorn.Server(config)
        with self._lock:
            if self._stopped:
                return
            self._loop = asyncio.get_running_loop()
        try:
            await self._server.serve(sockets=[self._listening])
        finally:
            with self._lock:
                self._loop = None

    def _end(self) -> None:
        self._stopping.set()
        self._server.should_exit = True


class _Connection(H11Protocol):
    """A connection within the bounds."""

    limits: ConnectionLimits
    _patience: asyncio.TimerHandle | None = None
    _life: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) <= self.limits.connections:
            if self.limits.longest_s is not None:
                self._life = self.loop.call_later(self.limits.longest_s, transport.abort)
            self._wait()
        elif self.limits.refusal:
            transport.write(self.limits.refusal)
            transport.close()
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._patience, self._life):
            if timer:
                timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait()

    def _wait(self) -> None:
        """Begins the patience anew: a byte now and then does not make it longer."""
        if self._patience:
            self._patience.cancel()
        self._patience = self.loop.call_later(self.limits.patience_s, self._look)

    def _look(self) -> None:
        if getattr(self.cycle, "response_complete", True):  # there is no cycle before the first request
            self.transport.close()


def in_thread(function: Callable[[], T], name: str) -> Future[T]:
    """Runs a function in a thread of its own, which ends with the process, whatever it waits for.

    Returns:
        What it gives or raises; cancelling that changes nothing.

    Raises:
        RuntimeError: the system has no thread left.
    """
    answer = Future[T]()
    answer.set_running_or_notify_cancel()

    def perform() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:  # whoever waits for it is told
            answer.set_exception(error)

    threading.Thread(target=perform, name=name, daemon=True).start()
    return answer


__all__ = ["ConnectionLimits", "WebServer", "in_thread"]
