"""Listener without a parameter server: its own kinds of frames, an identity check, and protected bytes."""

import enum
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from shoal import _rpc, errors
from shoal._limits import catalogue, refusals
from shoal._security import AccessRole, Principal
from shoal._transport import listener as _listener
from shoal._transport.connection import ByteStream, Connection, Frames
from shoal._transport.handshake import Security, TokenSecurity, open_handshake, received_error
from shoal._transport.lane import Lane
from shoal._transport.listener import Listener, ListenerLimits
from shoal._wire import Buffer
from shoal.v1 import parameter_server_pb2 as pb
from support.waiting import wait_until


class Echo(enum.IntEnum):
    HELLO = 1
    WELCOME = 2
    SAY = 3
    ERROR = 8
    END = 9
    SHOUT = 40


class Unknown(enum.IntEnum):
    """A kind of frame that the port does not have."""

    KIND = 4


FRAMES = Frames(Echo)


class Echoes:
    """Says again whatever is said."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.closed = connection, False

    def welcome(self, hello: pb.LaneHello) -> pb.LaneWelcome:
        identity = self.connection.identity
        return pb.LaneWelcome(reason=identity.name if identity else "")

    def serve(self) -> None:
        while True:
            kind, payload = self.connection.receive()
            self.connection.send(kind, [bytes(payload)])

    def close(self) -> None:
        self.closed = True


class Masked:
    """A stream whose bytes are masked, as a cipher's would be."""

    def __init__(self, stream: ByteStream, mask: int) -> None:
        self._stream, self._mask = stream, mask
        self.polls = 0  # reads that do not block
        self.setsockopt, self.fileno = stream.setsockopt, stream.fileno
        self.shutdown, self.close = stream.shutdown, stream.close

    def _masked(self, data: bytes) -> bytes:
        return bytes(byte ^ self._mask for byte in data)

    def sendmsg(self, buffers: Iterable[Buffer], /) -> int:
        return self._stream.sendmsg([self._masked(b"".join(buffers))])

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0, /) -> int:
        self.polls += bool(flags & socket.MSG_DONTWAIT)
        count = self._stream.recv_into(buffer, nbytes, flags)
        buffer[:count] = self._masked(bytes(buffer[:count]))
        return count

    def recvmsg_into(
        self, buffers: Iterable[memoryview], size: int = 0, flags: int = 0, /
    ) -> tuple[int, Any, int, Any]:
        return self.recv_into(next(iter(buffers)), 0, flags), None, 0, None


class Names:
    """Masks the bytes; a credential is a name with its password."""

    def __init__(self, credential: bytes = b"", mask: int = 0x5A) -> None:
        self._credential, self._mask = credential, mask
        self.protected: list[bool] = []
        self.streams: list[Masked] = []

    def protect(self, stream: ByteStream, peer: str, *, accepted: bool) -> Masked:
        self.protected.append(accepted)
        self.streams.append(Masked(stream, self._mask))
        return self.streams[-1]

    @property
    def polls(self) -> int:
        return sum(stream.polls for stream in self.streams)

    def credential(self) -> bytes:
        return self._credential

    def identify(self, credential: bytes, peer: str) -> Principal:
        name, _, password = credential.partition(b":")
        if password != b"secret":
            raise errors.Unauthenticated(f"{peer} gives a wrong password")
        return Principal(name.decode(), AccessRole.TRAINER)


@contextmanager
def listening(
    security: Security, limit: int = 2, sessions: list[Echoes] | None = None, host_limit: int = 2
) -> Iterator[Listener]:
    def session(connection: Connection) -> Echoes:
        made = Echoes(connection)
        if sessions is not None:
            sessions.append(made)
        return made

    listener = Listener(
        _rpc.listen("127.0.0.1", 0),
        FRAMES,
        session,
        security=security,
        limits=ListenerLimits(catalogue.LANES, catalogue.HOST_LANES, most=limit, most_of_host=host_limit),
        name="echo",
        advice="whistle instead",
    )
    listener.start()
    try:
        yield listener
    finally:
        listener.stop()


@contextmanager
def connected(listener: Listener, security: Security) -> Iterator[tuple[Lane, pb.LaneWelcome]]:
    """A lane, and the answer to its hello."""
    lane = Lane.connect("127.0.0.1", listener.address[1], FRAMES, timeout_s=5)
    try:
        yield lane, open_handshake(lane, security, pb.LaneHello(), within_s=5)
    finally:
        lane.close()


