"""TLS on lanes: a byte stream that encrypts with Python's `ssl`, and the security that puts it on a connection."""

import math
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from shoal import _rpc, errors
from shoal._security import NO_TLS, Credentials, Principal, explained
from shoal._transport.connection import ByteStream
from shoal._transport.handshake import Security
from shoal._transport.pieces import rest
from shoal._wire import Buffer

if TYPE_CHECKING:
    from shoal._security.tls import TlsFiles

# Bytes of one write to `ssl`, which encrypts them without the GIL. A stalled peer is noticed after each write.
_WRITE_BYTES = 256 << 10
# Pieces below this size are copied together, because each write makes a record of its own.
_GATHERED_BYTES = 64 << 10
# A reader waits for a part of what it asks for: `ssl` already holds up to one record of it.
_WAKE_SHARE = 2
_DRAINED_BYTES = 64 << 10
# OpenSSL sends no alert to an end that does not use TLS. This alert (protocol_version) lets a lane say what is wrong.
_ALERT = b"\x15\x03\x03\x00\x02\x02\x46"
_TIMEOUT = struct.Struct("ll")
_DONT_WAIT, _WAIT_ALL = int(socket.MSG_DONTWAIT), int(socket.MSG_WAITALL)


def secured(security: Security, credentials: Credentials) -> Security:
    """Returns the security for lanes of a process: with TLS if its credentials have TLS settings."""
    return TlsSecurity(security, credentials.tls) if credentials.tls else security


class TlsSecurity:
    """Security with encryption: both ends show certificates. Credentials are those of another security.

    Args:
        inner: gives and checks the credentials of hellos, which are encrypted.
        tls: TLS settings of this process.
    """

    def __init__(self, inner: Security, tls: "TlsFiles") -> None:
        self._inner, self._tls = inner, tls

    def protect(self, stream: ByteStream, peer: str, *, accepted: bool) -> ByteStream:
        """Returns an encrypted stream. Its first use makes the TLS handshake, within the connection's limits.

        Raises:
            Unauthenticated: this process has no certificate, and cannot accept connections.
            Unreachable: the other end has closed the connection.
        """
        assert isinstance(stream, socket.socket)
        material = self._tls.current()
        context = material.lane_server if accepted else material.lane_client
        if context is None:
            raise errors.Unauthenticated("this process has no certificate; give --tls-cert and --tls-key")
        host = "" if accepted else _rpc.parse_address(peer)[0].strip("[]")
        try:
            return TlsStream(stream, context, peer, host)
        except OSError as error:
            raise errors.Unreachable(f"the lane to {peer} broke: {error}", address=peer) from None

    def credential(self) -> bytes:
        return self._inner.credential()

    def identify(self, credential: bytes, peer: str) -> Principal | None:
        return self._inner.identify(credential, peer)


