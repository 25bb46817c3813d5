"""Features that only lanes have: frames, the greeting, shared memory, and peers that close, stall or send invalid data.

A client's misbehaviour changes no version and leaves no thread or memory behind. Other clients keep working.
"""

import dataclasses
import fcntl
import os
import socket
import stat
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from shoal import _rpc, consistency, errors, initializers, partitioners
from shoal._training import ParameterClient
from shoal._training.overlap import Pipeline
from shoal._transport import Transport, lane_transport, listener, selector
from shoal._transport import lane as _lane
from shoal._transport import shared_memory as _shared_memory
from shoal._transport.frames import Frame
from shoal._transport.grpc_transport import GrpcTransport
from shoal._transport.lane import Lane
from shoal._transport.lane_transport import LaneTransport
from shoal._transport.segment import HEADER_BYTES, SHM, Segment, SegmentUnavailable
from shoal._transport.shared_memory import SharedMemoryTransport
from shoal._wire.chunks import Buffer, Chunk, encode_values
from shoal._wire.limits import MAX_MESSAGE_BYTES
from shoal.v1 import header_pb2, tensor_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal.variables import Variable
from shoal_server.serving import chunk_frames, lane_endpoint
from shoal_server.serving.pulls import PendingPull
from support.clusters.shard_servers import RawLane, ShardServers
from support.waiting import wait_until

ELEMENTS = 1000
VARIABLES = {"w": np.arange(ELEMENTS, dtype=np.float32)}
ONES = {"w": np.ones(ELEMENTS, np.float32)}
BIG = {"big": Variable((4 << 20,))}  # 16 MB: more than sockets hold
PAGE = 4096


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Checks that no thread of a lane and no segment outlives a test or waits for the garbage collector."""
    before = shared_memory()
    yield
    wait_until(lambda: not [t.name for t in threading.enumerate() if t.name in {"lane", "lanes"}], what="threads' end")
    assert shared_memory() - before == set()


def shared_memory() -> set[str]:
    """Returns what this process has mapped or open in /dev/shm."""
    mapped = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    opened = {os.readlink(f"/proc/self/fd/{file}") for file in os.listdir("/proc/self/fd") if is_open(file)}
    return {name for name in mapped | opened if name.startswith("/dev/shm/")}


def is_open(file: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{file}")


class Watched(ShardServers):
    bystander: ParameterClient


@pytest.fixture
def servers() -> Iterator[Watched]:
    """Yields one server, on which a bystander trains before, during and after each test."""
    with check_training(VARIABLES) as servers:
        yield servers


@contextmanager
def check_training(variables: Mapping[str, np.ndarray | Variable], **options: Any) -> Iterator[Watched]:
    with Watched(variables, shards=1, **options) as servers, servers.worker("bystander") as bystander:
        servers.bystander = bystander
        check_step(servers)
        yield servers
        before = servers.versions()
        check_step(servers)
        assert servers.versions() == [version + 1 for version in before]


def check_step(servers: Watched) -> None:
    """Takes a step of the bystander."""
    values = servers.bystander.pull()
    assert servers.bystander.push({name: np.zeros_like(value) for name, value in values.items()}).outcome == "accepted"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the servers' time limits for HELLO and for a client that stalls."""
    monkeypatch.setattr(listener, "HELLO_TIMEOUT_S", 0.3)
    monkeypatch.setattr(chunk_frames, "STALL_S", 0.2)
    monkeypatch.setattr(listener, "Lane", lambda *given, **options: Lane(*given, **{**options, "stall_s": 0.2}))


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes clients share memory for variables of any size."""
    monkeypatch.setattr(_shared_memory, "SHARED_FROM_BYTES", 0)


@contextmanager
def connected(servers: ShardServers) -> Iterator[socket.socket]:
    """Yields a plain socket to the server's port for lanes."""
    with socket.create_connection(_rpc.parse_address(servers.lanes[0].offer.address), 20) as connection:
        yield connection


def frame(kind: int | Frame, payload: bytes = b"", *, size: int | None = None, reserved: bytes = b"\0\0\0") -> bytes:
    return struct.pack("<B3sI", kind, reserved, len(payload) if size is None else size) + payload


def hello(servers: ShardServers, **change: Any) -> bytes:
    return pb.LaneHello(**{"token": servers.lanes[0].offer.token} | change).SerializeToString()


def said_until_closed(connection: socket.socket) -> bytes:
    """Returns what the server sends before it closes the connection."""
    said = b""
    try:
        while part := connection.recv(1 << 16):
            said += part
    except ConnectionResetError:  # it had not read all that was sent
        pass
    return said


def stamp(step: int) -> header_pb2.Stamp:
    """Returns a stamp of worker "a". It is admitted after the bystander's first step, so it begins with the second."""
    return header_pb2.Stamp(job="job", worker="a", incarnation=1, step=step, generation=1)


def pull_request(*, step: int = 1, **fields: Any) -> pb.PullRequest:
    return pb.PullRequest(stamp=stamp(step), shards=[0], **fields)


def push_header(*, step: int = 1, **fields: Any) -> pb.PushHeader:
    return pb.PushHeader(
        stamp=stamp(step),
        shards=[0],
        weight=1.0,
        commit=True,
        aggregations=[tensor_pb2.TRAINABLE],
        versions=[1],
        **fields,
    )


def slot_push(slot: int) -> bytes:
    """Returns the only message of a push through shared memory."""
    return pb.PushRequest(header=push_header(region=slot)).SerializeToString()


def push_messages() -> Iterator[bytes]:
    """Returns the messages of a push of ones."""
    yield pb.PushRequest(header=push_header()).SerializeToString()
    yield pb.PushRequest(chunks=[pb.Chunk(data=ONES["w"].tobytes())]).SerializeToString()


def fallbacks(logs: Sequence[Mapping[str, str]]) -> list[str]:
    return [entry["why"] for entry in logs if "no shared memory" in entry["event"] or "no lane" in entry["event"]]


