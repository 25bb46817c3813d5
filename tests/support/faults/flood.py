"""Flood of gRPC calls: many connections, with more calls a second than a server can answer.

It speaks HTTP/2 itself and does not look at the answers, so one process offers far more calls than a server in Python
answers. `flooding` runs it in a process of its own, which can have a core of its own.
"""

import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from support.faults.half_open import PREFACE, frame, header_block

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_LARGEST = (1 << 31) - 1
_EMPTY_MESSAGE = b"\0\0\0\0\0"
_CONNECT_S, _ROUND_S = 20.0, 0.01


class _Connection:
    """One connection of the flood."""

    def __init__(self, address: tuple[str, int], path: str, at_a_time: int) -> None:
        self.socket = socket.create_connection(address, timeout=_CONNECT_S)
        self.ended = self._open = 0
        self._block, self._at_a_time = header_block(path), at_a_time
        self._stream, self._received, self._unsent = 1, b"", b""
        initial_window = struct.pack(">HI", 4, _LARGEST)
        window = struct.pack(">I", _LARGEST - 65_535)
        self._unsent = PREFACE + frame(_SETTINGS, 0, 0, initial_window) + frame(_WINDOW_UPDATE, 0, 0, window)
        self.socket.setblocking(False)

    def send(self) -> None:
        """Sends what there is room for."""
        with suppress(BlockingIOError):
            self._unsent = self._unsent[self.socket.send(self._unsent) :]

    def receive(self) -> None:
        """Reads frames, and counts the calls that have ended.

        Raises:
            OSError: the server has closed the connection.
        """
        with suppress(BlockingIOError):
            piece = self.socket.recv(1 << 18)
            if not piece:
                raise ConnectionResetError
            self._received += piece
        data, start, ended = self._received, 0, 0
        while len(data) - start >= 9:
            end = start + 9 + int.from_bytes(data[start : start + 3], "big")
            if len(data) < end:
                break
            kind, flags = data[start + 3], data[start + 4]
            if kind == _RST_STREAM or (kind in (_HEADERS, _DATA) and flags & _END_STREAM):
                ended += 1
            elif kind in (_SETTINGS, _PING) and not flags & _ACK:
                payload = data[start + 9 : end] if kind == _PING else b""
                self._unsent += frame(kind, _ACK, 0, payload)
            elif kind == _GOAWAY:
                raise ConnectionResetError
            start = end
        self._received = data[start:]
        self.ended += ended
        self._open -= ended

    def call(self, count: int) -> None:
        """Makes calls, unless too many are open."""
        calls, count = [], min(count, self._at_a_time - self._open)
        self._open += count
        for _ in range(count):
            calls.append(frame(_HEADERS, _END_HEADERS, self._stream, self._block))
            calls.append(frame(_DATA, _END_STREAM, self._stream, _EMPTY_MESSAGE))
            self._stream += 2
        self._unsent += b"".join(calls)
        self.send()


class _Flood:
    """Many connections to one server.

    Args:
        address: host and port.
        path: path of the method.
        at_a_time: largest number of open calls of each connection.
    """

    def __init__(self, address: tuple[str, int], path: str, at_a_time: int) -> None:
        self._address, self._path, self._at_a_time = address, path, at_a_time
        self._poll = select.epoll()
        self._open: dict[int, _Connection] = {}
        self._ended = self.lost = 0

    def connect(self) -> None:
        """Opens one more connection."""
        made = _Connection(self._address, self._path, self._at_a_time)
        self._open[made.socket.fileno()] = made
        self._poll.register(made.socket, select.EPOLLIN)

    @property
    def ended(self) -> int:
        """Calls that have ended."""
        return self._ended + sum(connection.ended for connection in self._open.values())

    def run(self, rate: float, until: float) -> None:
        """Makes this many calls a second, until a time of the monotonic clock. It works in rounds of 10 ms."""
        began, made = time.monotonic(), 0
        while (now := time.monotonic()) < until:
            due = int((now - began) * rate) - made
            made += due
            each, more = divmod(due, len(self._open))
            for number, (descriptor, connection) in enumerate([*self._open.items()]):
                if count := each + (number < more):
                    self._use(descriptor, connection, count)
            self._open = dict([*islice(self._open.items(), more, None), *islice(self._open.items(), more)])
            for descriptor, _ in self._poll.poll(max(0.0, now + _ROUND_S - time.monotonic())):
                self._use(descriptor, self._open[descriptor], 0)

    def close(self) -> None:
        """Closes all connections."""
        for connection in self._open.values():
            connection.socket.close()

    def _use(self, descriptor: int, connection: _Connection, calls: int) -> None:
        try:
            connection.receive()
            connection.call(calls)
        except OSError:
            self.lost += 1
            self._ended += connection.ended
            self._poll.unregister(descriptor)
            self._open.pop(descriptor).socket.close()
            self.connect()


@dataclass
class Flood:
    """A flood in progress.

    Attributes:
        ended: calls that the server has answered or refused. Set at its end.
        lost: connections that the server has closed. Set at its end.
    """

    ended: int = 0
    lost: int = 0


@contextmanager
def flooding(
    address: str, path: str, *, connections: int, at_a_time: int, rate: float, seconds: float, core: int | None = None
) -> Iterator[Flood]:
    """Floods a server in the block; afterwards the result has the counts.

    Args:
        address: host:port of a gRPC server.
        path: path of the method, such as "/shoal.v1.Jobs/List". Its request is empty.
        connections: number of connections.
        at_a_time: largest number of open calls of each connection.
        rate: calls a second, of all connections together.
        seconds: length of the flood.
        core: core that it runs on; None means any.
    """
    command = [
        sys.executable,
        "-m",
        "support.faults.flood",
        address,
        path,
        *map(str, (connections, at_a_time, rate, seconds)),
    ]
    process = subprocess.Popen(
        [*command, *(() if core is None else (str(core),))],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    result = Flood()
    try:
        assert process.stdout
        assert process.stdout.readline() == "flooding\n"
        yield result
        output, _ = process.communicate(timeout=seconds + 60)
        counts = json.loads(output)
        result.ended, result.lost = counts["ended"], counts["lost"]
    finally:
        process.kill()
        process.wait()


def main(address: str, path: str, *numbers: str) -> None:
    """Floods a server, and writes what happened to standard output."""
    connections, at_a_time, rate, seconds, *core = map(float, numbers)
    if core:
        os.sched_setaffinity(0, {int(core[0])})
    os.nice(10)  # a probe on the same core must not wait for this process
    host, _, port = address.rpartition(":")
    running = _Flood((host, int(port)), path, int(at_a_time))
    for _ in range(int(connections)):
        running.connect()
    print("flooding", flush=True)
    running.run(rate, time.monotonic() + seconds)
    print(json.dumps({"ended": running.ended, "lost": running.lost}))
    running.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
