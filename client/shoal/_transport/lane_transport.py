"""Transport over a lane: a server's data calls as frames on a socket."""

import enum
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

from google.protobuf.message import Message

from shoal import _rpc, errors
from shoal._transport.chunk_reader import read_frame
from shoal._transport.connection import Connection
from shoal._transport.frames import PARAMETER_SERVER, Frame
from shoal._transport.handshake import Security, TokenSecurity, decoded, open_handshake, received_error
from shoal._transport.lane import Lane
from shoal._transport.tls_stream import secured
from shoal._transport.transport import Target, Transport, TransportFactory, TransportUnavailable
from shoal._wire import PullAssembly, PullDecoder, PushPayload
from shoal._wire.limits import PERMIT_FREE_BYTES, transfer_s
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb

T = TypeVar("T")
M = TypeVar("M", bound=Message)

_CONNECT_TIMEOUT_S = 5.0
WELCOME_TIMEOUT_S = 5.0
# Enough for an update of the largest shards.
_ANSWER_TIMEOUT_S = 120.0


class LaneTransport(Transport):
    """Transport over one lane.

    Args:
        lane: an open lane; the transport owns it.
        target: the server.
    """

    def __init__(self, lane: Connection, target: Target) -> None:
        self._lane, self._layout, self._rpc = lane, target.layout, target.rpc
        self._refusal: errors.ShoalError | None = None
        self._transfer_s = transfer_s(target.layout.nbytes)
        self._may_wait = target.layout.nbytes > PERMIT_FREE_BYTES

    @property
    def broken(self) -> bool:
        return self._lane.closed

    def pull(self, request: pb.PullRequest, pull_decoder: PullDecoder | None) -> list[header_pb2.ShardHeader]:
        request.region = 0

        def call() -> list[header_pb2.ShardHeader]:
            self._ask(request)
            return self._receive_values(pull_decoder)

        return self._whole(call)

    def push(self, header: pb.PushHeader, payload: PushPayload) -> pb.PushReply:
        header.region = 0

        def call() -> pb.PushReply:
            on_data = self._on_data if self._may_wait else None
            self._lane.stream(Frame.PUSH, payload.requests(header), at_once=not payload.complete, on_data=on_data)
            return self._pushed()

        return self._whole(call)

    def commit(self, request: pb.CommitRequest) -> pb.PushReply:
        def call() -> pb.PushReply:
            self._lane.send(Frame.COMMIT, [request.SerializeToString()])
            return self._pushed()

        return self._whole(call)

    def assign(self, header: pb.PushHeader, payload: PushPayload) -> None:
        """Sends values by gRPC: a lane has no frame for a call that is made once for each job."""
        self._rpc.assign(payload.requests(header), payload.layout.nbytes)

    def close(self) -> None:
        self._lane.close()

    def _whole(self, call: Callable[[], T]) -> T:
        """Makes one call. If it does not complete, the lane is closed, because its state is unknown."""
        try:
            return call()
        except BaseException as error:
            # The error is dropped: its traceback would keep the arguments of the call, and their memory, alive.
            refused, self._refusal = error is self._refusal, None
            if not refused:
                self._lane.close()
            raise

    def _ask(self, request: pb.PullRequest) -> None:
        self._lane.send(Frame.PULL, [request.SerializeToString()])

    def _receive_values(self, pull_decoder: PullDecoder | None) -> list[header_pb2.ShardHeader]:
        assembly = PullAssembly(self._layout, pull_decoder)
        kind = self._begin(None)  # may wait for other workers
        self._lane.limit(self._transfer_s)
        while kind is not Frame.END:
            self._check(Frame.VALUES, kind)
            assembly.add(read_frame(pb.PullReply, self._lane, assembly.assembler)[0])
            kind = self._begin(None)
        self._lane.payload()
        self._lane.limit(None)
        return assembly.finish()

    def _on_data(self) -> bool:
        """Waits for a permit, as the server has asked; returns whether it wants the rest of the gradient."""
        self._check(Frame.WAIT, self._begin(_ANSWER_TIMEOUT_S))
        return self._waited()

    def _waited(self) -> bool:
        self._lane.payload()
        kind = self._begin(None)  # may wait for other workers
        if kind is not Frame.END:
            self._check(Frame.GO, kind)
        self._lane.payload()
        return kind is Frame.GO

    def _pushed(self) -> pb.PushReply:
        kind = self._begin(_ANSWER_TIMEOUT_S)
        if kind is Frame.WAIT:  # the whole push was sent before it came
            self._waited()
            kind = self._begin(_ANSWER_TIMEOUT_S)
        self._check(Frame.PUSHED, kind)
        return decoded(pb.PushReply, self._lane)

    def _begin(self, within_s: float | None) -> enum.IntEnum:
        kind = self._lane.begin(within_s=within_s)
        if kind is Frame.ERROR:
            self._refusal = received_error(self._lane)
            raise self._refusal
        return kind

    def _check(self, wanted: Frame, kind: enum.IntEnum) -> None:
        if kind is not wanted:
            raise errors.BadFrame(f"{self._lane.peer} answered with {kind.name} instead of {wanted.name}")


class LaneFactory(TransportFactory):
    """Opens lanes, with the address and the token of the server's offer.

    Args:
        security: returns the security of a lane for a token.
    """

    name = "lane"
    title = "lanes"
    carrier = "lane"
    settings = frozenset({"auto", "tcp"})
    rank = 20

    def __init__(self, security: Callable[[bytes], Security] = TokenSecurity) -> None:
        self._security = security

    def open(self, target: Target, payloads: int) -> LaneTransport:  # noqa: ARG002 - has no memory to lend
        if not target.offer.address:
            raise TransportUnavailable("the server has no lanes", for_good=True)
        return LaneTransport(self.connect(target, pb.LaneHello())[0], target)

    def connect(self, target: Target, hello: pb.LaneHello) -> tuple[Lane, pb.LaneWelcome]:
        """Opens a lane and sends a hello on it.

        Args:
            target: the server.
            hello: the hello.

        Returns:
            The lane and the server's answer.

        Raises:
            ShoalError: the connection fails, or the server refuses it.
            Unauthenticated: another host, or another user on the server's port, would get the ticket without TLS.
        """
        with ExitStack() as undo:
            lane, token = self.dial(target)
            undo.callback(lane.close)
            ticket = target.credentials.token()
            target.credentials.port_check(target.offer.address)(ticket)
            security = secured(self._security(ticket.encode() or token), target.credentials)
            with target.opening.of(lane):
                welcome = open_handshake(lane, security, hello, within_s=WELCOME_TIMEOUT_S)
            undo.pop_all()
        return lane, welcome

    def dial(self, target: Target) -> tuple[Lane, bytes]:
        """Connects a socket. A factory of lanes on other sockets overrides this method.

        Args:
            target: the server.

        Returns:
            The lane and the token for its hello.

        Raises:
            Unreachable, DeadlineExceeded: the connection was not accepted.
        """
        where = _rpc.parse_address(target.offer.address)
        return Lane.connect(*where, PARAMETER_SERVER, timeout_s=_CONNECT_TIMEOUT_S), target.offer.token


__all__ = ["LaneFactory", "LaneTransport"]
