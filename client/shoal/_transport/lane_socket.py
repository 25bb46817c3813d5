"""The socket of a lane: reads, which poll briefly before they block, and writes. A timeout or a failure closes it.

It has the buffer of received bytes, and does not know what the bytes mean: `shoal._transport.lane` has the frames.
"""

import enum
import math
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress

from shoal import errors
from shoal._transport.connection import ByteStream
from shoal._transport.pieces import first, rest
from shoal._wire import Buffer

_DONT_WAIT, _WAIT_ALL = int(socket.MSG_DONTWAIT), int(socket.MSG_WAITALL)  # an enum's operators take a microsecond
# Seconds after which a transfer without progress fails, which closes the lane. A call may wait for its answer longer.
STALL_S = 30.0
# A reader detects within about 30 seconds that the other host has vanished.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
# With these options, an end that sends nothing detects that within 4 s. The kernel sends a probe when nothing has
# arrived for a second, and each second after that.
LOSS_S = 4.0
_FAST_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 1,
    socket.TCP_KEEPINTVL: 1,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: int(LOSS_S * 1000),  # also if the other end's kernel has not confirmed the last frame
}
SHORTEST_TIMEOUT_S = 0.001  # the kernel takes 0 for no timeout
_FIRST_BUFFER = 1 << 16  # bytes; grows with the received messages
# Sleeping and waking takes longer than a small call. If the other end answered within this time before, a client polls
# for as long before it sleeps, and yields the core between two polls. Longer steps cost nothing more. A server polls
# for less time, and only if it serves one client (`Listener`).
SPIN_S, SERVER_SPIN_S = 0.002, 0.0005
# Within a large payload, a reader is woken once for this many bytes, not for each packet, because waking it costs the
# sender's time.
_WAKE_BYTES = 128 << 10
MAX_PIECES = 512  # buffers of one system call; the kernel accepts 1,024
# What an end that uses TLS answers to other bytes.
_TLS_ALERT = b"\x15\x03"
_USES_TLS = "the other end uses TLS; give this process --tls-ca, --tls-cert and --tls-key (or SHOAL_TLS_CA, ...)"
# Called when the other end has sent something meanwhile; returns whether to send what is left.
OnData = Callable[[], bool] | None
SpinTime = Callable[[], float] | None