class TlsStream:
    """An encrypted stream with the socket methods that a connection uses.

    Timeouts raise BlockingIOError, as they do on a socket with a timeout of the kernel.

    Args:
        connection: a connected socket; the stream owns it.
        context: context of this end.
        peer: the other end, for messages.
        host: host whose certificate the other end must show. Empty if this end has accepted the connection.
    """

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, peer: str, host: str) -> None:
        self._peer, self._accepted = peer, not host
        # Seconds that a call may wait; 0 means no limit, as for the kernel.
        self._timeout_s = _seconds(connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEOUT.size))
        self._socket = context.wrap_socket(
            connection, server_side=self._accepted, server_hostname=host or None, do_handshake_on_connect=False
        )
        self._socket.settimeout(self._timeout_s or None)
        # Held while `ssl` uses the socket. `close` takes it, so that the descriptor is not reused under a call.
        self._use = threading.Lock()
        # MSG_DONTWAIT has no effect on a Python socket with a timeout.
        self._arrivals = select.poll()
        self._arrivals.register(self._socket, select.POLLIN)
        self._greeted = False  # whether the TLS handshake is complete
        self._begun: memoryview | None = None  # a write that timed out, which `ssl` must get again

    def fileno(self) -> int:
        return self._socket.fileno()

    def pending(self) -> int:
        """Returns the number of decrypted bytes that no call has read yet. `poll` does not see them."""
        return self._socket.pending() if self._greeted else 0

    def setsockopt(self, level: int, option: int, value: int | bytes, /) -> None:
        if (level, option) == (socket.SOL_SOCKET, socket.SO_RCVTIMEO):
            assert isinstance(value, bytes)
            self._timeout_s = _seconds(value)
            self._socket.settimeout(self._timeout_s or None)
        elif (level, option) == (socket.SOL_SOCKET, socket.SO_RCVLOWAT):
            assert isinstance(value, int)
            self._socket.setsockopt(level, option, max(1, value // _WAKE_SHARE))
        elif (level, option) != (socket.SOL_SOCKET, socket.SO_SNDTIMEO):  # one timeout serves both directions
            self._socket.setsockopt(level, option, value)

    def sendmsg(self, buffers: Iterable[Buffer], /) -> int:
        """Sends buffers. After BlockingIOError, the next call must begin with the same bytes."""
        with self._use:
            self._greet()
            sent = 0
            begun, self._begun = self._begun, None
            for chunk in _chunks(buffers, begun):
                try:
                    self._socket.send(chunk)
                except TimeoutError:
                    self._begun = chunk
                    if sent:
                        return sent
                    raise BlockingIOError from None
                sent += len(chunk)
            return sent

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0, /) -> int:
        with self._use:
            self._greet()
            if flags & _DONT_WAIT and not (self._socket.pending() or self._arrivals.poll(0)):
                raise BlockingIOError
            return self._receive(buffer, nbytes)

    def recvmsg_into(
        self, buffers: Iterable[memoryview], _size: int = 0, flags: int = 0, /
    ) -> tuple[int, list[object], int, None]:
        """Fills the buffers, with MSG_WAITALL completely unless the time is over or the other end closes."""
        give_up = time.monotonic() + (self._timeout_s or math.inf)
        received = 0
        with self._use:
            self._greet()
            for buffer in buffers:
                begin = 0
                while begin < len(buffer):
                    try:
                        count = self._receive(buffer[begin:], 0)
                    except BlockingIOError:
                        if received:
                            return received, [], 0, None
                        raise
                    received, begin = received + count, begin + count
                    if not count or not flags & _WAIT_ALL or time.monotonic() > give_up:
                        return received, [], 0, None
        return received, [], 0, None

    def shutdown(self, how: int, /) -> None:
        # Not the method of SSLSocket: it goes back to plain text, in which another thread could then send.
        socket.socket.shutdown(self._socket, how)

    def close(self) -> None:
        """Closes the socket, after the call in progress, if there is one. `shutdown` ends this call."""
        with suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)
        with self._use:
            self._socket.close()

    def _receive(self, buffer: memoryview, nbytes: int) -> int:
        try:
            return self._socket.recv_into(buffer, nbytes)
        except TimeoutError:
            raise BlockingIOError from None

    def _greet(self) -> None:
        """Makes the TLS handshake at the first use.

        Raises:
            Unauthenticated: the other end shows no certificate that this end accepts, refuses this one's, or does not
                use TLS.
            BlockingIOError: it takes too long.
        """
        if self._greeted:
            return
        try:
            self._socket.do_handshake()
        except TimeoutError:
            raise BlockingIOError from None
        except ssl.SSLError as error:
            if self._accepted:
                self._refuse(uses_tls=error.reason not in NO_TLS)
            raise _failure(self._peer, error, accepted=self._accepted) from None
        self._greeted = True

    def _refuse(self, *, uses_tls: bool) -> None:
        """Ends the connection after the TLS alert, and reads what the other end has sent, so that no reset follows."""
        with suppress(OSError):
            if not uses_tls:
                socket.socket.send(self._socket, _ALERT)
            socket.socket.shutdown(self._socket, socket.SHUT_WR)
            socket.socket.recv(self._socket, _DRAINED_BYTES, socket.MSG_DONTWAIT)


def _chunks(buffers: Iterable[Buffer], begun: memoryview | None) -> Iterator[memoryview]:
    """Yields the bytes of buffers in chunks for `ssl`: small pieces together, large ones in parts.

    Args:
        buffers: the buffers.
        begun: their first bytes, if these are a chunk of their own.
    """
    if begun:
        yield begun
        buffers = rest(list(buffers), len(begun))
    gathered = bytearray()
    for buffer in buffers:
        if len(buffer) < _GATHERED_BYTES:
            gathered += buffer
            if len(gathered) < _WRITE_BYTES:
                continue
        if gathered:
            yield memoryview(gathered)
            gathered = bytearray()
        if len(buffer) >= _GATHERED_BYTES:
            view = memoryview(buffer)
            yield from (view[begin : begin + _WRITE_BYTES] for begin in range(0, len(view), _WRITE_BYTES))
    if gathered:
        yield memoryview(gathered)


def _seconds(timeout: bytes) -> float:
    """Returns the seconds of a timeout of the kernel."""
    seconds, microseconds = _TIMEOUT.unpack(timeout)
    return float(seconds + microseconds / 1e6)


def _failure(peer: str, error: ssl.SSLError, *, accepted: bool) -> errors.Unauthenticated:
    """Returns the error of a TLS handshake that failed on a lane."""
    what = explained(error)
    return errors.Unauthenticated(f"no TLS with {peer}{' as its server' if accepted else ''}: {what}", address=peer)


__all__ = ["TlsSecurity", "TlsStream", "secured"]
