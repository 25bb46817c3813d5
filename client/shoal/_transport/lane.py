"""Lanes: connections on stream sockets, which carry frames at a fraction of the cost of a gRPC call.

This module defines the bytes of a frame, and how both ends wait, time out and close. `shoal._transport.frames` has the
kinds of frame of a parameter server.
"""

import enum
import math
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from shoal import errors
from shoal._transport.connection import ByteStream, Connection, Frames
from shoal._transport.pieces import first, rest
from shoal._wire import Buffer
from shoal._wire.limits import CHUNK_BYTES, MAX_MESSAGE_BYTES

_HEADER = struct.Struct("<B3sI")
_RESERVED = bytes(3)
_DONT_WAIT, _WAIT_ALL = int(socket.MSG_DONTWAIT), int(socket.MSG_WAITALL)  # an enum's operators take a microsecond
# Seconds after which a transfer without progress fails, which closes the lane. A call may wait for its answer longer.
STALL_S = 30.0
# A reader detects within about 30 seconds that the other host has vanished.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
_SHORTEST_TIMEOUT_S = 0.001  # the kernel takes 0 for no timeout
_FIRST_BUFFER = 1 << 16  # bytes; grows with the received messages
# Sleeping and waking takes longer than a small call. If the other end answered within this time before, a client polls
# for as long before it sleeps, and yields the core between two polls. Longer steps cost nothing more. A server polls
# for less time, and only if it serves one client (`Listener`).
BRIEF_S, SERVER_BRIEF_S = 0.002, 0.0005
# Within a large payload, a reader is woken once for this many bytes, not for each packet, because waking it costs the
# sender's time.
_WAKE_BYTES = 128 << 10
_MAX_PIECES = 512  # buffers of one system call; the kernel accepts 1,024
# Bytes of one system call: with fewer and larger ones, both ends sleep and wake less often.
BATCH_BYTES = 4 << 20
# Of the first one, if the other end may answer that it must wait: only the header of a push.
_FIRST_BATCH_BYTES = 1
# What an end that uses TLS answers to other bytes.
_TLS_ALERT = b"\x15\x03"
_USES_TLS = "the other end uses TLS; give this process --tls-ca, --tls-cert and --tls-key (or SHOAL_TLS_CA, ...)"
_Heed = Callable[[], bool] | None
_Brief = Callable[[], float] | None


