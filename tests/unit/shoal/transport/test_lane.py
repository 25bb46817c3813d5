"""Frames on a lane: they arrive unchanged in any pieces, and peers that close, stall or send bad data are detected."""

import socket
import struct
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import errors
from shoal._transport import lane_socket as _lane_socket
from shoal._transport.connection import ByteStream
from shoal._transport.frames import PARAMETER_SERVER, Frame
from shoal._transport.lane import Lane
from shoal._wire.limits import MAX_MESSAGE_BYTES

LARGE = 4 << 20


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The two ends of a connection on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        yield near, far


@contextmanager
def lanes(**options: Any) -> Iterator[tuple[Lane, Lane]]:
    with connected() as (near, far):
        ends = Lane(near, "near", PARAMETER_SERVER, **options), Lane(far, "far", PARAMETER_SERVER, **options)
        try:
            yield ends
        finally:
            for lane in ends:
                lane.close()


@contextmanager
def lane_and_socket(**options: Any) -> Iterator[tuple[Lane, socket.socket]]:
    """A lane, and the plain other end of its connection."""
    with connected() as (near, far):
        lane = Lane(near, "far", PARAMETER_SERVER, **options)
        try:
            yield lane, far
        finally:
            lane.close()


def frame(kind: int | Frame, payload: bytes = b"", *, size: int | None = None, reserved: bytes = bytes(3)) -> bytes:
    return struct.pack("<B3sI", kind, reserved, len(payload) if size is None else size) + payload


