"""The encrypted stream of a lane, between two connected sockets."""

import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal._security.certificates import make_certificates
from shoal._transport.tls_stream import TlsStream
from support.certificates import tls_files
from support.waiting import wait_until

_DONT_WAIT = int(socket.MSG_DONTWAIT)


@pytest.fixture
def streams(tmp_path: Path) -> Iterator[tuple[TlsStream, TlsStream]]:
    """Two ends of a connection, after the TLS handshake."""
    make_certificates(tmp_path)
    material = tls_files(tmp_path).current()
    assert material.lane_server
    near, far = socket.socketpair()
    ends = TlsStream(near, material.lane_client, "far", "localhost"), TlsStream(far, material.lane_server, "near", "")
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
    near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 3600, 0))
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