class TestFrames:
    @pytest.mark.parametrize("greeted", [False, True], ids=["first", "later"])
    @pytest.mark.parametrize(
        "lie",
        [
            frame(Frame.PULL, size=MAX_MESSAGE_BYTES + 1),
            frame(Frame.PUSH, size=2**32 - 1),
            frame(0),
            frame(10),
            frame(255),
            frame(Frame.PULL, reserved=b"\0\0\1"),
            frame(Frame.HELLO, reserved=b"\1\0\0"),
            b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\xff" * 100,
        ],
        ids=["large", "huge", "kind 0", "kind 10", "kind 255", "reserved", "reserved hello", "HTTP", "gRPC", "noise"],
    )
    def test_invalid_frame_ends_the_lane(self, servers: ShardServers, lie: bytes, greeted: bool) -> None:
        with connected(servers) as connection:
            if greeted:
                connection.sendall(frame(Frame.HELLO, hello(servers)))
                assert connection.recv(100)[0] == Frame.WELCOME
            connection.sendall(lie)
            assert said_until_closed(connection) == b""
        assert servers.versions() == [1]

    @pytest.mark.parametrize("kind", [Frame.HELLO, Frame.WELCOME, Frame.VALUES, Frame.PUSHED, Frame.ERROR, Frame.END])
    def test_a_frame_that_is_no_call_ends_the_lane(self, servers: ShardServers, kind: Frame) -> None:
        with servers.lane() as lane:
            lane.send(kind)
            with pytest.raises(errors.Unreachable):
                lane.receive()

    @pytest.mark.parametrize("kind", [Frame.HELLO, Frame.PULL, Frame.COMMIT, Frame.VALUES, Frame.PUSHED])
    def test_another_frame_in_the_middle_of_a_push_ends_the_lane(self, servers: ShardServers, kind: Frame) -> None:
        servers.admit("a")
        with servers.lane() as lane:
            for message in push_messages():
                lane.send(Frame.PUSH, message)
            lane.send(kind)
            with pytest.raises(errors.Unreachable):
                lane.receive()
        assert servers.versions() == [1]

    @pytest.mark.parametrize("kind", [Frame.PULL, Frame.COMMIT, Frame.PUSH])
    def test_a_call_that_cannot_be_read_is_refused_and_the_lane_goes_on(
        self, servers: ShardServers, kind: Frame
    ) -> None:
        servers.admit("a")
        with servers.lane() as lane:
            for payload in (b"\xff\xff\xff", b"\x0a\x7f", b"nonsense"):
                lane.send(kind, payload)
                if kind is Frame.PUSH:
                    lane.send(Frame.END)
                with pytest.raises((errors.BadRequest, errors.BadChunk), match=r"cannot be decoded|malformed"):
                    lane.receive()
            assert lane.pull(pull_request())[0].headers[0].version == 1

    @pytest.mark.parametrize("cut", [1, 7, 8, 9, 20])
    def test_a_lane_that_ends_within_a_frame_leaves_nothing(self, servers: ShardServers, cut: int) -> None:
        with connected(servers) as connection:
            connection.sendall(frame(Frame.HELLO, hello(servers))[:cut])
        wait_until(lambda: servers.open_lanes == 2, what="its end")  # the bystander's

    def test_frames_may_come_byte_by_byte_or_all_at_once(self, servers: ShardServers) -> None:
        servers.admit("a")
        call = frame(Frame.PULL, pull_request().SerializeToString())
        with connected(servers) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for byte in frame(Frame.HELLO, hello(servers)) + call:
                connection.sendall(bytes([byte]))
            connection.sendall(2 * call)
            connection.shutdown(socket.SHUT_WR)
            kinds = []
            said = said_until_closed(connection)
            while said:
                kind, size = struct.unpack_from("<BxxxI", said)
                kinds.append(Frame(kind))
                said = said[8 + size :]
        assert kinds == [Frame.WELCOME, *3 * [Frame.VALUES, Frame.END]]


