"""A port that knows no parameter server: frames of its own, an identity, and bytes that are not plain."""

import enum
from contextlib import contextmanager

import pytest

from shoal import _rpc, errors
from shoal._transport.connection import Frames
from shoal._transport.handshake import TokenSecurity, open_handshake, received_error
from shoal._transport.lane import Lane
from shoal._transport.listener import Listener
from shoal.v1 import parameter_server_pb2 as pb
from support.waiting import wait_until


class Echo(enum.IntEnum):
    HELLO = 1
    WELCOME = 2
    SAY = 3
    ERROR = 8
    END = 9
    SHOUT = 40


FRAMES = Frames(Echo)


class Echoes:
    """Says again whatever is said."""

    def __init__(self, connection):
        self.connection, self.closed = connection, False

    def welcome(self, hello):
        return pb.LaneWelcome(reason=self.connection.identity)

    def serve(self):
        while True:
            kind, payload = self.connection.receive()
            self.connection.send(kind, [bytes(payload)])

    def close(self):
        self.closed = True


class Masked:
    """A stream whose bytes are masked, as a cipher's would be."""

    def __init__(self, stream, mask):
        self._stream, self._mask = stream, mask
        for name in ("setsockopt", "fileno", "shutdown", "close"):
            setattr(self, name, getattr(stream, name))

    def _masked(self, data):
        return bytes(byte ^ self._mask for byte in data)

    def sendmsg(self, buffers):
        self._stream.sendall(self._masked(b"".join(buffers)))
        return sum(map(len, buffers))

    def recv_into(self, buffer, nbytes=0, flags=0):
        data = self._stream.recv(nbytes or len(buffer), flags)
        buffer[: len(data)] = self._masked(data)
        return len(data)

    def recvmsg_into(self, buffers, size=0, flags=0):
        return self.recv_into(buffers[0], 0, flags), None, 0, None


class Names:
    """Masks the bytes; a credential is a name with its password."""

    def __init__(self, credential=b"", mask=0x5A):
        self._credential, self._mask, self.protected = credential, mask, []

    def protect(self, stream, peer, *, accepted):
        self.protected.append(accepted)
        return Masked(stream, self._mask)

    def credential(self):
        return self._credential

    def identify(self, credential, peer):
        name, _, password = credential.partition(b":")
        if password != b"secret":
            raise errors.Unauthenticated(f"{peer} gives a wrong password")
        return name.decode()


@contextmanager
def listening(security, limit=2, sessions=None):
    def session(connection):
        made = Echoes(connection)
        if sessions is not None:
            sessions.append(made)
        return made

    listener = Listener(
        _rpc.listen("127.0.0.1", 0),
        FRAMES,
        session,
        security=security,
        limit=limit,
        name="echo",
        advice="whistle instead",
    )
    listener.start()
    try:
        yield listener
    finally:
        listener.stop()


@contextmanager
def connected(listener, security):
    lane = Lane.connect("127.0.0.1", listener.address[1], FRAMES, timeout_s=5)
    try:
        lane.welcomed = open_handshake(lane, security, pb.LaneHello(), within_s=5)
        yield lane
    finally:
        lane.close()


def said(lane, kind, what):
    lane.send(kind, [what])
    answered, payload = lane.receive(within_s=5)
    return answered, bytes(payload)


def test_frames_of_its_own():
    with listening(TokenSecurity(b"t")) as listener, connected(listener, TokenSecurity(b"t")) as lane:
        assert said(lane, Echo.SAY, b"here") == (Echo.SAY, b"here")
        assert said(lane, Echo.SHOUT, b"HERE") == (Echo.SHOUT, b"HERE")
        assert lane.identity == ""


def test_a_kind_that_the_port_does_not_know_ends_the_connection():
    with listening(TokenSecurity(b"t")) as listener, connected(listener, TokenSecurity(b"t")) as lane:
        lane._socket.sendall(bytes([4, 0, 0, 0, 0, 0, 0, 0]))
        with pytest.raises(errors.Unreachable):
            lane.receive(within_s=5)


def test_an_identity_over_protected_bytes():
    """What TLS and certificates are put in by."""
    theirs, ours = Names(), Names(b"ada:secret")
    with listening(theirs) as listener, connected(listener, ours) as lane:
        assert lane.welcomed.reason == "ada"
        assert said(lane, Echo.SAY, b"x" * 100_000) == (Echo.SAY, b"x" * 100_000)
    assert (theirs.protected, ours.protected) == ([True], [False])


@pytest.mark.parametrize("security", [Names(b"ada:guess"), Names(b"ada:secret", mask=1), TokenSecurity(b"ada:secret")])
def test_whoever_proves_nothing_is_refused(security):
    with listening(Names()) as listener:
        with pytest.raises(errors.ShoalError), connected(listener, security):
            pass
        wait_until(lambda: listener.count == 0, what="the connection's end")


def test_beyond_the_limit_connections_are_refused():
    token = TokenSecurity(b"t")
    with listening(token, limit=1) as listener, connected(listener, token) as lane:
        other = Lane.connect("127.0.0.1", listener.address[1], FRAMES, timeout_s=5)
        assert other.begin(within_s=5) is Echo.ERROR
        error = received_error(other)
        assert isinstance(error, errors.Overloaded)
        assert error.message == "this server has its limit of 1 echos; whistle instead"
        other.close()
        assert said(lane, Echo.SAY, b"still") == (Echo.SAY, b"still")


def test_the_end_of_a_listener_ends_its_connections_and_sessions():
    token, sessions = TokenSecurity(b"t"), []
    with listening(token, sessions=sessions) as listener, connected(listener, token) as lane:
        listener.stop()
        assert [session.closed for session in sessions] == [True]
        with pytest.raises(errors.Unreachable):
            lane.receive(within_s=5)
