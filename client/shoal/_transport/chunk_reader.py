"""Messages with chunks on their way in: from a lane, or whole, to the memory that an assembler has for them."""

from shoal._transport.connection import Connection
from shoal._wire import Assembler, Buffer, Carrier, decode, read_start

# Of a message's beginning: enough for one chunk's numbers, and for the headers of hundreds of shards.
_START_BYTES = 4096
# From so many bytes on the kernel puts them where they belong; for fewer, the extra calls cost more than the copy.
_PLACED_BYTES = 64 << 10


def read_message(kind: type[Carrier], message: Buffer, assembler: Assembler) -> tuple[Carrier, int]:
    """Takes the chunks of a message.

    Returns:
        The message without them, and their bytes.

    Raises:
        BadChunk: it is no such message, or a chunk does not fit.
    """
    carrier, chunks = decode(kind, message)
    for chunk in chunks:
        assembler.add(chunk)
    return carrier, sum(len(chunk.data) for chunk in chunks)


def read_frame(kind: type[Carrier], lane: Connection, assembler: Assembler) -> tuple[Carrier, int]:
    """As `read_message`, for one in a frame that has begun. A large chunk is not copied on its way.

    Raises:
        BadChunk: as above; the frame is taken.
        Unreachable, DeadlineExceeded: as `Connection.receive`.
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
