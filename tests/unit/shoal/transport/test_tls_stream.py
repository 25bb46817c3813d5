"""The encrypted stream of a lane, between two connected sockets."""

import socket
import ssl
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shoal._security.certificates import make_certificates
from shoal._transport.pieces import rest
from shoal._transport.tls_stream import TlsStream
from support.certificates import tls_files
from support.waiting import wait_until

_DONT_WAIT, _WAIT_ALL = int(socket.MSG_DONTWAIT), int(socket.MSG_WAITALL)


def timeout(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The sockets below the streams."""
    near, far = socket.socketpair()
    with near, far:
        yield near, far


@pytest.fixture
def streams(tmp_path: Path, sockets: tuple[socket.socket, socket.socket]) -> Iterator[tuple[TlsStream, TlsStream]]:
    """Two ends of a connection, after the TLS handshake."""
    make_certificates(tmp_path)
    material = tls_files(tmp_path).current()
    assert material.lane_server
    near, far = sockets
    ends = (
        TlsStream(near, material.lane_client, "far", "localhost", accepted=False),
        TlsStream(far, material.lane_server, "near", "", accepted=True),
    )
    try:
        with ThreadPoolExecutor(1) as thread:
            accepted = thread.submit(ends[1].recv_into, memoryview(bytearray(1)))
            ends[0].sendmsg([b"x"])
            assert accepted.result(30) == 1
        yield ends
    finally:
        for end in ends:
            end.close()


def test_read_that_must_not_wait_returns_at_once(streams: tuple[TlsStream, TlsStream]) -> None:
    """A Python socket with a timeout would wait for it, and a lane could not poll."""
    near, far = streams
    near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout(3600))
    buffer = memoryview(bytearray(100))
    with ThreadPoolExecutor(1) as thread:
        polled = thread.submit(near.recv_into, buffer, 0, _DONT_WAIT)
        try:
            with pytest.raises(BlockingIOError):
                polled.result(10)
        finally:
            far.sendmsg([b"here"])  # ends the read in any case

    def arrived() -> bool:
        try:
            return near.recv_into(buffer, 0, _DONT_WAIT) == len(b"here")
        except BlockingIOError:
            return False

    wait_until(arrived, what="the bytes")
    assert bytes(buffer[:4]) == b"here"


def test_write_that_timed_out_continues_with_the_same_bytes(streams: tuple[TlsStream, TlsStream]) -> None:
    near, far = streams
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout(0.01))
    pieces = [bytes([number]) * size for number, size in enumerate((5, 1 << 20, 40_000, 3 << 20, 7))]
    waiting, timeouts = list[Any](pieces), 0

    def send() -> None:
        nonlocal waiting, timeouts
        try:
            waiting = rest(waiting, near.sendmsg(waiting))
        except BlockingIOError:
            timeouts += 1

    while timeouts < 2:  # nobody reads: the socket's buffers are full
        send()
    received = memoryview(bytearray(sum(map(len, pieces))))
    with ThreadPoolExecutor(1) as thread:
        read = thread.submit(far.recvmsg_into, [received], 0, _WAIT_ALL)
        while waiting:
            send()
        assert read.result(30)[0] == len(received)
    assert received == b"".join(pieces)


def test_part_of_a_record_is_kept_until_the_rest_arrives(
    streams: tuple[TlsStream, TlsStream], sockets: tuple[socket.socket, socket.socket]
) -> None:
    near, far = streams
    near.sendmsg([b"a" * 1000])
    record = sockets[1].recv(4096)
    buffer = memoryview(bytearray(1000))
    sockets[0].send(record[:500])
    for _ in range(2):
        with pytest.raises(BlockingIOError):
            far.recv_into(buffer, 0, _DONT_WAIT)
    sockets[0].send(record[500:])
    assert far.recv_into(buffer, 0, _DONT_WAIT) == 1000
    assert buffer == b"a" * 1000


def test_bytes_that_no_call_has_read_are_pending(streams: tuple[TlsStream, TlsStream]) -> None:
    near, far = streams
    assert far.pending() == 0
    near.sendmsg([b"a" * 100])
    near.sendmsg([b"b" * 100])
    buffer = memoryview(bytearray(100))
    for content in (b"a", b"b"):
        assert far.recv_into(buffer) == 100
        assert buffer == content * 100
        assert bool(far.pending()) == (content == b"a"), "one system call has read both records"
    near.sendmsg([b"c" * 100])
    assert far.recvmsg_into([buffer[:30], buffer[30:60]], 0, _WAIT_ALL)[0] == 60
    assert far.pending() == 40


def test_read_ends_after_its_timeout(streams: tuple[TlsStream, TlsStream]) -> None:
    near, far = streams
    far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout(0.01))
    buffer = memoryview(bytearray(100))
    with pytest.raises(BlockingIOError):
        far.recv_into(buffer)
    near.sendmsg([b"a" * 60])
    assert far.recvmsg_into([buffer], 0, _WAIT_ALL)[0] == 60, "what has arrived"


def test_close_ends_a_read_of_another_thread(streams: tuple[TlsStream, TlsStream]) -> None:
    near, far = streams
    with ThreadPoolExecutor(1) as thread:
        read = thread.submit(far.recv_into, memoryview(bytearray(100)))
        far.shutdown(socket.SHUT_RDWR)
        assert read.result(30) == 0
    with pytest.raises(OSError, match="Broken pipe"):
        far.sendmsg([b"never as plain text"])
    assert near.recv_into(memoryview(bytearray(100))) == 0


def test_changed_bytes_are_refused(
    streams: tuple[TlsStream, TlsStream], sockets: tuple[socket.socket, socket.socket]
) -> None:
    near, far = streams
    near.sendmsg([b"a" * 1000])
    record = bytearray(sockets[1].recv(4096))
    record[500] ^= 1
    sockets[0].send(record)
    with pytest.raises(ssl.SSLError, match="BAD_RECORD_MAC"):
        far.recv_into(memoryview(bytearray(1000)))