class TestGreeting:
    def test_wrong_token_is_refused_and_the_lane_closed(self, servers: ShardServers) -> None:
        for token in (b"", b"x", bytes(32), servers.lanes[0].offer.token[:-1], servers.lanes[0].offer.token + b"\0"):
            with (
                RawLane(servers.lanes[0].offer.address) as lane,
                pytest.raises(errors.Unauthenticated, match="token that is not this server's"),
            ):
                lane.open_handshake(pb.LaneHello(token=token))
            with pytest.raises(errors.Unreachable):
                lane.receive()

    def test_a_large_hello_is_not_waited_for(self, servers: ShardServers) -> None:
        """The server allocates no memory for a client that has not sent the token."""
        with connected(servers) as connection:
            connection.sendall(frame(Frame.HELLO, size=5000))
            assert said_until_closed(connection) == b""

    @pytest.mark.parametrize("payload", [b"\xff\xff", b"\x0a\x7f", b"\x12\x04\x0a\x02\xff\xff"])
    def test_a_hello_that_cannot_be_read_ends_the_lane(self, servers: ShardServers, payload: bytes) -> None:
        with connected(servers) as connection:
            connection.sendall(frame(Frame.HELLO, payload))
            assert said_until_closed(connection) == b""

    def test_a_call_before_hello_ends_the_lane(self, servers: ShardServers) -> None:
        servers.admit("a")
        with connected(servers) as connection:
            connection.sendall(frame(Frame.PULL, pull_request().SerializeToString()))
            assert said_until_closed(connection) == b""

    @pytest.mark.parametrize("beginning", [b"", b"\1", frame(Frame.HELLO, size=50)])
    def test_a_client_that_does_not_say_hello_is_let_go(
        self, impatient: None, servers: ShardServers, beginning: bytes
    ) -> None:
        with connected(servers) as connection:
            connection.sendall(beginning)
            assert said_until_closed(connection) == b""

    def test_the_limit_for_hello_is_shorter_than_that_for_a_stall(
        self, monkeypatch: pytest.MonkeyPatch, servers: ShardServers
    ) -> None:
        monkeypatch.setattr(listener, "HELLO_TIMEOUT_S", 0.1)
        with connected(servers) as connection:
            assert said_until_closed(connection) == b""

    def test_a_hello_in_single_bytes_has_one_deadline_in_all(
        self, monkeypatch: pytest.MonkeyPatch, servers: ShardServers
    ) -> None:
        monkeypatch.setattr(listener, "HELLO_TIMEOUT_S", 0.3)
        with connected(servers) as connection:
            send_slowly(connection, frame(Frame.HELLO, size=4000) + bytes(4000))
            assert said_until_closed(connection) == b""
        wait_until(lambda: servers.open_lanes == 2, what="its end")  # the bystander's

    @pytest.mark.parametrize("limit", [2, 3], ids=["none", "only for pulls"])
    def test_whom_no_lane_is_left_for_calls_by_grpc_and_says_so(self, limit: int) -> None:
        with (
            check_training(VARIABLES, max_lanes=limit) as servers,
            capture_logs() as logs,
            servers.worker("late") as late,
        ):
            for _ in range(2):
                late.pull()
                assert late.push(ONES).outcome == "accepted"
            assert servers.open_lanes == limit
        [why] = fallbacks(logs)
        assert f"this server has {limit} lanes; the limit LANES is {limit}" in why

    def test_a_lane_without_a_thread_is_refused_and_the_next_one_is_taken(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def start(thread: threading.Thread) -> None:
            if thread.name == "lane":
                raise RuntimeError("can't start new thread")
            begin(thread)

        begin = threading.Thread.start
        with check_training(VARIABLES) as servers:
            with monkeypatch.context() as patch, capture_logs() as logs, servers.worker("early") as early:
                patch.setattr(threading.Thread, "start", start)
                early.pull()
            assert "has no thread for another lane" in fallbacks(logs)[0]
            before = servers.open_lanes
            with servers.worker("late") as late:
                late.pull()
                assert servers.open_lanes == before + 1

    def test_whom_no_lane_was_left_for_gets_one_when_it_is_free_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(selector, "FIRST_RETRY_S", 0.5)  # longer than a pull and a push
        with check_training(VARIABLES, max_lanes=4) as servers:
            with servers.worker("early") as early, capture_logs() as logs, servers.worker("late") as late:
                early.pull()
                early.push(ONES)
                late.pull()
                late.push(ONES)
                [connection] = late.servers.connections
                assert type(connection.pull_transport) is type(connection.push_transport) is GrpcTransport
                early.close()

                def check_on_lanes() -> bool:
                    late.pull()
                    assert late.push(ONES).outcome == "accepted"
                    return type(connection.pull_transport) is type(connection.push_transport) is LaneTransport

                wait_until(check_on_lanes, what="its lanes")
            assert len(fallbacks(logs)) == 1  # the attempts that failed meanwhile are not said

    def test_a_lane_that_breaks_when_no_other_is_left_is_replaced_by_grpc(self) -> None:
        """Pulls have a lane, but pushes were refused one. Then the lane of the pulls breaks."""
        with check_training(VARIABLES, max_lanes=3) as servers, servers.worker("late") as late:
            late.pull()
            assert late.push(ONES).outcome == "accepted"
            close_lane(late.servers.connections[0].pull_transport)
            assert late.pull()["w"].shape == (ELEMENTS,)

    def test_a_server_without_lanes_is_called_by_grpc(self) -> None:
        with ShardServers(VARIABLES, max_lanes=0) as servers, capture_logs() as logs, servers.worker("a") as worker:
            worker.pull()
            assert worker.push(ONES).outcome == "accepted"
        assert fallbacks(logs) == []

    def test_unanswered_lane_port_falls_back_to_grpc(self, servers: ShardServers) -> None:
        servers.lanes[0].offer.address = f"127.0.0.1:{free_port()}"
        with capture_logs() as logs, servers.worker("a") as worker:
            worker.pull()
            assert worker.push(ONES).outcome == "accepted"
        [why] = fallbacks(logs)
        assert "refused" in why

    def test_a_server_that_says_nothing_is_gone_round(
        self, servers: ShardServers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(lane_transport, "WELCOME_TIMEOUT_S", 0.1)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            servers.lanes[0].offer.address = f"127.0.0.1:{silent.getsockname()[1]}"
            with capture_logs() as logs, servers.worker("a") as worker:
                worker.pull()
                assert worker.push(ONES).outcome == "accepted"
        [why] = fallbacks(logs)
        assert "has sent nothing for 0.1 s" in why

    @pytest.mark.parametrize(
        "answer", [frame(Frame.WELCOME, b"\xff"), frame(Frame.ERROR, b"\xff"), frame(99), b"x" * 99]
    )
    def test_a_server_that_answers_nonsense_is_gone_round(self, servers: ShardServers, answer: bytes) -> None:
        with socket.create_server(("127.0.0.1", 0)) as strange, ThreadPoolExecutor(1) as pool:
            servers.lanes[0].offer.address = f"127.0.0.1:{strange.getsockname()[1]}"

            def answers() -> None:
                with strange.accept()[0] as connection:
                    connection.recv(1000)
                    connection.sendall(answer)

            answering = pool.submit(answers)
            with capture_logs() as logs, servers.worker("a") as worker:
                worker.pull()
                assert worker.push(ONES).outcome == "accepted"
            answering.result()
        assert len(fallbacks(logs)) == 1


def send_slowly(connection: socket.socket, data: bytes) -> None:
    """Sends one byte after the other, without a long pause, until the server closes the connection."""
    pause = threading.Event()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with suppress(BrokenPipeError, ConnectionResetError):
        for byte in data:
            connection.sendall(bytes([byte]))
            pause.wait(0.02)
        raise AssertionError("the server waited for every byte")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Offered:
    """A segment that a client made, and the message that offers it. It is removed at the end."""

    def __init__(self, regions: int = 2, region_bytes: int = PAGE) -> None:
        self.segment = Segment.create(regions * region_bytes)
        self.said = pb.Segment(
            name=self.segment.name, nonce=self.segment.nonce, regions=regions, region_bytes=region_bytes
        )
        self.path = SHM / self.segment.name
        self.regions, self.region_bytes = regions, region_bytes

    def slot(self, number: int) -> np.ndarray:
        return np.frombuffer(self.segment.view((number - 1) * self.region_bytes, self.region_bytes), np.uint8)

    def close(self) -> None:
        self.segment.close()


@pytest.fixture
def offered() -> Iterator[Offered]:
    with closing(Offered()) as offered:
        yield offered


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """Returns a file that no server may touch."""
    path = tmp_path / "theirs"
    path.write_bytes(b"x" * (HEADER_BYTES + 2 * PAGE))
    yield path
    assert path.read_bytes() == b"x" * (HEADER_BYTES + 2 * PAGE)


class TestSegmentsThatAreNotTheClients:
    """Invalid segments: the server gives the reason why it does not share them, and the lane continues with chunks."""

    def check_refused(self, servers: ShardServers, said: pb.Segment) -> str:
        servers.admit("a")
        with servers.lane(segment=said) as lane:
            assert not lane.welcome.shared
            with pytest.raises(errors.BadRequest, match="names region 1 of shared memory; this lane has 0"):
                lane.pull(pull_request(region=1))
            assert lane.push(push_messages()).shards[0].outcome == pb.ACCEPTED
            assert sum(len(chunk.data) for reply in lane.pull(pull_request(step=2)) for chunk in reply.chunks) == 4000
            return lane.welcome.reason

    @pytest.mark.parametrize(
        "name",
        [
            "",
            "/etc/passwd",
            "../etc/passwd",
            "shoal-../../etc/passwd",
            "shoal-" + "g" * 32,
            "shoal-" + "A" * 32,
            "shoal-" + "0" * 31,
            "shoal-" + "0" * 33,
            "shoal-" + "0" * 32 + "\n",
            "shoal-" + "0" * 31 + "\0",
            "x" * 3000,
        ],
    )
    def test_a_name_that_is_none(self, servers: ShardServers, offered: Offered, name: str) -> None:
        offered.said.name = name
        reason = self.check_refused(servers, offered.said)
        assert "is not a segment's name" in reason
        assert len(reason) < 200

    def test_a_name_that_nothing_has(self, servers: ShardServers, offered: Offered) -> None:
        offered.said.name = "shoal-" + "0" * 32
        assert "No such file" in self.check_refused(servers, offered.said)

    def test_a_path_to_elsewhere(self, servers: ShardServers, offered: Offered, elsewhere: Path) -> None:
        offered.said.name = os.path.relpath(elsewhere, SHM)
        assert "is not a segment's name" in self.check_refused(servers, offered.said)

    def test_a_link_to_elsewhere(self, servers: ShardServers, offered: Offered, elsewhere: Path) -> None:
        offered.path.unlink()
        offered.path.symlink_to(elsewhere)
        assert "symbolic link" in self.check_refused(servers, offered.said)

    def test_a_file_that_is_no_segment(self, servers: ShardServers, offered: Offered) -> None:
        offered.path.unlink()
        fd = os.open(offered.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(fd, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # or the next sweep, of any process, removes it
            file.write(b"x" * (HEADER_BYTES + 2 * PAGE))
            file.flush()
            assert "is not a segment" in self.check_refused(servers, offered.said)

    def test_a_pipe(self, servers: ShardServers, offered: Offered) -> None:
        offered.path.unlink()
        os.mkfifo(offered.path, 0o600)
        assert "is not a regular file" in self.check_refused(servers, offered.said)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
    def test_file_of_another_owner_is_refused(self, servers: ShardServers, offered: Offered) -> None:
        os.chown(offered.path, 12345, 12345)
        assert "belongs to user 12345" in self.check_refused(servers, offered.said)

    def test_a_file_that_others_may_write_to(self, servers: ShardServers, offered: Offered) -> None:
        offered.path.chmod(0o606)
        assert "is accessible to other users" in self.check_refused(servers, offered.said)

    @pytest.mark.parametrize("nonce", [b"", bytes(16), b"x" * 1000])
    def test_a_wrong_nonce(self, servers: ShardServers, offered: Offered, nonce: bytes) -> None:
        offered.said.nonce = nonce
        assert "has another nonce" in self.check_refused(servers, offered.said)

    @pytest.mark.parametrize(
        ("regions", "region_bytes", "said"),
        [
            (0, PAGE, "it has 0 regions"),
            (17, PAGE, "it has 17 regions"),
            (2**32 - 1, 2**64 - 1, "regions"),
            (2, 0, "has 12288 bytes instead"),
            (2, 2 * PAGE, "has 12288 bytes instead"),
            (2, 2**63, "has 12288 bytes instead"),
            (1, PAGE, "has 12288 bytes instead"),
        ],
    )
    def test_a_wrong_size(
        self, servers: ShardServers, offered: Offered, regions: int, region_bytes: int, said: str
    ) -> None:
        offered.said.regions, offered.said.region_bytes = regions, region_bytes
        assert said in self.check_refused(servers, offered.said)

    def test_regions_that_are_not_whole_pages(self, servers: ShardServers) -> None:
        with closing(Offered(3, PAGE + 1)) as odd:
            assert "multiple of 4096" in self.check_refused(servers, odd.said)

    def test_a_segment_that_shrank_before_it_was_offered(self, servers: ShardServers, offered: Offered) -> None:
        os.truncate(offered.path, HEADER_BYTES + PAGE)
        assert "has 8192 bytes instead" in self.check_refused(servers, offered.said)

    def test_a_segment_of_holes(self, servers: ShardServers, offered: Offered) -> None:
        """The kernel would allocate its memory only when the server writes, and might have none left then."""
        os.truncate(offered.path, HEADER_BYTES)
        os.truncate(offered.path, HEADER_BYTES + 2 * PAGE)
        assert "has holes" in self.check_refused(servers, offered.said)


class TestSlots:
    @pytest.mark.parametrize("slot", [3, 16, 2**31, 2**32 - 1])
    def test_one_that_there_is_not(self, servers: ShardServers, offered: Offered, slot: int) -> None:
        servers.admit("a")
        with servers.lane(segment=offered.said) as lane:
            assert lane.welcome.shared
            with pytest.raises(errors.BadRequest, match=f"names region {slot} of shared memory; this lane has 2"):
                lane.pull(pull_request(region=slot))
            with pytest.raises(errors.BadRequest, match=f"names region {slot} of shared memory; this lane has 2"):
                lane.push([slot_push(slot)])
            assert servers.versions() == [1]
            lane.pull(pull_request(region=2))  # the lane goes on

    def test_values_and_gradients_lie_where_the_contract_says(self, servers: ShardServers, offered: Offered) -> None:
        servers.admit("a")
        before = servers.values()["w"]
        with servers.lane(segment=offered.said) as lane:
            [reply] = lane.pull(pull_request(region=2))
            assert not reply.chunks
            assert reply.headers[0].version == 1
            np.testing.assert_array_equal(offered.slot(2)[:4000].view(np.float32), before)
            assert not offered.slot(1).any()
            assert not offered.slot(2)[4000:].any()
            offered.slot(1)[:4000] = np.full(ELEMENTS, 0.5, np.float32).view(np.uint8)
            taken = lane.push([slot_push(1)])
            assert taken.shards[0].outcome == pb.ACCEPTED
        np.testing.assert_array_equal(servers.values()["w"], before - np.float32(0.5))

    def test_shards_that_are_too_large_for_one(self, offered: Offered) -> None:
        with check_training({"w": Variable((ELEMENTS + 25,))}) as servers:  # 4,100 bytes
            servers.admit("a")
            with servers.lane(segment=offered.said) as lane:
                with pytest.raises(errors.BadRequest, match="4160 bytes does not fit into a region of 4096"):
                    lane.pull(pull_request(region=1))
                with pytest.raises(errors.BadRequest, match="4160 bytes does not fit into a region of 4096"):
                    lane.push([slot_push(1)])
                assert not offered.slot(1).any()
                assert servers.versions() == [1]
                assert lane.pull(pull_request())[0].headers

    @pytest.mark.parametrize("count", [1, 3])
    def test_of_a_push_that_was_refused_is_free_again(self, shared: None, count: int) -> None:
        """The slot is free at once, and not only after a garbage collection."""
        variables = {"w": Variable((30,), partitioner=partitioners.FixedShards(3))}
        with ShardServers(variables, servers=count, shards=3) as servers, servers.worker("a") as worker:
            for _ in range(5):
                with pytest.raises(errors.NonFiniteGradient):
                    worker.push({"w": np.full(30, np.nan, np.float32)})
                taken = [memory_of(link.push_transport) for link in worker.servers.connections for _ in range(2)]
                assert all(taken)
                del taken

    def test_of_a_push_that_was_refused_is_free_again_where_it_overlaps(self, shared: None) -> None:
        with ShardServers(VARIABLES, shards=1) as servers:
            worker = servers.worker("a")
            with Pipeline(worker, overlap=True) as pipeline:
                for _ in range(5):
                    pipeline.pull()
                    pipeline.push({"w": np.full(ELEMENTS, np.nan, np.float32)})
                    with pytest.raises(errors.NonFiniteGradient):
                        pipeline.settle()
                taken = [memory_of(worker.servers.connections[0].push_transport) for _ in range(2)]
                assert all(taken)
                del taken

    def test_a_gradient_in_one_is_checked_as_any_other(self, servers: ShardServers, offered: Offered) -> None:
        servers.admit("a")
        offered.slot(1).view(np.float32)[ELEMENTS - 1] = np.nan
        with servers.lane(segment=offered.said) as lane:
            message = slot_push(1)
            with pytest.raises(errors.NonFiniteGradient, match="'w' contains nan"):
                lane.push([message])
            assert servers.versions() == [1]
            offered.slot(1)[:] = 0
            assert lane.push([message]).shards[0].outcome == pb.ACCEPTED

    def test_bytes_through_memory_are_counted_as_others_are(self, servers: ShardServers, offered: Offered) -> None:
        servers.admit("a")
        metrics = ("shoal_server_sent_bytes_total", "shoal_server_received_bytes_total")
        before = [servers.sample(metric) for metric in metrics]
        with servers.lane(segment=offered.said) as lane:
            lane.pull(pull_request(region=1))
            lane.push([slot_push(1)])
        assert [servers.sample(metric) for metric in metrics] == [value + 4000 for value in before]

    def test_of_a_segment_that_shrank_are_refused_and_the_lane_goes_on(
        self, servers: Watched, offered: Offered
    ) -> None:
        servers.admit("a")
        with servers.lane(segment=offered.said) as lane:
            lane.pull(pull_request(region=1))
            os.truncate(offered.path, HEADER_BYTES)
            with pytest.raises(errors.ShoalError, match="is lost"):
                lane.pull(pull_request(region=1))
            with pytest.raises(errors.BadRequest, match="this lane has 0"):
                lane.push([slot_push(2)])
            assert servers.versions() == [1]
            check_step(servers)
            assert lane.push(push_messages()).shards[0].outcome == pb.ACCEPTED


def close_lane(transport: Transport | None) -> None:
    """Closes the lane of a transport, but no segment."""
    assert isinstance(transport, LaneTransport)
    LaneTransport.close(transport)


def memory_of(transport: Transport | None) -> Any:
    assert transport
    return transport.memory()


def names_of_segments(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that receives the names of the segments that are made from now on."""
    names: list[str] = []
    create = Segment.create

    def noted(nbytes: int) -> Segment:
        made = create(nbytes)
        names.append(made.name)
        return made

    monkeypatch.setattr(Segment, "create", noted)
    return names


def shrink(client_lane: Transport | None) -> None:
    """Truncates a client's segment, as a process with its descriptor could. The segment has no name any more."""
    assert isinstance(client_lane, _shared_memory.SharedMemoryTransport)
    wanted = client_lane.segment.name
    for file in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{file}"
        if is_open(file) and wanted in os.readlink(path):
            os.truncate(path, HEADER_BYTES)
            return
    raise AssertionError(f"no descriptor of {wanted}")


@pytest.mark.usefixtures("shared")
class TestSharing:
    def test_a_segment_has_no_name_once_both_have_it(
        self, servers: ShardServers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = names_of_segments(monkeypatch)
        with servers.worker("a") as worker:
            worker.pull()
            worker.push(ONES)
            assert len(names) == 2
            assert not any((SHM / name).exists() for name in names)

    def test_it_is_made_before_its_lane(self, servers: ShardServers, monkeypatch: pytest.MonkeyPatch) -> None:
        """To create a segment may take long, and a server waits for a limited time for the first message."""
        lanes_before = servers.open_lanes
        made: list[int] = []
        create = Segment.create

        def noted(nbytes: int) -> Segment:
            made.append(servers.open_lanes)
            return create(nbytes)

        monkeypatch.setattr(Segment, "create", noted)
        with servers.worker("a") as worker:
            worker.pull()
        assert made == [lanes_before]

    def test_its_file_is_only_for_its_user(self, servers: ShardServers, monkeypatch: pytest.MonkeyPatch) -> None:
        modes = []
        opened = Segment.open

        def spy(name: str, *rest: Any) -> Segment:
            modes.append(stat.S_IMODE((SHM / name).stat().st_mode))
            return opened(name, *rest)

        monkeypatch.setattr(Segment, "open", spy)
        with servers.worker("a") as worker:
            worker.pull()
        assert modes == [0o600]

    def test_values_outlive_their_lane(self, servers: ShardServers) -> None:
        """Pulled values stay unchanged after later pulls, and after the end of the lane."""
        with servers.worker("a") as worker:
            kept = []
            for step in range(6):  # more than there are regions
                kept.append((step, worker.pull()["w"]))
                worker.push(ONES)
        first = kept[0][1]
        for step, value in kept:
            np.testing.assert_array_equal(value, first - np.float32(step), strict=True)

    @pytest.mark.parametrize("refused", ["create", "open"], ids=["by this host", "by the server"])
    def test_memory_that_was_refused_is_shared_when_the_cause_is_gone(
        self, shared: None, monkeypatch: pytest.MonkeyPatch, refused: str
    ) -> None:
        def refuse(*_: object) -> Segment:
            raise SegmentUnavailable("/dev/shm is full")

        monkeypatch.setattr(selector, "FIRST_RETRY_S", 0.01)
        with ShardServers(VARIABLES) as servers, servers.worker("a") as worker:
            [connection] = worker.servers.connections
            with monkeypatch.context() as patch, capture_logs() as logs:
                patch.setattr(Segment, refused, refuse)
                worker.pull()
                worker.push(ONES)
                assert type(connection.pull_transport) is type(connection.push_transport) is LaneTransport
            assert "/dev/shm is full" in fallbacks(logs)

            def check_shares() -> bool:
                worker.pull()
                assert worker.push(ONES).outcome == "accepted"
                return type(connection.pull_transport) is type(connection.push_transport) is SharedMemoryTransport

            wait_until(check_shares, what="its shared memory")

    @pytest.mark.parametrize("full", ["statvfs", "fallocate"])
    def test_a_full_dev_shm_is_gone_round_and_says_so(self, monkeypatch: pytest.MonkeyPatch, full: str) -> None:
        with check_training(VARIABLES, transport="tcp") as servers:
            fill(monkeypatch, full)
            with capture_logs() as logs, servers.client("a", step=servers.admit("a"), transport="auto") as worker:
                before = worker.pull()["w"]
                assert worker.push(ONES).outcome == "accepted"
                np.testing.assert_array_equal(worker.pull()["w"], before - np.float32(1))
                assert servers.open_lanes == 4  # it is TCP that it falls back to
        assert len(fallbacks(logs)) == 2
        for why in fallbacks(logs):
            assert "/dev/shm" in why
            assert "give the machine or container a larger /dev/shm (docker: --shm-size)" in why

    def test_a_server_that_does_not_see_it_is_gone_round_and_says_so(
        self, servers: ShardServers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """The server has its own /dev/shm, as in another container."""
        opened = Segment.open
        monkeypatch.setattr(Segment, "open", lambda *said: opened(*said, directory=tmp_path))
        names = names_of_segments(monkeypatch)
        with capture_logs() as logs, servers.worker("a") as worker:
            worker.pull()
            assert worker.push(ONES).outcome == "accepted"
            assert len(names) == 2
            assert not any((SHM / name).exists() for name in names)
        assert ["No such file" in why for why in fallbacks(logs)] == [True, True]

    def test_a_server_of_another_host_is_not_offered_any(
        self, servers: ShardServers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        servers.lanes[0].offer.host = "another"
        monkeypatch.setattr(Segment, "create", lambda nbytes: pytest.fail("a segment was made"))
        with capture_logs() as logs, servers.worker("a") as worker:
            worker.pull()
            assert worker.push(ONES).outcome == "accepted"
        assert fallbacks(logs) == []

    def test_small_calls_share_none(self, servers: ShardServers, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(Segment, "create", lambda nbytes: pytest.fail("a segment was made"))
        with servers.worker("a") as worker:
            worker.pull()

    def test_a_segment_that_shrinks_before_a_pull(self, servers: ShardServers) -> None:
        with servers.worker("a") as worker:
            before = worker.pull()["w"].copy()
            assert worker.push(ONES).outcome == "accepted"
            shrink(worker.servers.connections[0].pull_transport)
            with capture_logs() as logs:
                np.testing.assert_array_equal(worker.pull()["w"], before - np.float32(1))
            assert ["truncated to" in why for why in fallbacks(logs)] == [True]
            assert worker.push(ONES).outcome == "accepted"
        np.testing.assert_array_equal(servers.values()["w"], before - np.float32(2))

    def test_a_segment_that_shrinks_before_a_push(self, servers: ShardServers) -> None:
        with servers.worker("a") as worker:
            before = worker.pull()["w"].copy()
            assert worker.push(ONES).outcome == "accepted"
            shrink(worker.servers.connections[0].push_transport)
            with capture_logs() as logs:
                assert worker.push(ONES).outcome == "accepted"
            assert ["truncated to" in why for why in fallbacks(logs)] == [True]
            assert servers.versions() == [3]
            np.testing.assert_array_equal(worker.pull()["w"], before - np.float32(2))

    def test_a_segment_that_shrinks_with_a_gradient_in_it(self, servers: ShardServers) -> None:
        """The step still counts once, because the client still has its arrays."""
        with servers.worker("a") as worker:
            before = worker.pull()["w"].copy()
            push = worker.prepare(ONES, None, 1.0)
            ready = push.payload_for(worker.servers.connections[0])
            assert ready.region
            shrink(worker.servers.connections[0].push_transport)
            assert worker.send(dataclasses.replace(push, payload_for=lambda _: ready)).outcome == "accepted"
            assert servers.versions() == [2]
            np.testing.assert_array_equal(worker.pull()["w"], before - np.float32(1))

    @pytest.mark.parametrize("call", [Frame.PULL, Frame.PUSH])
    def test_a_segment_that_shrinks_when_a_server_is_about_to_look(
        self, servers: ShardServers, monkeypatch: pytest.MonkeyPatch, call: Frame
    ) -> None:
        opened, view = Segment.open, Segment.view
        mapped: list[Segment] = []  # by the server
        shrunk: list[Segment] = []
        armed = threading.Event()

        def opens(*given: Any) -> Segment:
            mapped.append(opened(*given))
            return mapped[-1]

        def shrinks(segment: Segment, offset: int, nbytes: int) -> memoryview:
            if armed.is_set() and segment in mapped and not shrunk:
                shrunk.append(segment)
                shrink(link.pull_transport if call is Frame.PULL else link.push_transport)
            return view(segment, offset, nbytes)

        monkeypatch.setattr(Segment, "open", opens)
        monkeypatch.setattr(Segment, "view", shrinks)
        with servers.worker("a") as worker:
            before = worker.pull()["w"].copy()
            [link] = worker.servers.connections
            if call is Frame.PUSH:
                armed.set()
            assert worker.push(ONES).outcome == "accepted"
            armed.set()
            assert servers.versions() == [2]
            np.testing.assert_array_equal(worker.pull()["w"], before - np.float32(1))
            assert len(shrunk) == 1

    def test_a_gradient_that_is_lost_with_its_segment_is_an_error(self, servers: ShardServers) -> None:
        """The segment has the only copy of the gradient, which was made so that its arrays could change at once."""
        with servers.worker("a") as worker:
            push = worker.prepare(ONES, None, 1.0, memory=private)
            shrink(worker.servers.connections[0].push_transport)
            with pytest.raises(errors.ShoalError, match="lost"):
                worker.send(push)
            assert servers.versions() == [1]
            assert worker.push(ONES).outcome == "accepted"

    def test_a_gradient_prepared_for_a_lane_that_broke_goes_over_the_next(self, servers: ShardServers) -> None:
        before = servers.values()["w"]
        with servers.worker("a") as worker:
            arrays = {"w": np.ones(ELEMENTS, np.float32)}
            push = worker.prepare(arrays, None, 1.0, memory=private)
            arrays["w"][:] = 7
            close_lane(worker.servers.connections[0].push_transport)
            assert worker.send(push).outcome == "accepted"
        np.testing.assert_array_equal(servers.values()["w"], before - np.float32(1))

    def test_more_gradients_than_slots_go_as_chunks(self, servers: ShardServers) -> None:
        before = servers.values()["w"]
        with servers.worker("a") as worker:
            pushes = [
                worker.prepare({"w": np.full(ELEMENTS, value, np.float32)}, None, 1.0, memory=private)
                for value in (1, 2, 3)
            ]
            for number, push in enumerate(pushes, start=1):
                worker.send(dataclasses.replace(push, step=number))
        np.testing.assert_array_equal(servers.values()["w"], before - np.float32(6))


def private(nbytes: int) -> np.ndarray:
    return np.empty(nbytes, np.uint8)


def fill(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Makes /dev/shm appear full to this process."""
    if how == "statvfs":
        real = os.statvfs(SHM)
        fields = list(real)
        fields[4] = fields[3] = 0  # f_bavail, f_bfree
        monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    else:

        def no_space(*_: int) -> None:
            raise OSError(28, os.strerror(28))

        monkeypatch.setattr(os, "posix_fallocate", no_space)


TRANSPORTS = pytest.mark.parametrize("transport", ["tcp", "shared memory"])


class TestAnswersThatLie:
    """Invalid answers of another version or a faulty proxy: the client refuses them and asks again on a new lane."""

    @pytest.mark.parametrize(
        ("headers", "chunks", "said"),
        [
            ([0], [Chunk(0, 0, 0, memoryview(bytes(4004)))], "ends at byte 4004 of 4000"),
            ([0], [Chunk(0, 0, 4, memoryview(bytes(3996)))], "after 3996 of 4000 bytes; byte 0 is missing"),
            ([0], [Chunk(0, 0, 0, memoryview(bytes(3996)))], "ended after 3996 of 4000"),
            ([0], [Chunk(1, 0, 0, memoryview(bytes(4000)))], "not one of the expected arenas"),
            ([], [Chunk(0, 0, 0, memoryview(bytes(4000)))], "lacks headers of some of them"),
            ([1], [Chunk(0, 0, 0, memoryview(bytes(4000)))], "lacks headers of some of them"),
        ],
        ids=["long", "late", "short", "another shard", "no header", "another's header"],
    )
    def test_values_that_do_not_fit(
        self,
        servers: ShardServers,
        monkeypatch: pytest.MonkeyPatch,
        headers: list[int],
        chunks: Sequence[Chunk],
        said: str,
    ) -> None:
        @contextmanager
        def lies(_pull: PendingPull, _step: int, **_: Any) -> Iterator[Iterator[tuple[list[Buffer], int]]]:
            encoded = pb.PullReply(headers=[header_pb2.ShardHeader(shard=shard) for shard in headers])
            yield iter([(encode_values(encoded.SerializeToString(), chunks), 0)])

        with servers.worker("a") as worker:
            with monkeypatch.context() as lying:
                lying.setattr(lane_endpoint, "replies", lies)
                with pytest.raises(errors.BadChunk, match=said):
                    worker.pull()
            np.testing.assert_array_equal(worker.pull()["w"], VARIABLES["w"])
            assert worker.push(ONES).outcome == "accepted"

    @pytest.mark.parametrize(
        ("kind", "payload"), [(Frame.PULL, b""), (Frame.END, b""), (Frame.VALUES, b""), (Frame.PUSHED, b"\xff")]
    )
    def test_an_answer_to_a_push_that_is_none(
        self, servers: ShardServers, monkeypatch: pytest.MonkeyPatch, kind: Frame, payload: bytes
    ) -> None:
        send = Lane.send

        def lies(lane: Lane, sent: Frame, pieces: Sequence[Buffer] = (), **options: Any) -> None:
            send(lane, *((kind, [payload]) if sent is Frame.PUSHED else (sent, pieces)), **options)

        with servers.worker("a") as worker:
            with monkeypatch.context() as lying:
                lying.setattr(Lane, "send", lies)
                with pytest.raises(errors.BadFrame):
                    worker.push(ONES)
            assert worker.push(ONES).outcome == "accepted"  # it counts, and counts once
            assert servers.versions() == [2]


class TestLanesThatBreak:
    """Broken lanes: a call is repeated and counts once, wherever its lane broke."""

    def breaking(self, monkeypatch: pytest.MonkeyPatch, kind: Frame, at: int) -> list[Any]:
        """Makes servers' lanes break in place of a frame of this kind, after a number of such frames."""
        send, stream = Lane.send, Lane.stream
        seen = []

        def note(lane: Lane, sent: Frame) -> None:
            if sent is kind:
                seen.append(sent)
                if len(seen) == at + 1:
                    lane.close()
                    raise errors.Unreachable("broken by the test")

        def sends(lane: Lane, sent: Frame, pieces: Sequence[bytearray | bytes] = (), **options: Any) -> None:
            note(lane, sent)
            return send(lane, sent, pieces, **options)

        def streams(lane: Lane, sent: Frame, payloads: Iterator[Any], **options: Any) -> None:
            def noted() -> Iterator[list[bytearray | memoryview]]:
                for pieces in payloads:
                    note(lane, sent)
                    yield pieces

            return stream(lane, sent, noted(), **options)

        monkeypatch.setattr(_lane, "BATCH_BYTES", 1)  # what was before has been sent
        monkeypatch.setattr(Lane, "send", sends)
        monkeypatch.setattr(Lane, "stream", streams)
        return seen

    @TRANSPORTS
    @pytest.mark.parametrize("at", range(4))
    def test_a_push_that_was_not_answered_counts_once(
        self, monkeypatch: pytest.MonkeyPatch, transport: str, at: int
    ) -> None:
        """The push goes to two servers. The answers to the first and to the second phase get lost in turn."""
        use(transport, monkeypatch)
        variables = {"w": Variable((100,), partitioner=partitioners.FixedShards(2))}
        with ShardServers(variables, servers=2) as servers, servers.worker("a") as worker:
            before = worker.pull()["w"].copy()
            seen = self.breaking(monkeypatch, Frame.PUSHED, at)
            assert worker.push({"w": np.ones(100, np.float32)}).outcome == "accepted"
            assert len(seen) > at
            assert servers.versions() == [1, 1]
            np.testing.assert_array_equal(worker.pull()["w"], before - np.float32(1))

    @TRANSPORTS
    def test_a_push_in_one_phase_that_was_not_answered_counts_once(
        self, monkeypatch: pytest.MonkeyPatch, transport: str
    ) -> None:
        use(transport, monkeypatch)
        with check_training(VARIABLES) as servers, servers.worker("a") as worker:
            before = worker.pull()["w"].copy()
            seen = self.breaking(monkeypatch, Frame.PUSHED, 0)
            assert worker.push(ONES).outcome == "accepted"
            assert len(seen) == 2
            assert servers.versions() == [2]
            np.testing.assert_array_equal(worker.pull()["w"], before - np.float32(1))

    @TRANSPORTS
    @pytest.mark.parametrize("at", range(3))
    def test_a_pull_that_breaks_off_begins_again(
        self, monkeypatch: pytest.MonkeyPatch, transport: str, at: int
    ) -> None:
        use(transport, monkeypatch)
        variables = {"w": Variable((700_000,), initializer=initializers.Uniform(-1, 1))}  # 3 chunks
        with check_training(variables) as servers, servers.worker("a") as worker:
            expected = servers.values()["w"]
            seen = self.breaking(monkeypatch, Frame.VALUES, at)
            np.testing.assert_array_equal(worker.pull()["w"], expected)
            assert transport == "shared memory" or len(seen) > at

    @pytest.mark.parametrize("after", [0, 1, 8, 9, 2000, 4000])
    def test_a_push_that_breaks_off_on_its_way_counts_once(self, after: int) -> None:
        """A proxy forwards some bytes of the push, and then closes the connection."""
        with check_training(VARIABLES) as servers, servers.worker("a") as worker:
            before = worker.pull()["w"].copy()
            address = servers.lanes[0].offer.address
            hello_bytes = 8 + len(hello(servers))
            with proxy(address, hello_bytes + after) as between:
                servers.lanes[0].offer.address = between
                try:
                    push = worker.prepare(ONES, None, 1.0)
                    push.payload_for(worker.servers.connections[0])  # opens the lane for pushes
                finally:
                    servers.lanes[0].offer.address = address
                assert worker.send(push).outcome == "accepted"
            assert servers.versions() == [2]
            np.testing.assert_array_equal(worker.pull()["w"], before - np.float32(1))

    def test_a_worker_that_leaves_while_its_pull_waits_is_forgotten(self) -> None:
        with two_in_step() as (servers, a, b):
            a.push(ONES)
            with servers.lane() as lane:
                lane.send(Frame.PULL, pull_request().SerializeToString())
                wait_until(lambda: servers.waiting() == 1)
                before = servers.open_lanes
            wait_until(lambda: servers.waiting() == 0)
            wait_until(lambda: servers.open_lanes == before - 1)
            assert b.push(ONES).outcome == "accepted"
            np.testing.assert_array_equal(a.pull()["w"], VARIABLES["w"] - 1)

    def test_a_worker_that_speaks_while_its_pull_waits_is_let_go(self) -> None:
        with two_in_step() as (servers, a, b):
            a.push(ONES)
            with servers.lane() as lane:
                lane.send(Frame.PULL, pull_request().SerializeToString())
                wait_until(lambda: servers.waiting() == 1)
                lane.send(Frame.PULL, pull_request().SerializeToString())
                with pytest.raises(errors.Unreachable):
                    lane.receive()
            wait_until(lambda: servers.waiting() == 0)
            assert b.push(ONES).outcome == "accepted"

    def test_an_answer_that_comes_when_its_lane_is_over_goes_nowhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another worker's push completes the pull, but the answer comes only after the pull's lane has ended."""
        with two_in_step() as (servers, a, b):
            a.push(ONES)
            about_to_answer, go_on = threading.Event(), threading.Event()
            answered = PendingPull.answer

            def late(pull: PendingPull, step: int) -> None:
                about_to_answer.set()
                assert go_on.wait(20)
                answered(pull, step)

            with ThreadPoolExecutor(1) as pool:
                with servers.lane() as lane:
                    lane.send(Frame.PULL, pull_request().SerializeToString())
                    wait_until(lambda: servers.waiting() == 1)
                    monkeypatch.setattr(PendingPull, "answer", late)
                    pushed = pool.submit(b.push, ONES)
                    assert about_to_answer.wait(20)
                    open_lanes = servers.open_lanes
                wait_until(lambda: servers.open_lanes < open_lanes, what="the lane's end")
                strangers = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(20)]  # one gets the lane's descriptor
                go_on.set()
                assert pushed.result(20).outcome == "accepted"
            for stranger in strangers:
                with pytest.raises(BlockingIOError):
                    os.eventfd_read(stranger)
                os.close(stranger)


@contextmanager
def two_in_step() -> Iterator[tuple[ShardServers, ParameterClient, ParameterClient]]:
    """Yields a server, and two workers that take their steps together."""
    with (
        ShardServers(VARIABLES, shards=1, mode=consistency.Synchronous()) as servers,
        servers.worker("a") as a,
        servers.worker("b") as b,
    ):
        yield servers, a, b


def use(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TRANSPORT", "auto" if transport == "shared memory" else transport)
    if transport == "shared memory":
        monkeypatch.setattr(_shared_memory, "SHARED_FROM_BYTES", 0)


@contextmanager
def proxy(address: str, client_bytes: int) -> Iterator[str]:
    """Yields the address of a proxy that forwards one connection until its client has sent this number of bytes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def forward() -> None:
        with listener.accept()[0] as client, socket.create_connection(_rpc.parse_address(address)) as server:
            back = threading.Thread(target=pipe, args=(server, client, 1 << 60))
            back.start()
            pipe(client, server, client_bytes)
            for end in (client, server):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            back.join()

    thread = threading.Thread(target=forward)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        thread.join(20)
        listener.close()


def pipe(source: socket.socket, target: socket.socket, most: int) -> None:
    try:
        while most and (part := source.recv(min(most, 1 << 16))):
            target.sendall(part)
            most -= len(part)
    except OSError:
        pass


@pytest.mark.usefixtures("impatient")
class TestStalls:
    def test_slow_reader_gets_the_version_it_started_with(self) -> None:
        with check_training(BIG) as servers, servers.worker("b") as b:
            servers.admit("a")
            with servers.lane() as lane:
                sent = servers.sample("shoal_server_sent_bytes_total")
                lane.send(Frame.PULL, pull_request().SerializeToString())
                wait_until(lambda: servers.sample("shoal_server_sent_bytes_total") > sent, what="its first bytes")
                assert b.push({"big": np.ones(4 << 20, np.float32)}).outcome == "accepted"
                kinds: dict[Frame, int] = {}
                while Frame.END not in kinds:
                    kind, payload = lane.receive()
                    kinds[kind] = kinds.get(kind, 0) + 1
                    if kind is Frame.VALUES:
                        assert not any(any(chunk.data) for chunk in pb.PullReply.FromString(payload).chunks)
                assert kinds[Frame.VALUES] == 16
            assert (b.pull()["big"] == -1).all()

    def test_a_worker_that_stops_reading_a_pull_is_let_go(self) -> None:
        with check_training(BIG) as servers:
            servers.admit("a")
            with servers.lane() as lane:
                lane.send(Frame.PULL, pull_request().SerializeToString())
                assert servers.open_lanes == 3
                taken = 0
                while servers.open_lanes == 3:
                    check_step(servers)  # pulls and pushes of others go on
                    taken += 1
                assert taken
            wait_until(lambda: lane_threads() == 2, what="its thread's end")

    def test_a_worker_that_stops_in_the_middle_of_a_push_is_let_go(self, servers: ShardServers) -> None:
        servers.admit("a")
        first, *_ = push_messages()
        with servers.lane() as lane:
            lane.send(Frame.PUSH, first)
            with pytest.raises(errors.Unreachable):
                lane.receive()
        wait_until(lambda: lane_threads() == 2, what="its thread's end")
        assert servers.versions() == [1]

    @pytest.mark.parametrize("sent", [1, 8, 1000])
    def test_a_worker_that_stops_in_the_middle_of_a_frame_is_let_go(self, servers: ShardServers, sent: int) -> None:
        servers.admit("a")
        with connected(servers) as connection:
            connection.sendall(frame(Frame.HELLO, hello(servers)))
            assert connection.recv(100)[0] == Frame.WELCOME
            connection.sendall(b"".join(frame(Frame.PUSH, message) for message in push_messages())[:sent])
            assert said_until_closed(connection) == b""
        assert servers.versions() == [1]

    def test_a_push_in_single_bytes_has_one_deadline_in_all(
        self, servers: ShardServers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(chunk_frames, "transfer_s", lambda _: 0.3)
        servers.admit("a")
        first, second = push_messages()
        with connected(servers) as connection:
            connection.sendall(frame(Frame.HELLO, hello(servers)) + frame(Frame.PUSH, first))
            send_slowly(connection, frame(Frame.PUSH, second))
        wait_until(lambda: lane_threads() == 2, what="its thread's end")
        assert servers.versions() == [1]

    def test_a_worker_that_is_silent_between_calls_is_kept(self, servers: ShardServers) -> None:
        servers.admit("a")
        with servers.lane() as lane:
            check_outlasts_a_stall(servers)
            assert lane.pull(pull_request())

    def test_a_pull_that_waits_for_others_is_kept(self) -> None:
        with two_in_step() as (servers, a, b), servers.lane() as lane:
            a.push(ONES)
            lane.send(Frame.PULL, pull_request().SerializeToString())
            wait_until(lambda: servers.waiting() == 1)
            check_outlasts_a_stall(servers)
            assert servers.waiting() == 1
            b.push(ONES)
            assert lane.receive()[0] is Frame.VALUES


def check_outlasts_a_stall(servers: ShardServers) -> None:
    """Waits until the server disconnects a client that stalls from now on."""
    with connected(servers) as connection:
        connection.sendall(frame(Frame.HELLO, hello(servers)) + b"\3")
        assert said_until_closed(connection)[0] == Frame.WELCOME


def lane_threads() -> int:
    return sum(thread.name == "lane" for thread in threading.enumerate())
