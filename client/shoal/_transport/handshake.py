"""The hello of a connection: who opens it, and what protects its bytes.

`Security` is the hook: an object of this type at each end decides how the bytes are protected and what proves an
identity. `TokenSecurity` protects nothing and asks for a token, which the server gives to its clients by gRPC.
"""

import hmac
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from shoal import _rpc, errors
from shoal._transport.connection import ByteStream, Connection
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb

M = TypeVar("M", bound=Message)

_HELLO_TIMEOUT_S = 5.0
_MAX_HELLO_BYTES = 4096  # whoever sends it has not proved anything yet: little memory is taken for it


class Security(Protocol):
    """How one end of a connection is protected, and how the end that opens it proves who it is.

    Both ends have one. Everything here runs on the connection's own thread, before the first call.
    """

    def protect(self, stream: ByteStream, peer: str, *, accepted: bool) -> ByteStream:
        """Returns the stream that carries the frames: this one, or one that encrypts.

        Args:
            stream: connected; nothing has been sent on it.
            peer: the other end, for messages.
            accepted: whether this end accepted the connection; otherwise it opened it.

        Raises:
            Unauthenticated: the other end is not one that is talked to.
        """
        ...

    def credential(self) -> bytes:
        """Returns what this end puts into its hello."""
        ...

    def identify(self, credential: bytes, peer: str) -> str:
        """Checks the credential of a hello; returns the identity of the end that sent it.

        Raises:
            Unauthenticated: the credential is not accepted.
        """
        ...


class TokenSecurity:
    """Plain bytes; whoever knows the token may come in, without an identity.

    Args:
        token: of the server.
    """

    def __init__(self, token: bytes) -> None:
        self._token = token

    def protect(self, stream: ByteStream, peer: str, *, accepted: bool) -> ByteStream:  # noqa: ARG002 - nothing to do
        return stream

    def credential(self) -> bytes:
        return self._token

    def identify(self, credential: bytes, peer: str) -> str:
        if not hmac.compare_digest(credential, self._token):
            raise errors.Unauthenticated(f"{peer} opens a lane with a token that is not this server's")
        return ""


def open_handshake(
    connection: Connection, security: Security, hello: pb.LaneHello, *, within_s: float
) -> pb.LaneWelcome:
    """Opens a connection that this end has made.

    Args:
        connection: nothing has been sent on it.
        security: of this end.
        hello: what else is said; its token is set here.
        within_s: for the other end's answer.

    Raises:
        ShoalError: the other end does not take the connection, or makes no sense.
    """
    connection.secure(partial(security.protect, peer=connection.peer, accepted=False))
    hello.token = security.credential()
    frames = connection.frames
    connection.send(frames.hello, [hello.SerializeToString()])
    kind = connection.begin(within_s=within_s)
    if kind is frames.error:
        raise received_error(connection)
    if kind is not frames.welcome:
        raise errors.BadFrame(f"{connection.peer} answered with {kind.name} where {frames.welcome.name} belongs")
    return decoded(pb.LaneWelcome, connection)


def accept_handshake(
    connection: Connection, security: Security, welcome: Callable[[pb.LaneHello], pb.LaneWelcome]
) -> None:
    """Lets in whoever opened a connection to this end.

    Args:
        connection: accepted; its `identity` is set.
        security: of this end.
        welcome: makes the answer to an accepted hello.

    Raises:
        Unauthenticated: the credential is not accepted; the other end was told.
        ShoalError: what was sent is no hello.
    """
    connection.secure(partial(security.protect, peer=connection.peer, accepted=True))
    frames = connection.frames
    kind, payload = connection.receive(within_s=_HELLO_TIMEOUT_S, most=_MAX_HELLO_BYTES)
    if kind is not frames.hello:
        raise errors.BadFrame(f"{connection.peer} began with {kind.name}; a lane begins with {frames.hello.name}")
    try:
        hello = pb.LaneHello.FromString(bytes(payload))
    except DecodeError as error:
        raise errors.BadRequest(f"a LaneHello cannot be read: {error}") from None
    try:
        connection.identity = security.identify(hello.token, connection.peer)
    except errors.ShoalError as error:
        send_error(connection, error)
        raise
    connection.send(frames.welcome, [welcome(hello).SerializeToString()])


def send_error(connection: Connection, error: errors.ShoalError) -> None:
    """Tells the other end why something is refused."""
    connection.send(connection.frames.error, [_rpc.detail_of(error).SerializeToString()])


def received_error(connection: Connection) -> errors.ShoalError:
    """Takes an error frame's payload: the error that the other end sent."""
    return _rpc.error_of(decoded(header_pb2.ErrorDetail, connection))


def decoded(kind: type[M], connection: Connection) -> M:
    """Takes a frame's payload: the message in it.

    Raises:
        BadFrame: it is no such message.
    """
    try:
        return kind.FromString(bytes(connection.payload()))
    except DecodeError as error:
        raise errors.BadFrame(f"{connection.peer} sent a {kind.__name__} that cannot be read: {error}") from None


__all__ = ["Security", "TokenSecurity", "accept_handshake", "decoded", "open_handshake", "received_error", "send_error"]
