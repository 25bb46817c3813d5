"""Lanes as raw bytes: a tap between clients and a server's lanes, whole frames, and regions of shared memory.

A tap forwards the bytes in both directions and records them.
"""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from shoal._transport.segment import Segment
from shoal.v1 import parameter_server_pb2 as pb
from support.recordings.conversation import END, HEADER, HELLO, PULL, PUSH, LaneTurn, Side


class LaneTap:
    """A socket between clients and a server's lanes; `close` ends it.

    Args:
        name: name of the server.
        address: address of its lanes.
        names: receives the stand-ins for a segment's name and nonce.
        note: called with each turn, frame by frame.
    """

    def __init__(
        self, name: str, address: str, names: dict[str | bytes, str | bytes], note: Callable[[LaneTurn], None]
    ) -> None:
        self._name = name
        host, _, port = address.rpartition(":")
        self._upstream = host, int(port)
        self._names, self._note = names, note
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._acceptor = threading.Thread(target=self._accept, name="lane-tap")
        self._acceptor.start()

    def _accept(self) -> None:
        pumps = []
        lane = 0
        with suppress(OSError):  # closed
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(self._upstream)
                self._sockets += [client, server]
                state = _LaneState(f"{self._name}/{lane}", self._names, self._note)
                for side, source, target in (("client", client, server), ("server", server, client)):
                    pumps.append(threading.Thread(target=state.pump, args=(side, source, target)))
                    pumps[-1].start()
                lane += 1
        for pump in pumps:
            pump.join()

    def close(self) -> None:
        for each in (self._listener, *self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        for each in (self._listener, *self._sockets):
            each.close()


class _LaneState:
    """One lane that passes through a tap: its shared memory, and the region of the current call."""

    def __init__(self, lane: str, names: dict[str | bytes, str | bytes], note: Callable[[LaneTurn], None]) -> None:
        self._lane, self._names, self._note = lane, names, note
        self._memory: SlotMemory | None = None
        self._slot = 0

    def pump(self, side: Side, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError, EOFError):
            while True:
                kind, data = read_frame(source)
                self._take_down(side, kind, data)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        if side == "client" and self._memory:
            self._memory.close()

    def _take_down(self, side: Side, kind: int, data: bytes) -> None:
        slot, memory, payload = 0, b"", data[HEADER.size :]
        if kind == HELLO:
            hello = pb.LaneHello.FromString(payload)
            if hello.HasField("segment"):
                self._memory = SlotMemory(hello.segment)
                self._names |= {hello.segment.name: "shoal-" + "0" * 32, hello.segment.nonce: bytes(16)}
        elif kind == PULL:
            self._slot = pb.PullRequest.FromString(payload).region
        elif kind == PUSH:
            slot = pb.PushRequest.FromString(payload).header.region
        elif kind == END and side == "server":
            slot, self._slot = self._slot, 0
        if slot and self._memory:
            memory = self._memory.read(slot)
        self._note(LaneTurn(self._lane, side, data, slot, memory))


class SlotMemory:
    """The regions of a segment that a client has offered, as a server sees them."""

    def __init__(self, said: pb.Segment) -> None:
        self._slot_bytes = said.region_bytes
        self._segment = Segment.open(said.name, said.regions * said.region_bytes, said.nonce)

    def read(self, slot: int) -> bytes:
        return bytes(self._segment.view((slot - 1) * self._slot_bytes, self._slot_bytes))

    def close(self) -> None:
        self._segment.close()


def read_frame(source: socket.socket) -> tuple[int, bytes]:
    """Returns a whole frame with its header. Raises EOFError if there is none."""
    header = read_exactly(source, HEADER.size)
    kind, _, size = HEADER.unpack(header)
    return kind, header + read_exactly(source, size)


def read_exactly(source: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = source.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data