class LaneSocket:
    """The socket of one end of a lane, with the bytes that it has received.

    Args:
        connection: a connected socket, which this object owns.
        peer: how messages name the other end; host:port if the socket is TCP.
        stall_s: seconds without progress after which a transfer fails.
        spin_s: returns how long it may poll now for data that are likely to come soon, in seconds. Default: SPIN_S.
    """

    def __init__(
        self, connection: socket.socket, peer: str, *, stall_s: float = STALL_S, spin_s: SpinTime = None
    ) -> None:
        self.peer = peer
        self._spin_s = spin_s or (lambda: SPIN_S)
        self._socket: ByteStream = connection
        self._is_tcp = connection.family != socket.AF_UNIX
        # Returns the bytes that an encrypted stream holds, which `poll` does not see.
        self._pending: Callable[[], int] = int
        self._stall_s = stall_s
        self._limit_s, self._give_up = math.inf, math.inf  # see `limit`
        self._closed = False
        # Received bytes that were not read yet: bytes [_begin, _end) of the buffer.
        self._buffer = memoryview(bytearray(_FIRST_BUFFER))
        self._begin = self._end = 0
        connection.setblocking(True)
        self._set_timeout(stall_s)
        if not self._is_tcp:
            return  # the kernel reports the end of a process on this host
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    @property
    def closed(self) -> bool:
        return self._closed

    def fileno(self) -> int:
        return self._socket.fileno()

    def secure(self, protect: Callable[[ByteStream], ByteStream]) -> None:
        self._socket = protect(self._socket)
        self._pending = getattr(self._socket, "pending", int)

    def detect_loss(self) -> None:
        if not self._is_tcp:
            return
        try:
            for option, value in _FAST_KEEPALIVE.items():
                self._socket.setsockopt(socket.IPPROTO_TCP, option, value)
        except OSError as error:
            raise self._broken(error) from None

    def limit(self, within_s: float | None) -> None:
        if within_s is None:
            self._limit_s = self._give_up = math.inf
            if self._timeout_s != self._stall_s:
                self._set_timeout(self._stall_s)
        else:
            self._limit_s, self._give_up = within_s, time.monotonic() + within_s

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):  # the other end closed it first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send(
        self, waiting: list[Buffer], kind: enum.IntEnum, give_up: float = math.inf, on_data: OnData = None
    ) -> bool:
        """Sends buffers; returns what `on_data` has returned, or True."""
        goes_on = True
        while waiting:
            if on_data and goes_on and self._readable(0.0):
                goes_on = on_data()
            if time.monotonic() > give_up:
                self.close()
                raise errors.DeadlineExceeded(f"{self.peer} reads {kind.name} frames too slowly", address=self.peer)
            self._keep_limit()
            try:
                sent = self._socket.sendmsg(waiting[:MAX_PIECES])
            except BlockingIOError:
                if on_data and goes_on and self._readable(0.0):
                    continue
                raise self._stalled(f"has read nothing of a {kind.name} frame for") from None
            except OSError as error:
                raise self._broken(error) from None
            waiting = rest(waiting, sent)
        return goes_on

    def _read_first(self, within_s: float | None, *, spins: bool) -> bool:
        """Waits for the first bytes of a frame, and reads all available ones: small frames arrive several at once.

        The buffer must be empty.

        Args:
            within_s: seconds until they arrive; None means no limit.
            spins: whether to poll for a short time before the thread sleeps.

        Returns:
            Whether they arrived within this short time.
        """
        self._begin = self._end = 0
        begun, spin_s = time.monotonic(), self._spin_s()
        if spins and self._spin(begun + spin_s):
            return True
        if within_s is not None and within_s < self._stall_s and not self._readable(within_s):
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
            self._end += self._checked(count)
        return time.monotonic() - begun < spin_s

    def _spin(self, until: float) -> bool:
        """Polls the socket until data arrive or the time is over. Returns whether data arrived."""
        while time.monotonic() < until:
            try:
                count = self._socket.recv_into(self._buffer, _FIRST_BUFFER, _DONT_WAIT)
            except BlockingIOError:
                os.sched_yield()
                continue
            except OSError as error:
                raise self._broken(error) from None
            self._end += self._checked(count)
            return True
        return False

    def _readable(self, within_s: float) -> bool:
        """Returns whether data arrive within `within_s`, which is shorter than the kernel's timeout."""
        if self._begin < self._end or self._pending():
            return True
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(within_s * 1000))
        except (OSError, ValueError) as error:  # closed meanwhile
            raise self._broken(error) from None

    def _fill_buffer(self, size: int) -> None:
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

    def _read_all(self, targets: list[memoryview], size: int) -> None:
        """Waits until all these buffers are full. Their size in bytes is `size`."""
        if size > 2 * _WAKE_BYTES:
            # The last part is excluded: it may have fewer bytes than the wake-up size.
            most = size - _WAKE_BYTES
            most_targets = first(targets, most)
            self._wake_for(_WAKE_BYTES)
            while most_targets:
                most_targets = rest(most_targets, self._read(most_targets))
            self._wake_for(1)
            targets = rest(targets, most)
        while targets:
            targets = rest(targets, self._read(targets))

    def _wake_for(self, nbytes: int) -> None:
        """Sets how many bytes must arrive before the kernel wakes a reader."""
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
        except OSError as error:  # closed meanwhile
            raise self._broken(error) from None

    def _read(self, targets: list[memoryview]) -> int:
        """Waits until these buffers are full, in one system call. Returns the bytes that were read."""
        self._keep_limit()
        try:
            return self._checked(self._socket.recvmsg_into(targets[:MAX_PIECES], 0, _WAIT_ALL)[0])
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
            self._set_timeout(max(left, SHORTEST_TIMEOUT_S))

    def _checked(self, count: int) -> int:
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
