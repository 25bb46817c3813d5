"""Handshake of a connection: the hello that opens it, its answer, and the protection of its bytes.

`Security` is the extension point: an object of this type at each end protects the bytes and proves an identity.
`TokenSecurity` does not protect bytes, and requires a token that the server gives to its clients by gRPC.
"""

import hmac
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from shoal import _rpc, errors
from shoal._limits import catalogue, count_refusal
from shoal._security import Authorizer, Principal
from shoal._transport.connection import ByteStream, Connection
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb

M = TypeVar("M", bound=Message)

_MAX_HELLO_BYTES = catalogue.HELLO_BYTES.default  # the sender is not authenticated yet, so it gets little memory
_MAX_WELCOME_BYTES = 1 << 20
# Who may make this call may open a lane. Each call on the lane is then checked by its stamp.
_LANE_CALL = "shoal.v1.ParameterServer/Attach"


class Security(Protocol):
    """Protection of one end of a connection, and proof of its identity.

    Each end has its own. All methods run on the connection's own thread, before the first call.
    """

    def protect(self, stream: ByteStream, peer: str, *, accepted: bool) -> ByteStream:
        """Returns the stream that carries the frames: the same one, or one that encrypts.

        Args:
            stream: connected, before the first byte.
            peer: the other end, for messages.
            accepted: whether this end accepted the connection rather than opened it.

        Returns:
            The stream to use.

        Raises:
            Unauthenticated: the other end is not acceptable.
        """
        ...

    def credential(self) -> bytes:
        """Returns the credential that this end sends in its hello."""
        ...

    def identify(self, credential: bytes, peer: str) -> Principal | None:
        """Checks the credential of a hello.

        Args:
            credential: the received credential.
            peer: the other end, for messages.

        Returns:
            The identity of the other end; None if it has none.

        Raises:
            Unauthenticated: the credential is not accepted.
        """
        ...


class TokenSecurity:
    """Security without encryption: every client with the token is accepted, without an identity.

    Args:
        token: token of the server.
    """

    def __init__(self, token: bytes) -> None:
        self._token = token

    def protect(self, stream: ByteStream, peer: str, *, accepted: bool) -> ByteStream:  # noqa: ARG002 - does not encrypt
        return stream

    def credential(self) -> bytes:
        return self._token

    def identify(self, credential: bytes, peer: str) -> Principal | None:
        if not hmac.compare_digest(credential, self._token):
            raise errors.Unauthenticated(f"{peer} opened a lane with a token that is not this server's")
        return None


class TicketSecurity(TokenSecurity):
    """Security of a server's lanes: without encryption, and by tickets unless the cluster asks for none.

    Args:
        token: token of the server, for a cluster that asks for no tickets.
        authorizer: checks tickets.
        on_outcome: called with each hello that is refused, on the thread of its connection.
    """

    def __init__(self, token: bytes, authorizer: Authorizer, on_outcome: _rpc.OnOutcome = lambda _: None) -> None:
        super().__init__(token)
        self._authorizer, self._on_outcome = authorizer, on_outcome

    def identify(self, credential: bytes, peer: str) -> Principal | None:
        who: list[Principal] = []
        try:
            if self._authorizer.is_open:
                return super().identify(credential, peer)
            ticket = credential.decode("ascii", errors="replace")
            return self._authorizer.authorize(_LANE_CALL, ticket, on_identified=who.append)
        except errors.ShoalError as why:
            host = peer.rpartition(":")[0]
            self._on_outcome(_rpc.CallOutcome(_LANE_CALL, next(iter(who), None), host, why.status, reason=why.message))
            raise


def open_handshake(
    connection: Connection, security: Security, hello: pb.LaneHello, *, within_s: float
) -> pb.LaneWelcome:
    """Sends the hello of a connection that this end has opened, and waits for the answer.

    Args:
        connection: the connection, before the first frame.
        security: security of this end.
        hello: the hello; this function sets its token.
        within_s: seconds for the whole handshake.

    Returns:
        The answer.

    Raises:
        BadFrame: the answer is not valid.
        ShoalError: the other end refuses the connection, or does not answer.
    """
    connection.limit(within_s)
    connection.secure(partial(security.protect, peer=connection.peer, accepted=False))
    hello.token = security.credential()
    frames = connection.frames
    connection.send(frames.hello, [hello.SerializeToString()])
    kind = connection.begin(within_s=within_s, most=_MAX_WELCOME_BYTES)
    if kind is frames.error:
        raise received_error(connection)
    if kind is not frames.welcome:
        raise errors.BadFrame(f"{connection.peer} answered with {kind.name} instead of {frames.welcome.name}")
    welcome = decoded(pb.LaneWelcome, connection)
    connection.limit(None)
    return welcome


def accept_handshake(
    connection: Connection, security: Security, welcome: Callable[[pb.LaneHello], pb.LaneWelcome]
) -> None:
    """Receives and answers the hello of a connection that this end has accepted.

    The function has no deadline: the caller closes the connection if the handshake takes too long, as `Listener` does.

    Args:
        connection: the connection; its `identity` is set.
        security: security of this end.
        welcome: returns the answer to an accepted hello.

    Raises:
        Unauthenticated: the credential is not accepted; the other end has received the error.
        BadFrame, BadRequest: the first frame is not a hello.
        Unreachable, DeadlineExceeded: as for `Connection.receive`.
    """
    connection.secure(partial(security.protect, peer=connection.peer, accepted=True))
    frames = connection.frames
    kind, payload = connection.receive(most=_MAX_HELLO_BYTES)
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
    """Sends an error to the other end, and counts it if it names a limit."""
    count_refusal(error)
    connection.send(connection.frames.error, [_rpc.detail_of(error).SerializeToString()])


def received_error(connection: Connection) -> errors.ShoalError:
    """Reads an error frame's payload, and returns the error."""
    return _rpc.error_of(decoded(header_pb2.ErrorDetail, connection))


def decoded(kind: type[M], connection: Connection) -> M:
    """Reads a frame's payload, and returns its message.

    Raises:
        BadFrame: the payload is not such a message.
    """
    try:
        return kind.FromString(bytes(connection.payload()))
    except DecodeError as error:
        raise errors.BadFrame(f"{connection.peer} sent a {kind.__name__} that cannot be read: {error}") from None


__all__ = [
    "Security",
    "TicketSecurity",
    "TokenSecurity",
    "accept_handshake",
    "decoded",
    "open_handshake",
    "received_error",
    "send_error",
]
