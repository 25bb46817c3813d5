"""Chunk reader: puts the chunks of a message into the memory of an assembler.

The message is read from a lane, or is in memory already.
"""

from shoal._transport.connection import Connection
from shoal._wire import Assembler, Buffer, Carrier, decode, read_start

# Bytes to peek at: enough for the numbers of one chunk, and for the headers of hundreds of shards.
_START_BYTES = 4096
# Minimum size of a frame that is received straight into its destination. For smaller ones, the extra system calls
# cost more than the copy.
_PLACED_BYTES = 64 << 10


def read_message(kind: type[Carrier], message: Buffer, assembler: Assembler) -> tuple[Carrier, int]:
    """Adds the chunks of a message to an assembler.

    Args:
        kind: the generated class of the message.
        message: the whole message.
        assembler: receives the chunks.

    Returns:
        The message without its chunks, and the bytes of their data.

    Raises:
        BadChunk: the bytes are not such a message, or a chunk does not fit.
    """
    carrier, chunks = decode(kind, message)
    for chunk in chunks:
        assembler.add(chunk)
    return carrier, sum(len(chunk.data) for chunk in chunks)


def read_frame(kind: type[Carrier], lane: Connection, assembler: Assembler) -> tuple[Carrier, int]:
    """Adds the chunks of the message in the current frame to an assembler. A large chunk is not copied.

    Args:
        kind: the generated class of the message.
        lane: a connection on which a frame has begun.
        assembler: receives the chunks.

    Returns:
        The message without its chunks, and the bytes of their data.

    Raises:
        BadChunk: as for `read_message`; the frame has then been read.
        Unreachable, DeadlineExceeded: as for `Connection.receive`.
    """
    size = lane.left
    found = read_start(kind, lane.peek(_START_BYTES), size) if size >= _PLACED_BYTES else None
    if found:
        carrier, chunk, data = found
        targets = assembler.memory(chunk, size - data)
        if targets is not None:
            lane.fill(data, targets)
            assembler.filled(chunk, size - data)
            return carrier, size - data
    return read_message(kind, lane.payload(), assembler)


__all__ = ["read_frame", "read_message"]
