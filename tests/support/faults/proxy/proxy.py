"""Proxy in front of one port. Its methods may be called from any thread; each returns when it has taken effect."""

import asyncio
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from support.faults.proxy.conditions import Conditions, Direction, Line
from support.faults.proxy.connection import ProxiedConnection
from support.faults.proxy.flow import Flow

# Calls a function on the loop of the network, and returns its result.
OnLoop = Callable[[Callable[[], Any]], Any]
_CONNECT_S = 30.0


@dataclass(slots=True)
class ProxyCounts:
    """What a proxy has done.

    Attributes:
        connections: connections that were opened.
        replies: replies: bytes from the target that came after bytes to it.
        dropped: replies that were dropped, each with its connection.
        stalled: segments that were stalled.
    """

    connections: int = 0
    replies: int = 0
    dropped: int = 0
    stalled: int = 0


class Proxy:
    """A TCP proxy in front of one port: a network link of its own, which can be slow, lossy or partitioned.

    `Network.proxy` makes it.

    Args:
        name: name of the link, for messages.
        target: host:port that it forwards to.
        listening: the socket that it accepts connections on.
        chance: its source of randomness.
        loop: the loop of the network.
        on_loop: calls a function on that loop.

    Attributes:
        address: host:port that it accepts connections on.
    """

    def __init__(
        self,
        name: str,
        target: str,
        listening: socket.socket,
        chance: random.Random,
        loop: asyncio.AbstractEventLoop,
        on_loop: OnLoop,
    ) -> None:
        host, _, port = target.rpartition(":")
        self.name, self._target = name, (host, int(port))
        self.address = "{}:{}".format(*listening.getsockname())
        self._listening, self._chance, self._loop, self._on_loop = listening, chance, loop, on_loop
        self._conditions = Conditions()
        self._blocked: frozenset[Direction] = frozenset()
        self._healed = asyncio.Event()  # set while connections can be opened
        self._healed.set()
        self._connections: set[ProxiedConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._counts = ProxyCounts()
        self._server: asyncio.Server | None = None

    # Faults. Each stays until `heal`, except for `cut`.

    def delay(self, mean_s: float, jitter_s: float = 0.0) -> None:
        """Delays each segment, in both directions, by `mean_s` seconds, give or take at most `jitter_s`."""
        self._set(delay_s=mean_s, jitter_s=jitter_s)

    def stall(self, share: float, seconds: float) -> None:
        """Delays this share of the segments by `seconds` more. Those behind them wait, too."""
        self._set(stall_share=share, stall_s=seconds)

    def limit(self, bytes_per_s: float) -> None:
        """Limits the rate of each direction of each connection."""
        self._set(bytes_per_s=bytes_per_s)

    def drop_replies(self, share: float) -> None:
        """Drops this share of the replies, each together with its connection: the target has acted, nobody is told."""
        self._set(drop_share=share)

    def partition(self, direction: Literal["both", "requests", "replies"] = "both") -> None:
        """Holds back all bytes of one direction or both, and lets no connection be opened. Nobody sees an error.

        As with TCP, what was held back arrives after `heal`, unless `cut` is called before.
        """
        blocked = frozenset(Direction) if direction == "both" else frozenset({Direction(direction)})

        def block() -> None:
            self._blocked = blocked
            self._healed.clear()

        self._on_loop(block)

    def cut(self) -> int:
        """Closes all connections with a reset, and returns their number. New ones can be opened."""

        def close() -> int:
            found = list(self._connections)
            for connection in found:
                connection.cut()
            return len(found)

        cut: int = self._on_loop(close)
        return cut

    def heal(self) -> None:
        """Ends all faults. What was held back arrives now."""

        def restore() -> None:
            self._conditions, self._blocked = Conditions(), frozenset()
            self._healed.set()
            for connection in list(self._connections):
                connection.deliver()

        self._on_loop(restore)

    @property
    def counts(self) -> ProxyCounts:
        """What the proxy has done so far."""
        found: ProxyCounts = self._on_loop(lambda: replace(self._counts))
        return found

    # Of the network, on its loop.

    async def start(self) -> None:
        """Starts to accept connections."""
        self._server = await self._loop.create_server(self._accepted, sock=self._listening)

    async def stop(self) -> None:
        """Closes the port and all connections."""
        if self._server:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        for connection in list(self._connections):
            connection.cut()
        while self._connections:
            await asyncio.sleep(0)

    def _set(self, **changed: float) -> None:
        conditions = replace(self._conditions, **changed)  # checks them, in the thread of the caller

        def change() -> None:
            self._conditions = conditions

        self._on_loop(change)

    def _accepted(self) -> asyncio.Protocol:
        self._counts.connections += 1
        connection = ProxiedConnection(
            self._flow(Direction.REQUESTS),
            self._flow(Direction.REPLIES),
            self._keeps_reply,
            lambda: self._connections.discard(connection),
        )
        self._connections.add(connection)
        task = self._loop.create_task(self._connect(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return connection.client

    async def _connect(self, connection: ProxiedConnection) -> None:
        try:
            await self._healed.wait()
            await asyncio.sleep(2 * self._conditions.delay_s)  # the handshake
            await self._healed.wait()
            async with asyncio.timeout(_CONNECT_S):
                await self._loop.create_connection(lambda: connection.server, *self._target)
        except (OSError, asyncio.CancelledError):
            connection.refused()
        else:
            connection.connected()

    def _flow(self, direction: Direction) -> Flow:
        line = Line(self._chance, self._stalled)
        return Flow(self._loop, line, lambda: self._conditions, lambda: direction in self._blocked)

    def _stalled(self) -> None:
        self._counts.stalled += 1

    def _keeps_reply(self) -> bool:
        self._counts.replies += 1
        share = self._conditions.drop_share
        dropped = bool(share) and self._chance.random() < share
        self._counts.dropped += dropped
        return not dropped


__all__ = ["Proxy", "ProxyCounts"]
