"""Frames go over a lane as they are, in whatever pieces, and a peer that breaks off, stalls or lies is found out."""

import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import errors
from shoal._transport import lane as _lane
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
def lanes(**options) -> Iterator[tuple[Lane, Lane]]:
    with connected() as (near, far):
        ends = Lane(near, "near", PARAMETER_SERVER, **options), Lane(far, "far", PARAMETER_SERVER, **options)
        try:
            yield ends
        finally:
            for lane in ends:
                lane.close()


@contextmanager
def lane_and_socket(**options) -> Iterator[tuple[Lane, socket.socket]]:
    """A lane, and the plain other end of its connection."""
    with connected() as (near, far):
        lane = Lane(near, "far", PARAMETER_SERVER, **options)
        try:
            yield lane, far
        finally:
            lane.close()


def frame(kind, payload=b"", *, size=None, reserved=bytes(3)):
    return struct.pack("<B3sI", kind, reserved, len(payload) if size is None else size) + payload


def send_for_ever(lane):
    while True:
        lane.send(Frame.VALUES, [bytes(LARGE)])


def received(lane):
    kind, payload = lane.receive()
    return kind, bytes(payload)


class TestFrames:
    @pytest.mark.parametrize("kind", Frame)
    def test_each_kind_is_as_the_contract_says(self, kind):
        with lane_and_socket() as (lane, far):
            lane.send(kind, [b"ab", b"c"])
            assert far.recv(100) == bytes([kind, 0, 0, 0, 3, 0, 0, 0]) + b"abc"
            far.sendall(frame(kind, b"payload"))
            assert received(lane) == (kind, b"payload")

    def test_an_end_may_go_with_a_frame(self):
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
    def test_any_frames_arrive_as_they_were_sent(self, frames):
        expected = []
        for kind, pieces, end in frames:
            expected += [(kind, b"".join(pieces)), *([(Frame.END, b"")] if end else [])]

        def send(lane):
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
    def test_frames_may_arrive_cut_anywhere(self, frames, data):
        expected = [(kind, bytes([index + 1]) * size) for index, (kind, size) in enumerate(frames)]
        stream = b"".join(frame(*each) for each in expected)
        cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=12)))
        parts = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]

        def send(far):
            for part in parts:
                far.sendall(part)

        with lane_and_socket() as (lane, far), ThreadPoolExecutor(1) as pool:
            far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sending = pool.submit(send, far)
            assert [received(lane) for _ in expected] == expected
            sending.result()

    def test_a_payload_may_be_as_large_as_any_message(self):
        payload = bytes(range(256)) * (MAX_MESSAGE_BYTES // 256)
        with lanes() as (near, far), ThreadPoolExecutor(1) as pool:
            for _ in range(2):
                sending = pool.submit(near.send, Frame.VALUES, [memoryview(payload)])
                assert received(far) == (Frame.VALUES, payload)
                sending.result()

    def test_a_frame_may_have_more_pieces_than_one_system_call_takes(self):
        pieces = [bytes([index % 256]) * (index % 5) for index in range(3000)]
        with lanes() as (near, far):
            near.send(Frame.PUSH, pieces)
            assert received(far) == (Frame.PUSH, b"".join(pieces))

    def test_a_payload_is_good_until_the_next(self):
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
            (frame(10), "sent bytes that are not a frame"),
            (frame(255), "sent bytes that are not a frame"),
            (frame(3, reserved=b"\1\0\0"), "sent bytes that are not a frame"),
            (frame(3, reserved=b"\0\0\x80"), "sent bytes that are not a frame"),
            (b"GET / HTTP/1.1\r\n", "sent bytes that are not a frame: b'GET / HT'"),
            (frame(3, size=MAX_MESSAGE_BYTES + 1), f"sent a frame of {MAX_MESSAGE_BYTES + 1} bytes"),
            (frame(3, size=2**32 - 1), "sent a frame of 4294967295 bytes"),
        ],
    )
    def test_what_is_no_frame_closes_the_lane(self, lie, said):
        with lane_and_socket() as (lane, far):
            far.sendall(frame(Frame.PULL, b"a good one") + lie)
            assert received(lane) == (Frame.PULL, b"a good one")
            with pytest.raises(errors.BadFrame, match=f"far {said}"):
                lane.receive()
            assert lane.closed
            assert far.recv(1) == b""

    def test_a_receiver_may_want_less(self):
        with lane_and_socket() as (lane, far):
            far.sendall(frame(3, bytes(10)) + frame(3, size=11))
            assert lane.receive(most=10)[0] is Frame.PULL
            with pytest.raises(errors.BadFrame, match="sent a frame of 11 bytes; the limit is 10"):
                lane.receive(most=10)

    def test_a_length_takes_no_memory_before_it_is_believed(self):
        with lane_and_socket() as (lane, far):
            before = len(lane._buffer)
            far.sendall(frame(3, size=2**32 - 1))
            with pytest.raises(errors.BadFrame):
                lane.receive()
            assert len(lane._buffer) == before


