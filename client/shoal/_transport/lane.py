"""Lanes: connections on stream sockets, which carry frames at a fraction of the cost of a gRPC call.

This module defines the bytes of a frame. `shoal._transport.lane_socket` has the socket below it, and
`shoal._transport.frames` the kinds of frame of a parameter server.
"""

import enum
import math
import socket
import struct
import time
from collections.abc import Iterable, Sequence

from shoal import errors
from shoal._transport.connection import Connection, Frames
from shoal._transport.lane_socket import MAX_PIECES, SHORTEST_TIMEOUT_S, STALL_S, LaneSocket, OnData, SpinTime
from shoal._transport.pieces import rest
from shoal._wire import Buffer
from shoal._wire.limits import CHUNK_BYTES, MAX_MESSAGE_BYTES

_HEADER = struct.Struct("<B3sI")
_RESERVED = bytes(3)
# Bytes of one system call: with fewer and larger ones, both ends sleep and wake less often.
BATCH_BYTES = 4 << 20
# Of the first one, if the other end may answer that it must wait: only the header of a push.
_FIRST_BATCH_BYTES = 1


class Lane(LaneSocket, Connection):
    """One end of a lane.

    Args:
        connection: a connected socket; the lane owns it.
        peer: how messages name the other end; host:port if the socket is TCP.
        frames: the kinds of frame on this port.
        stall_s: seconds without progress after which a transfer fails.
        spin_s: returns how long it may poll now for a frame that is likely to come soon, in seconds. Default: SPIN_S.
    """

    def __init__(
        self, connection: socket.socket, peer: str, frames: Frames, *, stall_s: float = STALL_S, spin_s: SpinTime = None
    ) -> None:
        super().__init__(connection, peer, stall_s=stall_s, spin_s=spin_s)
        self.frames, self.identity = frames, None
        self._kinds, self._streamed = frames.by_number, frames.streamed
        self._end_frame = _HEADER.pack(frames.end, _RESERVED, 0)
        self.left = 0
        self._last: enum.IntEnum | None = None  # kind of the last frame that began
        self._spins_after: set[enum.IntEnum | None] = set()  # kinds after which the other end's next frame came soon

    @classmethod
    def connect(cls, host: str, port: int, frames: Frames, *, timeout_s: float, stall_s: float = STALL_S) -> "Lane":
        """Opens a lane.

        Args:
            host: name or address of the host.
            port: its port.
            frames: the kinds of frame on this port.
            timeout_s: seconds until the connection is accepted.
            stall_s: seconds without progress after which a transfer fails.

        Returns:
            The lane.

        Raises:
            Unreachable: the connection was not accepted in time.
        """
        peer = f"{host}:{port}"
        give_up = time.monotonic() + timeout_s
        failure: object = "its name has no address"
        try:
            for family, kind, protocol, _, address in socket.getaddrinfo(host.strip("[]"), port, 0, socket.SOCK_STREAM):
                connection = socket.socket(family, kind, protocol)
                try:
                    connection.settimeout(max(give_up - time.monotonic(), SHORTEST_TIMEOUT_S))
                    connection.connect(address)
                    return cls(connection, peer, frames, stall_s=stall_s)
                except OSError as error:
                    failure = str(error)
                    connection.close()
        except OSError as error:
            failure = error
        raise errors.Unreachable(f"no lane to {peer}: {failure}", address=peer)

    def send(self, kind: enum.IntEnum, pieces: Sequence[Buffer] = (), *, end: bool = False) -> None:
        waiting = _frame(kind, pieces)
        if end:
            waiting.append(self._end_frame)
        self._send(waiting, kind)

    def stream(
        self,
        kind: enum.IntEnum,
        payloads: Iterable[Sequence[Buffer]],
        *,
        end: bool = True,
        at_once: bool = False,
        within_s: float = math.inf,
        on_data: OnData = None,
    ) -> None:
        give_up = time.monotonic() + within_s
        waiting: list[Buffer] = []
        size, batch = 0, _FIRST_BATCH_BYTES if on_data else BATCH_BYTES
        for pieces in payloads:
            frame = _frame(kind, pieces)
            waiting += frame
            size += sum(map(len, frame))
            if at_once or size >= batch or len(waiting) >= MAX_PIECES:
                goes_on = self._send(waiting, kind, give_up, on_data)
                waiting, size, batch = [], 0, min(max(2 * batch, CHUNK_BYTES), BATCH_BYTES)
                if not goes_on:
                    on_data = None
                    break
        if end:
            waiting.append(self._end_frame)
        self._send(waiting, kind, give_up, on_data)

    def receive(
        self, *, within_s: float | None = None, most: int = MAX_MESSAGE_BYTES
    ) -> tuple[enum.IntEnum, memoryview]:
        return self.begin(within_s=within_s, most=most), self.payload()

    def begin(self, *, within_s: float | None = None, most: int = MAX_MESSAGE_BYTES) -> enum.IntEnum:
        assert not self.left, "the last frame's payload was not read"
        if self._begin == self._end:
            last = self._last
            spins = last in self._spins_after
            if self._read_first(within_s, spins=spins):
                if not spins and last not in self._streamed:  # in this order: each look into a set hashes the kind
                    self._spins_after.add(last)
            elif spins:
                self._spins_after.discard(last)
        self._fill_buffer(_HEADER.size)
        header = self._buffer[self._begin : self._begin + _HEADER.size]
        number, reserved, size = _HEADER.unpack(header)
        kind = self._kinds.get(number)
        if kind is None or reserved != _RESERVED:
            raise self._bad(f"sent bytes that are not a frame: {bytes(header)!r}")
        if size > most:
            raise self._bad(f"sent a frame of {size} bytes; the limit is {most}")
        self._begin += _HEADER.size
        self.left = size
        self._last = kind
        return kind

    def peek(self, size: int) -> memoryview:
        size = min(size, self.left)
        self._fill_buffer(size)
        return self._buffer[self._begin : self._begin + size]

    def payload(self) -> memoryview:
        payload = self.peek(self.left)
        self._begin += len(payload)
        self.left = 0
        return payload

    def fill(self, skip: int, targets: Sequence[memoryview]) -> None:
        # The kernel writes the payload to its destination, except for the part that is already in the buffer.
        self._begin += skip
        missing = self.left - skip
        ready = self._buffer[self._begin : min(self._end, self._begin + missing)]
        waiting = list(targets)
        while ready and waiting:
            count = min(len(ready), len(waiting[0]))
            waiting[0][:count] = ready[:count]
            ready = ready[count:]
            waiting = rest(waiting, count)
            self._begin += count
            missing -= count
        assert missing == sum(map(len, waiting)), "the targets are not of the payload's size"
        self._read_all(waiting, missing)
        self.left = 0

    def _bad(self, what: str) -> errors.BadFrame:
        self.close()
        return errors.BadFrame(f"{self.peer} {what}", address=self.peer)


def _frame(kind: enum.IntEnum, pieces: Sequence[Buffer]) -> list[Buffer]:
    return [_HEADER.pack(kind, _RESERVED, sum(map(len, pieces))), *pieces]


__all__ = ["Lane"]
