"""Misbehaving callers: calls with headers but without a message, and connections that send nothing."""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADERS, _SETTINGS, _PING = 1, 4, 6
_ACK, _END_HEADERS = 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Returns a frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _literal(text: str) -> bytes:
    assert len(text) < 127
    return bytes([len(text)]) + text.encode()


def header_block(path: str) -> bytes:
    """Returns a gRPC call's headers in HPACK, as literals that are not indexed."""
    return b"".join(
        (
            b"\x83\x86",  # :method POST, :scheme http
            b"\x04" + _literal(path),
            b"\x01" + _literal("test"),  # :authority
            b"\x0f\x10" + _literal("application/grpc"),  # content-type
            b"\x00" + _literal("te") + _literal("trailers"),
        )
    )


class HalfOpenCalls:
    """One connection with calls that send their headers but never a message.

    Args:
        address: host:port of a gRPC server.
        methods: methods of the calls, such as "/shoal.v1.Jobs/List", used in turn.
        count: number of calls.
    """

    def __init__(self, address: str, methods: list[str], count: int) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=5)
        self._closed = False
        blocks = [header_block(method) for method in methods]
        frames = [frame(_HEADERS, _END_HEADERS, 2 * call + 1, blocks[call % len(blocks)]) for call in range(count)]
        self._reader = threading.Thread(target=self._read_on, name="half-open")
        self._socket.sendall(b"".join((PREFACE, frame(_SETTINGS, 0, 0), *frames)))
        self._reader.start()  # only now: an acknowledgement must not come between the frames

    def close(self) -> None:
        """Closes the connection."""
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._reader.join()

    def _read_on(self) -> None:
        """Acknowledges settings and pings, so that the server sees a live client."""
        with suppress(OSError, EOFError):
            while not self._closed:
                head = self._take(9)
                payload = self._take(int.from_bytes(head[:3], "big"))
                kind, flags = head[3], head[4]
                if kind in {_SETTINGS, _PING} and not flags & _ACK:
                    self._socket.sendall(frame(kind, _ACK, 0, payload if kind == _PING else b""))

    def _take(self, size: int) -> bytes:
        taken = b""
        while len(taken) < size:
            try:
                piece = self._socket.recv(size - len(taken))
            except TimeoutError:
                if self._closed:
                    raise EOFError from None
                continue
            if not piece:
                raise EOFError
            taken += piece
        return taken


@contextmanager
def misbehaving(address: str, methods: list[str], *, calls: int, connections: int) -> Iterator[None]:
    """Holds half-open calls on one connection, and connections that send nothing, for the length of the block."""
    host, _, port = address.rpartition(":")
    with ExitStack() as stack:
        for _ in range(connections):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
        stack.callback(HalfOpenCalls(address, methods, calls).close)
        yield


__all__ = ["PREFACE", "HalfOpenCalls", "frame", "header_block", "misbehaving"]
