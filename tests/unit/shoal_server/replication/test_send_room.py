"""The room in a send buffer: what it is said to take does not block, and a closed socket takes nothing."""

import socket
from collections.abc import Iterator

import pytest

from shoal_server.replication.send_room import SendRoom


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a TCP connection. Sending on the first one does not wait."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    near.setblocking(False)
    with near, far:
        yield near, far


@pytest.mark.parametrize("nbytes", [100, 5_000, 60_000])
def test_what_a_socket_is_said_to_take_it_takes(ends: tuple[socket.socket, socket.socket], nbytes: int) -> None:
    near, _ = ends
    room, sent = SendRoom(near.fileno()), 0
    while room.takes(nbytes):
        assert near.send(bytes(nbytes)) == nbytes
        sent += 1
    assert sent > 0, "the buffer is empty at first"
    room.close()


def test_a_full_socket_takes_more_when_the_other_end_reads(ends: tuple[socket.socket, socket.socket]) -> None:
    near, far = ends
    room = SendRoom(near.fileno())
    try:
        while True:
            near.send(bytes(1 << 16))
    except BlockingIOError:
        assert not room.takes(0)
    far.settimeout(5)
    while not room.takes(1000):
        assert far.recv(1 << 16)
    room.close()


def test_a_closed_socket_takes_nothing(ends: tuple[socket.socket, socket.socket]) -> None:
    near, _ = ends
    room = SendRoom(near.fileno())
    room.close()
    room.close()
    assert not room.takes(1000)