class Lane(Connection):
    """One end of a lane.

    Args:
        connection: a connected socket; the lane owns it.
        peer: how messages name the other end; host:port if the socket is TCP.
        frames: the kinds of frame on this port.
        stall_s: seconds without progress after which a transfer fails.
        brief_s: returns how long it may poll now for a frame that is likely to come soon, in seconds. Default: BRIEF_S.
    """

    def __init__(
        self, connection: socket.socket, peer: str, frames: Frames, *, stall_s: float = STALL_S, brief_s: _Brief = None
    ) -> None:
        self.peer, self.frames, self.identity = peer, frames, None
        self._brief_s = brief_s or (lambda: BRIEF_S)
        self._kinds, self._streamed = frames.by_number, frames.streamed
        self._end_frame = _HEADER.pack(frames.end, _RESERVED, 0)
        self._socket: ByteStream = connection
        # Returns the bytes that an encrypted stream holds, which `poll` does not see.
        self._pending: Callable[[], int] = int
        self._stall_s = stall_s
        self._limit_s, self._give_up = math.inf, math.inf  # see `limit`
        self._closed = False
        # Received bytes that were not read yet: bytes [_begin, _end) of the buffer.
        self._buffer = memoryview(bytearray(_FIRST_BUFFER))
        self._begin = self._end = 0
        self.left = 0
        self._last: enum.IntEnum | None = None  # kind of the last frame that began
        self._brief: set[enum.IntEnum | None] = set()  # kinds after which the other end's next frame came soon
        connection.setblocking(True)
        self._set_timeout(stall_s)
        if connection.family == socket.AF_UNIX:
            return  # the kernel reports the end of a process on this host
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    @classmethod
    def connect(cls, host: str, port: int, frames: Frames, *, timeout_s: float) -> "Lane":
        """Opens a lane.

        Args:
            host: name or address of the host.
            port: its port.
            frames: the kinds of frame on this port.
            timeout_s: seconds until the connection is accepted.

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
                    connection.settimeout(max(give_up - time.monotonic(), _SHORTEST_TIMEOUT_S))
                    connection.connect(address)
                    return cls(connection, peer, frames)
                except OSError as error:
                    failure = str(error)
                    connection.close()
        except OSError as error:
            failure = error
        raise errors.Unreachable(f"no lane to {peer}: {failure}", address=peer)

    @property
    def closed(self) -> bool:
        return self._closed

    def fileno(self) -> int:
        return self._socket.fileno()

    def secure(self, protect: Callable[[ByteStream], ByteStream]) -> None:
        self._socket = protect(self._socket)
        self._pending = getattr(self._socket, "pending", int)

    def limit(self, within_s: float | None) -> None:
        if within_s is None:
            self._limit_s = self._give_up = math.inf
            if self._timeout_s != self._stall_s:
                self._set_timeout(self._stall_s)
        else:
            self._limit_s, self._give_up = within_s, time.monotonic() + within_s

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
        heed: _Heed = None,
    ) -> None:
        give_up = time.monotonic() + within_s
        waiting: list[Buffer] = []
        size, batch = 0, _FIRST_BATCH_BYTES if heed else BATCH_BYTES
        for pieces in payloads:
            frame = _frame(kind, pieces)
            waiting += frame
            size += sum(map(len, frame))
            if at_once or size >= batch or len(waiting) >= _MAX_PIECES:
                goes_on = self._send(waiting, kind, give_up, heed)
                waiting, size, batch = [], 0, min(max(2 * batch, CHUNK_BYTES), BATCH_BYTES)
                if not goes_on:
                    heed = None
                    break
        if end:
            waiting.append(self._end_frame)
        self._send(waiting, kind, give_up, heed)

    def _send(self, waiting: list[Buffer], kind: enum.IntEnum, give_up: float = math.inf, heed: _Heed = None) -> bool:
        """Sends buffers; returns what `heed` has returned, or True."""
        goes_on = True
        while waiting:
            if heed and goes_on and self._speaks(0.0):
                goes_on = heed()
            if time.monotonic() > give_up:
                self.close()
                raise errors.DeadlineExceeded(f"{self.peer} reads {kind.name} frames too slowly", address=self.peer)
            self._keep_limit()
            try:
                sent = self._socket.sendmsg(waiting[:_MAX_PIECES])
            except BlockingIOError:
                if heed and goes_on and self._speaks(0.0):
                    continue
                raise self._stalled(f"has read nothing of a {kind.name} frame for") from None
            except OSError as error:
                raise self._broken(error) from None
            waiting = rest(waiting, sent)
        return goes_on

    def receive(
        self, *, within_s: float | None = None, most: int = MAX_MESSAGE_BYTES
    ) -> tuple[enum.IntEnum, memoryview]:
        return self.begin(within_s=within_s, most=most), self.payload()

    def begin(self, *, within_s: float | None = None, most: int = MAX_MESSAGE_BYTES) -> enum.IntEnum:
        assert not self.left, "the last frame's payload was not read"
        if self._begin == self._end:
            self._begin = self._end = 0
            self._read_some(within_s)
        self._have(_HEADER.size)
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
        self._have(size)
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
        if missing > 2 * _WAKE_BYTES:
            # The last part is excluded: it may have fewer bytes than the wake-up size.
            most = missing - _WAKE_BYTES
            self._wake_for(_WAKE_BYTES)
            self._read_all(first(waiting, most))
            self._wake_for(1)
            waiting = rest(waiting, most)
        self._read_all(waiting)
        self.left = 0

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):  # the other end closed it first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read_some(self, within_s: float | None) -> None:
        """Waits for the first bytes of a frame, and reads all available ones: small frames arrive several at once."""
        begun, brief_s = time.monotonic(), self._brief_s()
        if self._last in self._brief and self._watch(begun + brief_s):
            return
        if within_s is not None and within_s < self._stall_s and not self._speaks(within_s):
            raise self._stalled("has sent nothing for", within_s)
        while not self._end:
            self._keep_limit()
            try:
                count = self._socket.recv_into(self._buffer, _FIRST_BUFFER)
            except BlockingIOError:
                if within_s is None or time.monotonic() - begun < within_s:
                    continue  # no deadline yet
                raise self._stalled("has sent nothing for", within_s) from None
            except OSError as error:
                raise self._broken(error) from None
            self._end += self._some(count)
        if self._last not in self._streamed and time.monotonic() - begun < brief_s:
            self._brief.add(self._last)
        else:
            self._brief.discard(self._last)

    def _watch(self, until: float) -> bool:
        """Polls the socket until data arrive or the time is over. Returns whether data arrived."""
        while time.monotonic() < until:
            try:
                count = self._socket.recv_into(self._buffer, _FIRST_BUFFER, _DONT_WAIT)
            except BlockingIOError:
                os.sched_yield()
                continue
            except OSError as error:
                raise self._broken(error) from None
            self._end += self._some(count)
            return True
        return False

    def _speaks(self, within_s: float) -> bool:
        """Returns whether data arrive within `within_s`, which is shorter than the kernel's timeout."""
        if self._begin < self._end or self._pending():
            return True
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(within_s * 1000))
        except (OSError, ValueError) as error:  # closed meanwhile
            raise self._broken(error) from None

    def _have(self, size: int) -> None:
        """Waits until the buffer holds this many bytes of the frame at `_begin`, contiguously."""
        missing = size - (self._end - self._begin)
        if missing <= 0:
            return
        if self._begin + size > len(self._buffer):
            self._move(size)
        while missing > 0:
            count = self._read([self._buffer[self._end : self._end + missing]])
            self._end += count
            missing -= count

    def _move(self, size: int) -> None:
        """Makes room for this many bytes from `_begin`, which becomes 0."""
        begun = bytes(self._buffer[self._begin : self._end])
        if size > len(self._buffer):
            self._buffer = memoryview(bytearray(size + _FIRST_BUFFER))
        self._buffer[: len(begun)] = begun
        self._begin, self._end = 0, len(begun)

    def _wake_for(self, nbytes: int) -> None:
        """Sets how many bytes must arrive before the kernel wakes a reader."""
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
        except OSError as error:  # closed meanwhile
            raise self._broken(error) from None

    def _read_all(self, targets: list[memoryview]) -> None:
        while targets:
            targets = rest(targets, self._read(targets))

    def _read(self, targets: list[memoryview]) -> int:
        """Waits until these buffers are full, in one system call. Returns the bytes that were read."""
        self._keep_limit()
        try:
            return self._some(self._socket.recvmsg_into(targets[:_MAX_PIECES], 0, _WAIT_ALL)[0])
        except BlockingIOError:
            raise self._stalled("has sent nothing for") from None
        except OSError as error:
            raise self._broken(error) from None

    def _set_timeout(self, timeout_s: float) -> None:
        """Sets after how many seconds a blocking call on the socket ends.

        The kernel applies the timeout, so that one blocking call moves a whole chunk. Python's timeout would poll.
        """
        self._timeout_s = timeout_s
        timeout = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        except OSError as error:  # closed meanwhile
            raise self._broken(error) from None

    def _keep_limit(self) -> None:
        """Ends the next blocking call at the limit, if one is set. Each call that is not the first has less time."""
        if self._give_up == math.inf:
            return
        left = self._give_up - time.monotonic()
        if left <= 0:
            self.close()
            raise errors.DeadlineExceeded(f"{self.peer} took longer than {self._limit_s:g} s", address=self.peer)
        if left < self._stall_s:
            self._set_timeout(max(left, _SHORTEST_TIMEOUT_S))

    def _some(self, count: int) -> int:
        if not count:
            begun = bytes(self._buffer[self._begin : self._end][: len(_TLS_ALERT)])
            raise self._broken(_USES_TLS if begun == _TLS_ALERT else "closed by the other end")
        return count

    # A lane that failed is closed, because the position within a frame is unknown.

    def _stalled(self, what: str, for_s: float | None = None) -> errors.DeadlineExceeded:
        self.close()
        return errors.DeadlineExceeded(
            f"{self.peer} {what} {for_s or min(self._stall_s, self._limit_s):g} s", address=self.peer
        )

    def _broken(self, why: object) -> errors.Unreachable:
        self.close()
        return errors.Unreachable(f"the lane to {self.peer} broke: {why}", address=self.peer)

    def _bad(self, what: str) -> errors.BadFrame:
        self.close()
        return errors.BadFrame(f"{self.peer} {what}", address=self.peer)


def _frame(kind: enum.IntEnum, pieces: Sequence[Buffer]) -> list[Buffer]:
    return [_HEADER.pack(kind, _RESERVED, sum(map(len, pieces))), *pieces]


__all__ = ["STALL_S", "Lane"]
