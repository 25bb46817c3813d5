"""Data calls to a parameter server by gRPC, with Shoal's own encoding of the messages that carry chunks."""

from collections.abc import Iterator
from typing import Any

from shoal import _rpc, errors
from shoal._security import CHECK_EVERY_S, NO_CREDENTIALS, AccessRole, Credentials
from shoal._wire import Buffer
from shoal._wire.limits import transfer_s
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1.parameter_server_pb2_grpc import ParameterServerStub

_SERVICE = "/shoal.v1.ParameterServer/"
_COMMIT_TIMEOUT_S = 10.0


class GrpcCalls:
    """Calls to one server by gRPC. They raise Shoal's errors.

    Args:
        address: address of the server.
        credentials: what this process presents.
    """

    def __init__(self, address: str, credentials: Credentials = NO_CREDENTIALS) -> None:
        self._address, self.credentials = address, credentials
        self._check_port = credentials.port_check(address, CHECK_EVERY_S)
        self._channel = _rpc.channel(address, credentials, AccessRole.SERVER)
        self._stub = ParameterServerStub(self._channel)
        # As the stub's methods, but messages with chunks are bytes, which avoids copies into protobuf objects.
        self._pull: Any = self._channel.unary_stream(f"{_SERVICE}Pull", pb.PullRequest.SerializeToString)
        self._push: Any = self._channel.stream_unary(f"{_SERVICE}Push", None, pb.PushReply.FromString)
        self._assign: Any = self._channel.stream_unary(f"{_SERVICE}Assign", None, pb.PushReply.FromString)

    def attach(self) -> pb.AttachReply:
        """Returns how to reach the server by its other transports."""
        try:
            with _rpc.as_shoal_errors(self._address):
                return self._stub.Attach(pb.AttachRequest(), timeout=_COMMIT_TIMEOUT_S, metadata=self._metadata())
        except errors.Unreachable:
            if failure := _rpc.tls_failure(self._address, self.credentials.tls, AccessRole.SERVER):
                raise failure from None
            raise

    def pull(self, request: pb.PullRequest, nbytes: int) -> Iterator[bytes]:
        """Yields the encoded replies to a pull of `nbytes` bytes."""
        with _rpc.as_shoal_errors(self._address):
            yield from self._pull(request, timeout=transfer_s(nbytes), metadata=self._metadata())

    def push(self, requests: Iterator[list[Buffer]], nbytes: int) -> pb.PushReply:
        """Pushes encoded messages of `nbytes` bytes."""
        with _rpc.as_shoal_errors(self._address):
            messages, timeout_s = map(b"".join, requests), transfer_s(nbytes)
            reply: pb.PushReply = self._push(messages, timeout=timeout_s, metadata=self._metadata())
            return reply

    def assign(self, requests: Iterator[list[Buffer]], nbytes: int) -> pb.PushReply:
        """Overwrites values; the arguments are as for `push`."""
        with _rpc.as_shoal_errors(self._address):
            messages, timeout_s = map(b"".join, requests), transfer_s(nbytes)
            reply: pb.PushReply = self._assign(messages, timeout=timeout_s, metadata=self._metadata())
            return reply

    def commit(self, request: pb.CommitRequest) -> pb.PushReply:
        """Commits a staged push."""
        with _rpc.as_shoal_errors(self._address):
            return self._stub.Commit(request, timeout=_COMMIT_TIMEOUT_S, metadata=self._metadata())

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return self.credentials.metadata(self._check_port)

    def close(self) -> None:
        """Closes the channel. Calls in progress end with Cancelled."""
        _rpc.close_channel(self._channel)
