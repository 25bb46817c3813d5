"""Owners of the listeners on a port of loopback, in samples of the socket tables of Linux."""

import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal._system.listeners import listening_users, loopback_addresses, users_in, users_in_tables
from shoal._system.socket_diag import listening_user

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
QUEUES = "00000000:00000000 00:00000000 00000000"  # empty
# 7070 is 1B9E, and 7071 is 1B9F.
TCP = (
    HEAD
    + f"""\
   0: 0100007F:1B9E 00000000:0000 0A {QUEUES}  1000        0 1679 1 000000003e9e9658 100 0 0 10 0
   1: 00000000:1B9E 00000000:0000 0A {QUEUES}  1001        0 1680 1 000000003e9e9658 100 0 0 10 0
   2: 0200007F:1B9E 00000000:0000 0A {QUEUES}  1002        0 1681 1 000000003e9e9658 100 0 0 10 0
   3: 00000000:1B9F 00000000:0000 0A {QUEUES}     0        0 1682 1 000000003e9e9658 100 0 0 10 0
   4: 0100007F:1B9F 0100007F:1B9E 01 {QUEUES}  1003        0 1683 1 000000003e9e9658 20 4 30 10 -1
   5: 0100007F:9C40 0100007F:1B9F 06 {QUEUES}     0        0 0 3 00000000f5c5b4c2
"""
)
ANYWHERE, HERE = "0" * 32, "00000000000000000000000001000000"
TCP6 = (
    HEAD
    + f"""\
   0: {HERE}:1B9E {ANYWHERE}:0000 0A {QUEUES}  1004        0 1684 1 000000003e9e9658 100 0 0 10 0
   1: {ANYWHERE}:1B9E {ANYWHERE}:0000 0A {QUEUES}  1005        0 1685 1 000000003e9e9658 100 0 0 10 0
   2: {ANYWHERE}:1BA0 {ANYWHERE}:0000 0A {QUEUES}  1006        0 1686 1 000000003e9e9658 100 0 0 10 0
   3: 0000000000000000FFFF00000100007F:1BA1 {ANYWHERE}:0000 0A {QUEUES}  1007        0 1687 1 000000003e9e9658 100 0
   4: 0000000000000000FFFF000000000000:1BA2 {ANYWHERE}:0000 0A {QUEUES}  1008        0 1688 1 000000003e9e9658 100 0
   5: damaged:1B9E
"""
)


@pytest.mark.parametrize(
    ("address", "port", "users"),
    [
        ("127.0.0.1", 7070, {1000}),  # not 1001: a socket of the address itself comes first
        ("127.0.0.2", 7070, {1002}),
        ("127.0.0.3", 7070, {1001}),  # IPv4 comes before IPv6
        ("::1", 7070, {1004}),
        ("127.0.0.1", 7071, {0}),  # a connection from the port does not listen
        ("::1", 7071, set()),
        ("127.0.0.1", 7072, {1006}),  # an IPv6 socket accepts IPv4 too
        ("::1", 7072, {1006}),
        ("127.0.0.1", 7073, {1007}),
        ("127.0.0.1", 7074, {1008}),
        ("::1", 7074, set()),
        ("127.0.0.1", 40000, set()),
    ],
)
def test_the_users_are_those_of_the_sockets_that_accept_the_connection(
    address: str, port: int, users: set[int]
) -> None:
    assert users_in(TCP + TCP6, ipaddress.ip_address(address), port) == users


@pytest.mark.parametrize(
    ("host", "found"),
    [
        ("127.0.0.1", ["127.0.0.1"]),
        ("127.1.2.3", ["127.1.2.3"]),
        ("::1", ["::1"]),
        ("[::1]", ["::1"]),
        ("[::ffff:127.0.0.1]", ["127.0.0.1"]),
        ("localhost", ["127.0.0.1", "::1"]),
        ("LOCALHOST.", ["127.0.0.1", "::1"]),
        ("node.localhost", ["127.0.0.1", "::1"]),
        ("10.0.0.1", []),
        ("node-1.example", []),
    ],
)
def test_the_addresses_of_a_host_on_loopback(host: str, found: list[str]) -> None:
    assert [str(address) for address in loopback_addresses(host)] == found


def test_localhost_counts_the_listeners_of_both_addresses(tmp_path: Path) -> None:
    tables = [tmp_path / "tcp", tmp_path / "tcp6"]
    tables[0].write_text(TCP)
    assert users_in_tables("localhost", 7070, tables) == {1000}, "without the second file"
    tables[1].write_text(TCP6)
    assert users_in_tables("localhost", 7070, tables) == {1000, 1004}
    assert users_in_tables("10.0.0.1", 7070, tables) == frozenset()


@pytest.mark.parametrize(("host", "at"), [("127.0.0.1", "127.0.0.1"), ("", "127.0.0.1"), ("::1", "::1"), ("::", "::1")])
def test_a_listener_of_this_process_is_found_by_the_kernel_and_in_the_tables(host: str, at: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with listener:
        port = listener.getsockname()[1]
        assert listening_users(at, port) == users_in_tables(at, port) == {os.geteuid()}
    assert listening_users(at, port) == users_in_tables(at, port) == frozenset()


@contextlib.contextmanager
def listener_of_another_user(host: str) -> Iterator[int]:
    os.seteuid(65534)
    try:
        listener = socket.create_server((host, 0))
    finally:
        os.seteuid(0)
    with listener:
        yield listener.getsockname()[1]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can listen as another user")
@pytest.mark.parametrize("host", ["127.0.0.2", ""])
def test_the_kernel_names_the_user_of_the_socket_that_accepts(host: str) -> None:
    with listener_of_another_user(host) as port:
        assert listening_users("127.0.0.2", port) == {65534}
        if host:
            with socket.create_server(("127.0.0.3", port)):  # no other test uses its ports
                assert listening_users("127.0.0.3", port) == {0}
                assert listening_users("127.0.0.2", port) == {65534}


def test_a_connection_from_the_port_does_not_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        port = connection.getsockname()[1]
        assert listening_user(ipaddress.ip_address("127.0.0.1"), port) is None


def test_the_tables_are_read_where_the_kernel_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "AF_NETLINK")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(OSError, match="netlink"):
            listening_user(ipaddress.ip_address("127.0.0.1"), port)
        assert listening_users("127.0.0.1", port) == {os.geteuid()}


def test_a_look_takes_less_than_a_call() -> None:
    """Each control call looks. The socket tables take some ms, because the kernel walks all its connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        times = []
        for _ in range(20):
            start = time.perf_counter()
            listening_users("127.0.0.1", port)
            times.append(time.perf_counter() - start)
    assert min(times) < 0.001