def said(lane: Lane, kind: Echo, what: bytes) -> tuple[enum.IntEnum, bytes]:
    lane.send(kind, [what])
    answered, payload = lane.receive(within_s=5)
    return answered, bytes(payload)


def test_listener_carries_its_own_kinds_of_frame() -> None:
    with listening(TokenSecurity(b"t")) as listener, connected(listener, TokenSecurity(b"t")) as (lane, _):
        assert said(lane, Echo.SAY, b"here") == (Echo.SAY, b"here")
        assert said(lane, Echo.SHOUT, b"HERE") == (Echo.SHOUT, b"HERE")
        assert lane.identity is None


def test_a_kind_that_the_port_does_not_know_ends_the_connection() -> None:
    with listening(TokenSecurity(b"t")) as listener, connected(listener, TokenSecurity(b"t")) as (lane, _):
        lane.send(Unknown.KIND)
        with pytest.raises(errors.Unreachable):
            lane.receive(within_s=5)


def test_an_identity_over_protected_bytes() -> None:
    """What TLS and certificates are put in by."""
    theirs, ours = Names(), Names(b"ada:secret")
    with listening(theirs) as listener, connected(listener, ours) as (lane, welcome):
        assert welcome.reason == "ada"
        assert said(lane, Echo.SAY, b"x" * 100_000) == (Echo.SAY, b"x" * 100_000)
    assert (theirs.protected, ours.protected) == ([True], [False])


def test_listener_polls_for_one_client_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_listener, "SERVER_SPIN_S", 3600.0)
    theirs, ours = Names(), Names(b"ada:secret")
    with (
        listening(theirs, limit=3, host_limit=3) as listener,
        connected(listener, ours) as (pulls, _),
        connected(listener, ours) as (pushes, _),
    ):
        for lane in (pulls, pushes) * 3:
            said(lane, Echo.SAY, b"one client")
        wait_until(lambda: theirs.polls > 0, what="a poll")
        with connected(listener, ours) as (third, _):
            # The second frames of the first two lanes end polls that began before the third client was there.
            for lane in (pulls, pushes, third, pulls, pushes):
                said(lane, Echo.SAY, b"the last frame that is polled for")
            polled = theirs.polls
            for lane in (pulls, pushes, third) * 3:
                said(lane, Echo.SAY, b"another client")
            assert theirs.polls == polled


@pytest.mark.parametrize("security", [Names(b"ada:guess"), Names(b"ada:secret", mask=1), TokenSecurity(b"ada:secret")])
def test_client_without_proof_of_its_identity_is_refused(security: Security) -> None:
    with listening(Names()) as listener:
        with pytest.raises(errors.ShoalError), connected(listener, security):
            pass
        wait_until(lambda: listener.count == 0, what="the connection's end")


@pytest.mark.parametrize(
    ("limit", "host_limit", "message"),
    [
        (1, 2, "this server has 1 echos; the limit LANES is 1 (--lanes); whistle instead"),
        (
            2,
            1,
            "127.0.0.1 has 1 echos to this server; the limit HOST_LANES is 1 (--host-lanes); whistle instead",
        ),
    ],
    ids=["of all", "of a host"],
)
def test_beyond_the_limit_connections_are_refused_and_counted(limit: int, host_limit: int, message: str) -> None:
    token, before = TokenSecurity(b"t"), refusals("server")
    with listening(token, limit=limit, host_limit=host_limit) as listener, connected(listener, token) as (lane, _):
        other = Lane.connect("127.0.0.1", listener.address[1], FRAMES, timeout_s=5)
        assert other.begin(within_s=5) is Echo.ERROR
        error = received_error(other)
        assert isinstance(error, errors.Overloaded)
        assert error.message == message
        assert refusals("server")[error.details["limit"]] == before[error.details["limit"]] + 1
        other.close()
        assert said(lane, Echo.SAY, b"still") == (Echo.SAY, b"still")


def test_the_end_of_a_listener_ends_its_connections_and_sessions() -> None:
    token = TokenSecurity(b"t")
    sessions: list[Echoes] = []
    with listening(token, sessions=sessions) as listener, connected(listener, token) as (lane, _):
        listener.stop()
        assert [session.closed for session in sessions] == [True]
        with pytest.raises(errors.Unreachable):
            lane.receive(within_s=5)
