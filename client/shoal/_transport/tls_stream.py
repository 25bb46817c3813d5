"""TLS on lanes: a byte stream that encrypts with Python's `ssl`, and the `Security` that adds it to connections."""

import math
import socket
import ssl
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from shoal import errors
from shoal._security import NO_TLS, AccessRole, Credentials, Principal, explained, role_name
from shoal._transport.connection import ByteStream
from shoal._transport.handshake import Security
from shoal._transport.pieces import rest
from shoal._wire import Buffer

if TYPE_CHECKING:
    from shoal._security.tls import TlsFiles

# Bytes that `ssl` encrypts at a time, without the GIL. The other end decrypts them while this end encrypts more.
_WRITE_BYTES = 256 << 10
# Encrypted bytes that one system call reads. More take no less time, and each lane has such a buffer.
_READ_BYTES = 128 << 10
# Pieces below this size are copied together, because each write makes a record of its own.
_GATHERED_BYTES = 64 << 10
# A reader waits for a part of what it asks for: `ssl` already holds up to one record of it.
_WAKE_SHARE = 2
_DRAINED_BYTES = 64 << 10
# Alerts that OpenSSL does not send, so that the other end can say what is wrong: to an end that does not use TLS
# (protocol_version), and to one whose certificate names another role (access_denied).
_NEEDS_TLS = b"\x15\x03\x03\x00\x02\x02\x46"
_WRONG_ROLE = b"\x15\x03\x03\x00\x02\x02\x31"
_SHORTEST_TIMEOUT_S = 0.001  # 0 would mean a socket that never waits
_TIMEOUT = struct.Struct("ll")
_DONT_WAIT, _WAIT_ALL = int(socket.MSG_DONTWAIT), int(socket.MSG_WAITALL)


def secured(security: Security, credentials: Credentials, *, callers: AccessRole | None = None) -> Security:
    """Returns the security for lanes of a process: with TLS if its credentials have TLS settings.

    Args:
        security: gives and checks the credentials of hellos.
        credentials: credentials of this process.
        callers: role that certificates of accepted connections must name; see `TlsSecurity`.
    """
    return TlsSecurity(security, credentials.tls, callers=callers) if credentials.tls else security


class TlsSecurity:
    """Security with encryption: both ends show certificates. Credentials are those of another security.

    The end that opens a connection expects the certificate of a server. Like gRPC, it checks the name of the role in
    it, not the host.

    Args:
        inner: gives and checks the credentials of hellos, which are encrypted.
        tls: TLS settings of this process.
        callers: role that the certificates of the ends that open connections must name. None accepts all certificates
            of the CA, because credentials say what a caller may do.
    """

    def __init__(self, inner: Security, tls: "TlsFiles", *, callers: AccessRole | None = None) -> None:
        self._inner, self._tls, self._callers = inner, tls, callers

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
        try:
            expected = self._callers if accepted else AccessRole.SERVER
            return TlsStream(stream, context, peer, role_name(expected) if expected else "", accepted=accepted)
        except OSError as error:
            raise errors.Unreachable(f"the lane to {peer} broke: {error}", address=peer) from None

    def credential(self) -> bytes:
        return self._inner.credential()

    def identify(self, credential: bytes, peer: str) -> Principal | None:
        return self._inner.identify(credential, peer)


