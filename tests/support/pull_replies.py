"""Decoder of whole `PullReply` messages. The product reads them in pieces (`shoal._transport.chunk_reader`)."""

from shoal._wire.chunks import Buffer, Chunk, decode
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb


def decode_values(message: Buffer) -> tuple[list[header_pb2.ShardHeader], list[Chunk]]:
    """Decodes a `PullReply`; arguments and errors are those of `shoal._wire.chunks.decode_push`."""
    carrier, chunks = decode(pb.PullReply, message)
    return list(carrier.headers), chunks
