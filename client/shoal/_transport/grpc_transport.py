"""Transport by gRPC. Every server has it, so it is the fallback when no other transport works."""

from shoal import errors
from shoal._transport.chunk_reader import read_message
from shoal._transport.transport import Target, Transport, TransportFactory
from shoal._wire import Aggregation, PullAssembly, PullDecoder, PushPayload
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb


class GrpcTransport(Transport):
    """Transport by gRPC, on the channel that all calls of a client to a server share.

    Args:
        target: the server.
    """

    def __init__(self, target: Target) -> None:
        self._rpc, self._layout = target.rpc, target.layout
        self._nbytes = target.layout.nbytes

    def pull(self, request: pb.PullRequest, pull_decoder: PullDecoder | None) -> list[header_pb2.ShardHeader]:
        request.region = 0
        assembly = PullAssembly(self._layout, pull_decoder, [Aggregation.TRAINABLE] if request.slot else [*Aggregation])
        for message in self._rpc.pull(request, self._nbytes):
            assembly.add(read_message(pb.PullReply, message, assembly.assembler)[0])
        return assembly.finish()

    def push(self, header: pb.PushHeader, payload: PushPayload) -> pb.PushReply:
        payload.wait()  # before the call, which has a deadline
        while True:
            try:
                return self._rpc.push(payload.requests(header), self._nbytes)
            except errors.DeadlineExceeded as error:
                if "waits" not in error.details:  # for other workers, not for this one's bytes
                    raise

    def commit(self, request: pb.CommitRequest) -> pb.PushReply:
        return self._rpc.commit(request)

    def assign(self, header: pb.PushHeader, payload: PushPayload) -> None:
        self._rpc.assign(payload.requests(header), payload.layout.nbytes)

    def close(self) -> None:
        """Does nothing: the owner of the channel closes it."""


class GrpcFactory(TransportFactory):
    """Opens transports by gRPC."""

    name = "grpc"
    title = "gRPC"
    carrier = "grpc"
    settings = frozenset({"auto", "tcp", "grpc"})
    rank = 30
    attaches = False

    def open(self, target: Target, payloads: int) -> GrpcTransport:  # noqa: ARG002 - has no memory to lend
        return GrpcTransport(target)


__all__ = ["GrpcFactory", "GrpcTransport"]