class TlsStream:
    """An encrypted stream with the socket methods that a connection uses.

    `ssl` reads and writes two buffers in memory, so that one system call moves many records. A call ends with
    BlockingIOError at the kernel's timeout, as on a plain lane. The socket carries only bytes that `ssl` has produced.

    Args:
        connection: a connected socket; the stream owns it.
        context: context of this end.
        peer: the other end, for messages.
        name: DNS name that the certificate of the other end must have. An end that accepts may give none.
        accepted: whether this end has accepted the connection.
    """

    def __init__(
        self, connection: socket.socket, context: ssl.SSLContext, peer: str, name: str, *, accepted: bool
    ) -> None:
        self._peer, self._name, self._accepted, self._socket = peer, name, accepted, connection
        self._received, self._encrypted = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._received, self._encrypted, server_side=accepted, server_hostname=None if accepted else name
        )
        # Seconds that a call may wait; 0 means no limit, as for the kernel.
        self._timeout_s = _seconds(connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEOUT.size))
        self._arrived = memoryview(bytearray(_READ_BYTES))  # what one system call has read
        self._greeted = False  # whether the TLS handshake is complete
        self._ended = False  # whether the other end has said that it sends nothing more
        # A chunk that a timeout interrupted: the encrypted rest, and the size of the chunk, which was not reported.
        self._unsent, self._unreported = memoryview(b""), 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def pending(self) -> int:
        """Returns the number of bytes that this end holds and no call has read yet. `poll` does not see them."""
        return self._tls.pending() + self._received.pending

    def setsockopt(self, level: int, option: int, value: int | bytes, /) -> None:
        if (level, option) == (socket.SOL_SOCKET, socket.SO_RCVTIMEO):
            assert isinstance(value, bytes)
            self._timeout_s = _seconds(value)
        elif (level, option) == (socket.SOL_SOCKET, socket.SO_RCVLOWAT):
            assert isinstance(value, int)
            value = max(1, value // _WAKE_SHARE)
        self._socket.setsockopt(level, option, value)

    def sendmsg(self, buffers: Iterable[Buffer], /) -> int:
        """Sends buffers. After BlockingIOError, or a part, the next call must begin with the bytes that were not sent.

        Returns:
            The number of bytes that were sent. It may be 0 if the timeout ended within a chunk.
        """
        if not self._greeted:
            self._greet()
        sent = 0
        try:
            if self._unreported:
                if not self._send(self._unsent):
                    return 0
                sent, self._unreported = self._unreported, 0
                buffers = rest(list(buffers), sent)
            for chunk in _chunks(buffers):
                self._tls.write(chunk)
                self._unreported = len(chunk)
                if not self._send(self._encrypted.read()):
                    break
                sent, self._unreported = sent + len(chunk), 0
        except BlockingIOError:
            if not sent:
                raise
        return sent

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0, /) -> int:
        if not self._greeted:
            self._greet()
        give_up = time.monotonic() + (self._timeout_s or math.inf)
        target = buffer[:nbytes] if nbytes else buffer
        while not (count := self._decrypt(target)) and self._fetch(give_up, flags):
            pass
        return count

    def recvmsg_into(
        self, buffers: Iterable[memoryview], _size: int = 0, flags: int = 0, /
    ) -> tuple[int, list[object], int, None]:
        """Fills the buffers, with MSG_WAITALL completely unless the time is over or the other end closes."""
        if not self._greeted:
            self._greet()
        give_up = time.monotonic() + (self._timeout_s or math.inf)
        received = 0
        try:
            for buffer in buffers:
                begin = 0
                while begin < len(buffer):
                    count = self._decrypt(buffer[begin:])
                    begin, received = begin + count, received + count
                    if begin == len(buffer):
                        break
                    if (received and not flags & _WAIT_ALL) or not self._fetch(give_up):
                        return received, [], 0, None
        except BlockingIOError:
            if not received:
                raise
        return received, [], 0, None

    def shutdown(self, how: int, /) -> None:
        self._socket.shutdown(how)

    def close(self) -> None:
        self._socket.close()

    def _send(self, encrypted: Buffer) -> bool:
        """Sends the encrypted bytes of a chunk, and keeps the rest of them if it cannot. Returns whether it could."""
        self._unsent = memoryview(encrypted)
        self._unsent = self._unsent[self._socket.send(encrypted) :]
        return not self._unsent

    def _decrypt(self, buffer: memoryview) -> int:
        """Decrypts the complete records that have arrived into a buffer. Returns the number of bytes."""
        tls, received, size, done = self._tls, self._received, len(buffer), 0
        try:
            while done < size and (received.pending or tls.pending()):
                count: int = tls.read(size - done, buffer[done:])  # type: ignore[assignment]
                if not count:
                    self._ended = True
                    break
                done += count
        except ssl.SSLWantReadError:
            pass  # the last record is not complete
        return done

    def _fetch(self, give_up: float, flags: int = 0) -> bool:
        """Waits for encrypted bytes.

        Returns:
            Whether some arrived. Otherwise the other end has closed the connection.

        Raises:
            BlockingIOError: none arrived in time, or the bytes arrive too slowly to complete a record.
        """
        if self._ended:
            return False
        if time.monotonic() > give_up:
            raise BlockingIOError
        count = self._socket.recv_into(self._arrived, 0, flags)
        self._received.write(self._arrived[:count])
        return count > 0

    def _greet(self) -> None:
        """Makes the TLS handshake at the first use.

        Raises:
            Unauthenticated: the other end shows no certificate that this end accepts, refuses this one's, or does not
                use TLS.
            BlockingIOError: it takes too long.
        """
        give_up = time.monotonic() + (self._timeout_s or math.inf)
        try:
            while not self._shake_hands():
                # The handshake has several reads, and the kernel's timeout holds for each. Python's can be shortened.
                left = give_up - time.monotonic()
                self._socket.settimeout(None if left == math.inf else max(left, _SHORTEST_TIMEOUT_S))
                if not self._fetch(give_up):
                    self._received.write_eof()
        except TimeoutError:
            raise BlockingIOError from None
        except ssl.SSLError as error:
            if self._accepted:
                self._refuse(_NEEDS_TLS if error.reason in NO_TLS else b"")
            raise _failure(self._peer, error, accepted=self._accepted) from None
        self._socket.settimeout(None)
        self._greeted = True

    def _shake_hands(self) -> bool:
        """Continues the TLS handshake with what has arrived. Returns whether it is complete."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            complete = False
        except ssl.SSLError:
            with suppress(OSError):  # the other end may be gone, and the error is the reason
                self._socket.sendall(self._encrypted.read())  # an alert
            raise
        else:
            complete = True
            if self._accepted:
                self._check_name()
        if answer := self._encrypted.read():
            self._socket.sendall(answer)
        return complete

    def _check_name(self) -> None:
        """Raises Unauthenticated if the certificate of the end that opened the connection has no such name.

        OpenSSL checks names only at the other end. The last message of this end is not sent yet, so the other end
        accepts an alert that is not encrypted.
        """
        certificate = self._tls.getpeercert() or {}
        if self._name and ("DNS", self._name) not in certificate.get("subjectAltName", ()):
            self._refuse(_WRONG_ROLE)
            raise errors.Unauthenticated(
                f"no TLS with {self._peer} as its server: its certificate has no DNS name {self._name}; give it the "
                "files of this role from `shoal certs init`",
                address=self._peer,
            )

    def _refuse(self, alert: bytes = b"") -> None:
        """Ends the connection after a TLS alert, and reads what the other end has sent, so that no reset follows.

        Args:
            alert: the alert to send. Empty if OpenSSL has made one, which has been sent.
        """
        with suppress(OSError):
            if alert:
                self._socket.send(alert)
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(None)  # because MSG_DONTWAIT has no effect on a Python socket with a timeout
            self._socket.recv(_DRAINED_BYTES, socket.MSG_DONTWAIT)


def _chunks(buffers: Iterable[Buffer]) -> Iterator[Buffer]:
    """Yields the bytes of buffers in chunks for `ssl`: small pieces together, large ones in parts."""
    gathered: list[Buffer] = []
    size = 0
    for buffer in buffers:
        if len(buffer) < _GATHERED_BYTES:
            gathered.append(buffer)
            size += len(buffer)
            if size < _WRITE_BYTES:
                continue
        if gathered:
            yield b"".join(gathered)
            gathered, size = [], 0
        if len(buffer) >= _GATHERED_BYTES:
            view = memoryview(buffer)
            yield from (view[begin : begin + _WRITE_BYTES] for begin in range(0, len(view), _WRITE_BYTES))
    if gathered:
        yield b"".join(gathered)


def _seconds(timeout: bytes) -> float:
    """Returns the seconds of a timeout of the kernel."""
    seconds, microseconds = _TIMEOUT.unpack(timeout)
    return float(seconds + microseconds / 1e6)


def _failure(peer: str, error: ssl.SSLError, *, accepted: bool) -> errors.Unauthenticated:
    """Returns the error of a TLS handshake that failed on a lane."""
    what = explained(error)
    return errors.Unauthenticated(f"no TLS with {peer}{' as its server' if accepted else ''}: {what}", address=peer)


__all__ = ["TlsSecurity", "TlsStream", "secured"]
