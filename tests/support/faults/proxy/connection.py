"""One proxied connection: two sockets and the two flows between them. All methods run on the loop of the network."""

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from support.faults.proxy.flow import Flow

# With it, `close` sends a reset in place of the end of the stream.
_RESET = struct.pack("ii", 1, 0)


class End(asyncio.Protocol):
    """The proxy's end of one of the two sockets.

    Args:
        received: called with each segment; with an empty one at the end.
        full: called with whether this socket wants no more bytes now.
        lost: called when the socket is closed.
    """

    def __init__(
        self, received: Callable[[bytes], object], full: Callable[[bool], object], lost: Callable[[], object]
    ) -> None:
        self._received, self._full, self._lost = received, full, lost
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._received(data)

    def eof_received(self) -> bool:
        self._received(b"")
        return True  # the other direction goes on

    def pause_writing(self) -> None:
        self._full(True)

    def resume_writing(self) -> None:
        self._full(False)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()

    def reset(self) -> None:
        """Closes the socket at once, so that the process at its other end sees a reset."""
        if self.transport is None or self.transport.is_closing():
            return
        with suppress(OSError):
            found: socket.socket = self.transport.get_extra_info("socket")
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()


class ProxiedConnection:
    """A connection through a proxy.

    Args:
        requests: the flow from the process that opened it.
        replies: the flow to that process.
        keeps_reply: called when a reply begins; False drops the reply and the connection.
        ended: called once, when both sockets are closed.
    """

    def __init__(
        self, requests: Flow, replies: Flow, keeps_reply: Callable[[], bool], ended: Callable[[], object]
    ) -> None:
        self._requests, self._replies, self._keeps_reply, self._ended = requests, replies, keeps_reply, ended
        self._asked = False  # whether bytes of a request came after the last bytes of a reply
        self._open = 2  # sockets; the one to the target counts while it is being connected
        self._cut = False
        self.client = End(self._from_client, replies.pause, self._lost)
        self.server = End(self._from_server, requests.pause, self._lost)
        requests.on_end = partial(self._pass_end, self.client, self.server)
        replies.on_end = partial(self._pass_end, self.server, self.client)

    def connected(self) -> None:
        """Starts to forward: the target has accepted the connection."""
        assert self.client.transport
        assert self.server.transport
        if self._cut:
            self.server.reset()
            return
        self._requests.connect(self.client.transport, self.server.transport)
        self._replies.connect(self.server.transport, self.client.transport)

    def refused(self) -> None:
        """Closes the client's socket: the target has not accepted the connection."""
        self.cut()
        self._lost()

    def deliver(self) -> None:
        """Hands over what a partition has held back."""
        self._requests.deliver()
        self._replies.deliver()

    def cut(self) -> None:
        """Closes both sockets at once, with a reset."""
        self._cut = True
        self._requests.stop()
        self._replies.stop()
        self.client.reset()
        self.server.reset()

    def _from_client(self, segment: bytes) -> None:
        self._asked = self._asked or bool(segment)
        self._requests.feed(segment)

    def _from_server(self, segment: bytes) -> None:
        if segment and self._asked:
            self._asked = False
            if not self._keeps_reply():
                self.cut()
                return
        self._replies.feed(segment)

    def _pass_end(self, source: End, sink: End) -> None:
        """Tells one end that the other one has closed its connection, or its direction of it."""
        assert source.transport
        assert sink.transport
        if source.transport.is_closing() or (self._requests.ended and self._replies.ended):
            source.transport.close()
            sink.transport.close()
        elif not sink.transport.is_closing():
            with suppress(OSError):  # the other process has just reset it
                sink.transport.write_eof()

    def _lost(self) -> None:
        self._open -= 1
        if self._open == 0:
            self._requests.stop()
            self._replies.stop()
            self._ended()
        elif not self._cut:
            # The end of a socket that was reset. It comes after the segments before it, and after a partition.
            for flow, end in ((self._requests, self.client), (self._replies, self.server)):
                if end.transport and end.transport.is_closing():
                    flow.feed(b"")


__all__ = ["End", "ProxiedConnection"]
