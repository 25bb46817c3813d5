"""Proxies of a bad network: what a client and its server see of each fault."""

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from support.faults.proxy import Conditions, Network, Proxy
from support.faults.proxy.conditions import Line
from support.waiting import wait_until


class Echo:
    """A server that sends back what it gets, and counts the bytes."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listening.getsockname())
        self.received = 0
        self.open = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        self.open += 1
        with connection, suppress(OSError):
            while data := connection.recv(1 << 16):
                self.received += len(data)
                connection.sendall(data)
        self.open -= 1

    def close(self) -> None:
        with suppress(OSError):  # closed by the test
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    with closing(Echo()) as echo:
        yield echo


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Network(seed=3) as network:
        yield network.proxy("client to echo", echo.address)


def connect(proxy: Proxy) -> socket.socket:
    host, _, port = proxy.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def ask(client: socket.socket, text: bytes) -> bytes:
    client.sendall(text)
    answer = b""
    while len(answer) < len(text):
        if not (piece := client.recv(len(text))):
            raise ConnectionResetError("the connection was closed")
        answer += piece
    return answer


def is_silent(client: socket.socket) -> bool:
    client.settimeout(0.05)
    try:
        return client.recv(1) is None
    except TimeoutError:
        return True
    finally:
        client.settimeout(10)


def test_a_segment_arrives_by_the_conditions_of_its_link() -> None:
    line = Line(random.Random(1))
    assert line.arrives_at(Conditions(), 5.0, 100) == 5.0
    slow = Conditions(delay_s=0.1, jitter_s=0.02)
    took = [Line(random.Random(seed)).arrives_at(slow, 5.0, 100) - 5.0 for seed in range(50)]
    assert 0.08 <= min(took) < 0.09 < 0.11 < max(took) <= 0.12
    stalled: list[bool] = []
    stalling = Line(random.Random(1), lambda: stalled.append(True))
    times = [stalling.arrives_at(Conditions(stall_share=0.1, stall_s=0.3), float(at), 1) for at in range(100)]
    assert sum(arrived == at + 0.3 for at, arrived in enumerate(times)) == len(stalled) > 2


def test_segments_keep_their_order_and_share_the_rate() -> None:
    line = Line(random.Random(1))
    jittered = Conditions(delay_s=0.1, jitter_s=0.1)
    times = [line.arrives_at(jittered, at / 1000, 1) for at in range(100)]
    assert times == sorted(times)
    line = Line(random.Random(1))
    assert [line.arrives_at(Conditions(bytes_per_s=1000.0), 5.0, 500) for _ in range(2)] == [5.5, 6.0]


def test_bytes_and_ends_pass(proxy: Proxy, echo: Echo) -> None:
    payload = random.Random(2).randbytes(3_000_000)
    with connect(proxy) as client:
        sender = threading.Thread(target=client.sendall, args=(payload,))
        sender.start()
        answer = b""
        while len(answer) < len(payload):
            answer += client.recv(1 << 16)
        sender.join()
        assert answer == payload
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""
    wait_until(lambda: not echo.open, what="the end of the connection")


def test_a_target_that_does_not_listen_resets_the_client(proxy: Proxy, echo: Echo) -> None:
    echo.close()
    with pytest.raises(ConnectionResetError), connect(proxy) as client:  # possibly while it connects
        client.recv(1)


def test_a_delay_holds_for_both_directions(proxy: Proxy) -> None:
    with connect(proxy) as client:
        ask(client, b"a")
        proxy.delay(0.05)
        begun = time.monotonic()
        assert ask(client, b"b") == b"b"
        assert 0.1 <= time.monotonic() - begun < 1.0
        proxy.heal()
        assert ask(client, b"c") == b"c"


def test_a_limit_slows_a_large_message(proxy: Proxy) -> None:
    proxy.limit(1e6)
    with connect(proxy) as client:
        begun = time.monotonic()
        ask(client, bytes(50_000))
        assert time.monotonic() - begun >= 0.1


def test_a_dropped_reply_was_asked_for(proxy: Proxy, echo: Echo) -> None:
    """The server has every request, and the client misses some answers: those that the proxy counts."""
    proxy.drop_replies(0.3)
    missed = 0
    for _ in range(40):
        with connect(proxy) as client:
            try:
                ask(client, b"x")
            except ConnectionResetError:
                missed += 1
    assert proxy.counts.dropped == missed
    assert 4 <= missed <= 24
    assert echo.received == proxy.counts.replies == 40


@pytest.mark.parametrize("direction", ["both", "requests", "replies"])
def test_a_partition_holds_bytes_back_until_it_heals(proxy: Proxy, echo: Echo, direction: str) -> None:
    with connect(proxy) as client:
        ask(client, b"a")
        proxy.partition(direction)  # type: ignore[arg-type]  # one of the literals
        client.sendall(b"b")
        assert is_silent(client)
        wait_until(lambda: echo.received == (2 if direction == "replies" else 1), what="the requests")
        with connect(proxy) as other:  # the kernel accepts it, but nobody hears of it
            other.sendall(b"c")
            assert is_silent(other)
            proxy.heal()
            assert (client.recv(1), other.recv(1)) == (b"b", b"c")


def test_a_client_that_dies_in_a_partition_is_not_missed_before_it_heals(proxy: Proxy, echo: Echo) -> None:
    client = connect(proxy)
    ask(client, b"a")
    proxy.partition()
    client.close()
    with connect(proxy) as other:
        assert is_silent(other)
    assert echo.open == 1
    proxy.heal()
    wait_until(lambda: not echo.open, what="the end of the connection")


def test_a_cut_resets_connections_and_lets_new_ones_pass(proxy: Proxy, echo: Echo) -> None:
    with connect(proxy) as client:
        ask(client, b"a")
        assert proxy.cut() == 1
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    wait_until(lambda: not echo.open, what="the end of the connection")
    with connect(proxy) as client:
        assert ask(client, b"b") == b"b"