class TestEnds:
    def test_the_other_end_leaves_between_frames(self):
        with lane_and_socket() as (lane, far):
            far.sendall(frame(Frame.END))
            far.close()
            assert received(lane) == (Frame.END, b"")
            with pytest.raises(errors.Unreachable, match="the lane to far broke: closed by the other end"):
                lane.receive()
            assert lane.closed

    @pytest.mark.parametrize("sent", [1, 7, 8, 9, 99])
    def test_the_other_end_leaves_within_a_frame(self, sent):
        with lane_and_socket() as (lane, far):
            far.sendall(frame(Frame.PULL, bytes(100))[:sent])
            far.close()
            with pytest.raises(errors.Unreachable, match="closed by the other end"):
                lane.receive()
            assert lane.closed

    def test_the_other_end_leaves_while_it_is_sent_to(self):
        with lane_and_socket() as (lane, far):
            far.close()
            with pytest.raises(errors.Unreachable, match="broke"):
                send_for_ever(lane)
            assert lane.closed

    def test_a_blocked_receive_ends_when_its_own_end_is_closed(self):
        with lanes() as (near, far), ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(far.receive)
            near.send(Frame.PULL, [b"x"])  # it has begun
            assert waiting.result(20)[0] is Frame.PULL
            waiting = pool.submit(far.receive)
            far.close()
            with pytest.raises(errors.Unreachable):
                waiting.result(20)

    def test_a_blocked_send_ends_when_its_own_end_is_closed(self):
        with lanes() as (near, far), ThreadPoolExecutor(1) as pool:
            begun = threading.Event()

            def send():
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
    def test_a_closed_lane_carries_nothing(self, call):
        with lanes() as (near, _):
            near.close()
            near.close()  # harmless
            with pytest.raises(errors.Unreachable):
                call(near)

    def test_nobody_there(self):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        with pytest.raises(errors.Unreachable, match=f"no lane to 127.0.0.1:{port}: .*refused"):
            Lane.connect("127.0.0.1", port, PARAMETER_SERVER, timeout_s=5.0)

    def test_no_such_host(self):
        with pytest.raises(errors.Unreachable, match="no lane to no such host:1"):
            Lane.connect("no such host", 1, PARAMETER_SERVER, timeout_s=5.0)

    @pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
    def test_hosts_of_ipv6_are_written_in_brackets(self):
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
    def test_a_frame_that_does_not_go_on(self, sent):
        with lane_and_socket(stall_s=0.05) as (lane, far):
            far.sendall(frame(Frame.PULL, bytes(100))[:sent])
            with pytest.raises(errors.DeadlineExceeded, match=r"far has sent nothing for 0\.05 s"):
                lane.receive()
            assert lane.closed
            assert far.recv(1) == b""

    def test_a_frame_that_is_not_taken(self):
        with lane_and_socket(stall_s=0.05) as (lane, _):
            with pytest.raises(errors.DeadlineExceeded, match=r"far has read nothing of a VALUES frame for 0\.05 s"):
                send_for_ever(lane)
            assert lane.closed

    @pytest.mark.parametrize("stall_s", [0.01, 30.0], ids=["longer than a stall", "shorter than a stall"])
    def test_a_beginning_that_does_not_come_in_time(self, stall_s):
        with lane_and_socket(stall_s=stall_s) as (lane, _):
            with pytest.raises(errors.DeadlineExceeded, match=r"far has sent nothing for 0\.05 s"):
                lane.receive(within_s=0.05)
            assert lane.closed

    @pytest.mark.parametrize("within_s", [None, 20.0, 30.0])
    def test_a_beginning_may_be_waited_for_beyond_a_stall(self, within_s):
        with lanes(stall_s=0.02) as (near, far), ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(far.receive, within_s=within_s)
            with lane_and_socket() as (clock, _), pytest.raises(errors.DeadlineExceeded):
                clock.receive(within_s=0.1)  # longer than a stall
            assert not waiting.done()
            near.send(Frame.END)
            assert waiting.result(20)[0] is Frame.END