class PolledStream:
    """A stream that records the bytes of each read that does not block."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self.polled: list[bytes] = []
        self.sendmsg, self.recvmsg_into, self.setsockopt = stream.sendmsg, stream.recvmsg_into, stream.setsockopt
        self.fileno, self.shutdown, self.close = stream.fileno, stream.shutdown, stream.close

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0, /) -> int:
        count = self._stream.recv_into(buffer, nbytes, flags)
        if flags & socket.MSG_DONTWAIT:
            self.polled.append(bytes(buffer[:count]))
        return count


def spy_on_polls(lane: Lane) -> list[bytes]:
    """Returns a list that receives the bytes of each read in which the lane polls its socket."""
    streams: list[PolledStream] = []

    def protect(stream: ByteStream) -> PolledStream:
        streams.append(PolledStream(stream))
        return streams[0]

    lane.secure(protect)
    return streams[0].polled


def send_forever(lane: Lane) -> None:
    while True:
        lane.send(Frame.VALUES, [bytes(LARGE)])


def received(lane: Lane) -> tuple[IntEnum, bytes]:
    kind, payload = lane.receive()
    return kind, bytes(payload)


class TestFrames:
    @pytest.mark.parametrize("kind", Frame)
    def test_each_kind_is_as_the_contract_says(self, kind: Frame) -> None:
        with lane_and_socket() as (lane, far):
            lane.send(kind, [b"ab", b"c"])
            assert far.recv(100) == bytes([kind, 0, 0, 0, 3, 0, 0, 0]) + b"abc"
            far.sendall(frame(kind, b"payload"))
            assert received(lane) == (kind, b"payload")

    def test_an_end_may_go_with_a_frame(self) -> None:
        with lanes() as (near, far):
            near.send(Frame.VALUES, [b"x"], end=True)
            near.send(Frame.VALUES, end=True)
            said = [received(far) for _ in range(4)]
        assert said == [(Frame.VALUES, b"x"), (Frame.END, b""), (Frame.VALUES, b""), (Frame.END, b"")]

    @given(
        st.lists(
            st.tuples(
                st.sampled_from(Frame),
                st.lists(st.binary(max_size=300) | st.integers(60_000, 200_000).map(bytes), max_size=6),
                st.booleans(),
            ),
            max_size=12,
        )
    )
    def test_any_frames_arrive_as_they_were_sent(self, frames: Sequence[tuple[Frame, list[bytes], bool]]) -> None:
        expected: list[tuple[IntEnum, bytes]] = []
        for kind, pieces, end in frames:
            expected += [(kind, b"".join(pieces)), *([(Frame.END, b"")] if end else [])]

        def send(lane: Lane) -> None:
            for kind, pieces, end in frames:
                lane.send(kind, pieces, end=end)

        with lanes() as (near, far), ThreadPoolExecutor(1) as pool:
            sending = pool.submit(send, near)
            assert [received(far) for _ in expected] == expected
            sending.result()

    @given(
        st.lists(st.tuples(st.sampled_from(Frame), st.integers(0, 3000) | st.integers(60_000, 150_000)), max_size=8),
        st.data(),
    )
    def test_frames_may_arrive_cut_anywhere(self, frames: Sequence[tuple[int, int]], data: st.DataObject) -> None:
        expected = [(kind, bytes([index + 1]) * size) for index, (kind, size) in enumerate(frames)]
        stream = b"".join(frame(*each) for each in expected)
        cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=12)))
        parts = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]

        def send(far: socket.socket) -> None:
            for part in parts:
                far.sendall(part)

        with lane_and_socket() as (lane, far), ThreadPoolExecutor(1) as pool:
            far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sending = pool.submit(send, far)
            assert [received(lane) for _ in expected] == expected
            sending.result()

    def test_a_payload_may_be_as_large_as_any_message(self) -> None:
        payload = bytes(range(256)) * (MAX_MESSAGE_BYTES // 256)
        with lanes() as (near, far), ThreadPoolExecutor(1) as pool:
            for _ in range(2):
                sending = pool.submit(near.send, Frame.VALUES, [memoryview(payload)])
                assert received(far) == (Frame.VALUES, payload)
                sending.result()

    def test_a_frame_may_have_more_pieces_than_one_system_call_takes(self) -> None:
        pieces = [bytes([index % 256]) * (index % 5) for index in range(3000)]
        with lanes() as (near, far):
            near.send(Frame.PUSH, pieces)
            assert received(far) == (Frame.PUSH, b"".join(pieces))

    def test_a_payload_is_good_until_the_next(self) -> None:
        with lanes() as (near, far):
            near.send(Frame.VALUES, [b"first"])
            near.send(Frame.VALUES, [b"second"])
            _, first = far.receive()
            assert bytes(first) == b"first"
            _, second = far.receive()
            assert bytes(second) == b"second"


class TestLies:
    @pytest.mark.parametrize(
        ("lie", "said"),
        [
            (frame(0), "sent bytes that are not a frame"),
            (frame(18), "sent bytes that are not a frame"),
            (frame(255), "sent bytes that are not a frame"),
            (frame(3, reserved=b"\1\0\0"), "sent bytes that are not a frame"),
            (frame(3, reserved=b"\0\0\x80"), "sent bytes that are not a frame"),
            (b"GET / HTTP/1.1\r\n", "sent bytes that are not a frame: b'GET / HT'"),
            (frame(3, size=MAX_MESSAGE_BYTES + 1), f"sent a frame of {MAX_MESSAGE_BYTES + 1} bytes"),
            (frame(3, size=2**32 - 1), "sent a frame of 4294967295 bytes"),
        ],
    )
    def test_bytes_that_are_not_a_frame_close_the_lane(self, lie: bytes, said: str) -> None:
        with lane_and_socket() as (lane, far):
            far.sendall(frame(Frame.PULL, b"a good one") + lie)
            assert received(lane) == (Frame.PULL, b"a good one")
            with pytest.raises(errors.BadFrame, match=f"far {said}"):
                lane.receive()
            assert lane.closed
            assert far.recv(1) == b""

    def test_a_receiver_may_want_less(self) -> None:
        with lane_and_socket() as (lane, far):
            far.sendall(frame(3, bytes(10)) + frame(3, size=11))
            assert lane.receive(most=10)[0] is Frame.PULL
            with pytest.raises(errors.BadFrame, match="sent a frame of 11 bytes; the limit is 10"):
                lane.receive(most=10)

    def test_length_is_checked_before_memory_is_allocated(self) -> None:
        with lane_and_socket() as (lane, far):
            far.sendall(frame(3, size=2**32 - 1))
            tracemalloc.start()
            try:
                with pytest.raises(errors.BadFrame):
                    lane.receive()
                assert tracemalloc.get_traced_memory()[1] < 1 << 20
            finally:
                tracemalloc.stop()


class TestEnds:
    def test_other_end_closes_between_frames(self) -> None:
        with lane_and_socket() as (lane, far):
            far.sendall(frame(Frame.END))
            far.close()
            assert received(lane) == (Frame.END, b"")
            with pytest.raises(errors.Unreachable, match="the lane to far broke: closed by the other end"):
                lane.receive()
            assert lane.closed

    @pytest.mark.parametrize("sent", [1, 7, 8, 9, 99])
    def test_other_end_closes_within_a_frame(self, sent: int) -> None:
        with lane_and_socket() as (lane, far):
            far.sendall(frame(Frame.PULL, bytes(100))[:sent])
            far.close()
            with pytest.raises(errors.Unreachable, match="closed by the other end"):
                lane.receive()
            assert lane.closed

    def test_other_end_closes_during_a_send(self) -> None:
        with lane_and_socket() as (lane, far):
            far.close()
            with pytest.raises(errors.Unreachable, match="broke"):
                send_forever(lane)
            assert lane.closed

    def test_a_blocked_receive_ends_when_its_own_end_is_closed(self) -> None:
        with lanes() as (near, far), ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(far.receive)
            near.send(Frame.PULL, [b"x"])  # it has begun
            assert waiting.result(20)[0] is Frame.PULL
            waiting = pool.submit(far.receive)
            far.close()
            with pytest.raises(errors.Unreachable):
                waiting.result(20)

    def test_a_blocked_send_ends_when_its_own_end_is_closed(self) -> None:
        with lanes() as (near, far), ThreadPoolExecutor(1) as pool:
            begun = threading.Event()

            def send() -> None:
                while True:
                    near.send(Frame.VALUES, [bytes(LARGE)])
                    begun.set()

            blocked = pool.submit(send)
            assert far.receive()[0] is Frame.VALUES
            assert begun.wait(20)
            near.close()
            with pytest.raises(errors.Unreachable):
                blocked.result(20)

    @pytest.mark.parametrize("call", [lambda lane: lane.send(Frame.END), lambda lane: lane.receive()])
    def test_a_closed_lane_carries_nothing(self, call: Callable[..., Any]) -> None:
        with lanes() as (near, _):
            near.close()
            near.close()  # harmless
            with pytest.raises(errors.Unreachable):
                call(near)

    def test_connecting_to_a_closed_port_is_unreachable(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        with pytest.raises(errors.Unreachable, match=f"no lane to 127.0.0.1:{port}: .*refused"):
            Lane.connect("127.0.0.1", port, PARAMETER_SERVER, timeout_s=5.0)

    def test_connecting_to_an_unknown_host_is_unreachable(self) -> None:
        with pytest.raises(errors.Unreachable, match="no lane to no such host:1"):
            Lane.connect("no such host", 1, PARAMETER_SERVER, timeout_s=5.0)

    @pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
    def test_hosts_of_ipv6_are_written_in_brackets(self) -> None:
        try:
            listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
        except OSError:
            pytest.skip("no IPv6 on loopback")
        with listener:
            lane = Lane.connect("[::1]", listener.getsockname()[1], PARAMETER_SERVER, timeout_s=5.0)
            assert lane.peer == f"[::1]:{listener.getsockname()[1]}"
            lane.close()


class TestStalls:
    @pytest.mark.parametrize("sent", [1, 7, 8, 50])
    def test_incomplete_frame_exceeds_its_deadline(self, sent: int) -> None:
        with lane_and_socket(stall_s=0.05) as (lane, far):
            far.sendall(frame(Frame.PULL, bytes(100))[:sent])
            with pytest.raises(errors.DeadlineExceeded, match=r"far has sent nothing for 0\.05 s"):
                lane.receive()
            assert lane.closed
            assert far.recv(1) == b""

    def test_unread_frame_exceeds_its_deadline(self) -> None:
        with lane_and_socket(stall_s=0.05) as (lane, _):
            with pytest.raises(errors.DeadlineExceeded, match=r"far has read nothing of a VALUES frame for 0\.05 s"):
                send_forever(lane)
            assert lane.closed

    @pytest.mark.parametrize("stall_s", [0.01, 30.0], ids=["longer than a stall", "shorter than a stall"])
    def test_frame_that_does_not_begin_in_time_exceeds_its_deadline(self, stall_s: float) -> None:
        with lane_and_socket(stall_s=stall_s) as (lane, _):
            with pytest.raises(errors.DeadlineExceeded, match=r"far has sent nothing for 0\.05 s"):
                lane.receive(within_s=0.05)
            assert lane.closed

    @pytest.mark.parametrize("within_s", [None, 20.0, 30.0])
    def test_wait_for_a_frame_may_exceed_the_stall_limit(self, within_s: float | None) -> None:
        with lanes(stall_s=0.02) as (near, far), ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(far.receive, within_s=within_s)
            with lane_and_socket() as (clock, _), pytest.raises(errors.DeadlineExceeded):
                clock.receive(within_s=0.1)  # longer than a stall
            assert not waiting.done()
            near.send(Frame.END)
            assert waiting.result(20)[0] is Frame.END


def test_lane_sends_without_delay_and_detects_vanished_hosts() -> None:
    with connected() as (near, _):
        Lane(near, "far", PARAMETER_SERVER)
        assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, interval, count = (
            near.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + interval * count <= 30


def test_an_end_that_sends_nothing_detects_a_vanished_host_within_seconds() -> None:
    with connected() as (near, _):
        lane = Lane(near, "far", PARAMETER_SERVER)
        assert not near.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT), "a reader that is busy would be cut"
        lane.detect_loss()
        idle, interval, count, unconfirmed_ms = (
            near.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        )
        assert idle + interval * count == unconfirmed_ms / 1000 == _lane_socket.LOSS_S
        lane.close()
        with pytest.raises(errors.Unreachable):
            lane.detect_loss()


def test_a_lane_within_the_host_needs_no_probes() -> None:
    near, far = socket.socketpair()
    with near, far:
        Lane(near, "far", PARAMETER_SERVER).detect_loss()


class TestWatching:
    """Where the other end answers soon, a lane polls its socket before it sleeps."""

    def test_lane_polls_only_while_answers_come_soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_lane_socket, "SPIN_S", 3600.0)
        with lane_and_socket() as (lane, far):
            polled = spy_on_polls(lane)
            for _ in range(2):  # what comes first comes after nothing
                far.sendall(frame(Frame.END))
                lane.receive()
            assert polled == []
            far.sendall(frame(Frame.END))
            lane.receive()
            assert polled == [frame(Frame.END)]
            monkeypatch.setattr(_lane_socket, "SPIN_S", 0.0)  # from now on, nothing is soon
            for _ in range(3):
                far.sendall(frame(Frame.END))
                lane.receive()
            assert polled == [frame(Frame.END)]

    def test_polling_depends_on_the_kind_of_call_and_excludes_streams(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """After a commit the next push takes a while; after a push its commit comes soon."""
        monkeypatch.setattr(_lane_socket, "SPIN_S", 3600.0)
        with lane_and_socket() as (lane, far):
            polled, last = spy_on_polls(lane), None
            for _ in range(3):
                for kind in (Frame.PUSH, Frame.PUSH, Frame.END, Frame.COMMIT):
                    far.sendall(frame(kind))
                    monkeypatch.setattr(_lane_socket, "SPIN_S", 0.0 if last is Frame.COMMIT else 3600.0)
                    lane.receive()
                    last = kind
            assert polled == [frame(Frame.COMMIT)] * 2

    def test_lane_that_must_not_poll_now_sleeps_at_once(self) -> None:
        allowed = iter((3600.0, 3600.0, 3600.0, 0.0, 0.0, 0.0))
        with lane_and_socket(spin_s=lambda: next(allowed)) as (lane, far):
            polled = spy_on_polls(lane)
            for _ in range(6):
                far.sendall(frame(Frame.END))
                lane.receive()
            assert polled == [frame(Frame.END)]

    @pytest.mark.parametrize("end", ["closes", "resets"])
    def test_an_end_is_seen(self, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
        monkeypatch.setattr(_lane_socket, "SPIN_S", 3600.0)
        with lane_and_socket() as (lane, far):
            for _ in range(2):
                far.sendall(frame(Frame.END))
                lane.receive()
            if end == "resets":
                far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            far.close()
            with pytest.raises(errors.Unreachable):
                lane.receive()
            assert lane.closed

    def test_closing_from_another_thread_ends_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_lane_socket, "SPIN_S", 3600.0)
        with lane_and_socket() as (lane, far), ThreadPoolExecutor(1) as thread:
            for _ in range(2):
                far.sendall(frame(Frame.END))
                lane.receive()
            waiting = thread.submit(lane.receive)
            lane.close()
            with pytest.raises(errors.Unreachable):
                waiting.result(30)