def test_a_lane_sends_at_once_and_finds_out_about_hosts_that_vanish():
    with connected() as (near, _):
        Lane(near, "far", PARAMETER_SERVER)
        assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, interval, count = (
            near.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + interval * count <= 30


class TestWatching:
    """Where the other end speaks soon, a lane looks out for it before it sleeps."""

    @pytest.fixture
    def watches(self, monkeypatch):
        """Of each time that it looked out, whether something came."""
        calls = []

        def watch(lane, until):
            found = watched(lane, until)
            calls.append(found)
            return found

        watched = Lane._watch
        monkeypatch.setattr(Lane, "_watch", watch)
        return calls

    def test_only_while_answers_come_soon(self, monkeypatch, watches):
        monkeypatch.setattr(_lane, "_BRIEF_S", 3600.0)
        with lane_and_socket() as (lane, far):
            for _ in range(2):  # what comes first comes after nothing
                far.sendall(frame(Frame.END))
                lane.receive()
            assert watches == []
            far.sendall(frame(Frame.END))
            lane.receive()
            assert watches == [True]
            monkeypatch.setattr(_lane, "_BRIEF_S", 0.0)  # from now on, nothing is soon
            for _ in range(3):
                far.sendall(frame(Frame.END))
                lane.receive()
            assert watches == [True, False]

    def test_each_kind_of_call_by_itself_and_never_within_a_stream(self, monkeypatch, watches):
        """After a commit the next push takes a while; after a push its commit comes soon."""
        monkeypatch.setattr(_lane, "_BRIEF_S", 3600.0)
        with lane_and_socket() as (lane, far):
            for _ in range(3):
                for kind in (Frame.PUSH, Frame.PUSH, Frame.END, Frame.COMMIT):
                    far.sendall(frame(kind))
                    monkeypatch.setattr(_lane, "_BRIEF_S", 0.0 if lane._last is Frame.COMMIT else 3600.0)
                    lane.receive()
            assert watches == [True, True]  # for the commits

    @pytest.mark.parametrize("end", ["closes", "resets"])
    def test_an_end_is_seen(self, monkeypatch, end):
        monkeypatch.setattr(_lane, "_BRIEF_S", 3600.0)
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

    def test_closing_from_another_thread_ends_it(self, monkeypatch):
        monkeypatch.setattr(_lane, "_BRIEF_S", 3600.0)
        with lane_and_socket() as (lane, far), ThreadPoolExecutor(1) as thread:
            for _ in range(2):
                far.sendall(frame(Frame.END))
                lane.receive()
            waiting = thread.submit(lane.receive)
            lane.close()
            with pytest.raises(errors.Unreachable):
                waiting.result(30)
