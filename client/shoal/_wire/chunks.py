"""The bytes of the messages that carry chunks, `PushRequest` and `PullReply`, written and read around the bulk data.

The generated classes are the contract: what is written here is what they write, what is read here is what they read.
They would copy a chunk's data both ways, though; here, data leave as the views that were given and arrive as views into
the message. Headers are left to the generated classes. What chunks mean is in `shoal._wire.framing`.

The encoding is protobuf's (https://protobuf.dev/programming-guides/encoding). In both messages the headers are field 1
and the chunks field 2: a message is what the generated class writes of its headers, followed by the chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError

from shoal import errors
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb

Buffer = bytes | bytearray | memoryview

Carrier = TypeVar("Carrier", pb.PushRequest, pb.PullReply)

# Tags: a field's number and its wire type. Of the messages:
_HEADER, _CHUNK = 0x0A, 0x12
# Of a chunk:
_SHARD, _ARENA, _OFFSET, _DATA = 0x08, 0x10, 0x18, 0x22

_UINT32, _UINT64 = (1 << 32) - 1, (1 << 64) - 1
_VARINT_BYTES = 10  # at most, for 64 bits
_ONE_BYTE = tuple(bytes([value]) for value in range(128))
_NOTHING = memoryview(b"")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an arena on its way.

    Attributes:
        shard: its number.
        arena: its index in the shard.
        offset: bytes from the arena's start.
        data: unsigned bytes, flat and contiguous. They are never copied here, so whoever lends them must keep them as
            they are until the message has gone, or until the chunk has been taken.
    """

    shard: int
    arena: int
    offset: int
    data: memoryview


def encode_push(header: pb.PushHeader | None, chunks: Sequence[Chunk]) -> list[Buffer]:
    """Encodes a `PushRequest`.

    Args:
        header: None: the field is absent.
        chunks: in order.

    Returns:
        What to send, piece after piece: together the bytes that the generated class would write. None is empty, those
        with data are the chunks' own views, and there is no piece at all where there is neither header nor chunk.

    Raises:
        ValueError: a shard, arena or offset is out of its field's range.
    """
    return _encode(pb.PushRequest(header=header).SerializeToString(), chunks)


def encode_values(headers: Sequence[header_pb2.ShardHeader], chunks: Sequence[Chunk]) -> list[Buffer]:
    """Encodes a `PullReply`; the rest is as for `encode_push`."""
    return _encode(pb.PullReply(headers=headers).SerializeToString(), chunks)


def decode_push(message: Buffer) -> tuple[pb.PushHeader | None, list[Chunk]]:
    """Decodes a `PushRequest`, reading whatever the generated class reads, in the same way.

    Args:
        message: all of it, contiguous.

    Returns:
        The header, None where it is absent, and the chunks. Their data are views into the message; into a copy, where
        no official encoder wrote it.

    Raises:
        BadChunk: this is no such message.
    """
    carrier, chunks = decode(pb.PushRequest, message)
    return carrier.header if carrier.HasField("header") else None, chunks


def decode(kind: type[Carrier], message: Buffer) -> tuple[Carrier, list[Chunk]]:
    """Decodes a message of this kind: itself, perhaps without its chunks, and its chunks; else as `decode_push`."""
    view = memoryview(message).cast("B")
    try:
        start = _end_of_headers(view)
        # As part of the whole message, so that limits (of nesting) and merging are the whole message's.
        return kind.FromString(bytes(view[:start])), _read_chunks(view, start)
    except _Unusual as unusual:
        at, what = unusual.args
    except DecodeError:
        at, what = 0, "a header cannot be read"
    return _decode_whole(kind, view, at, what)


def read_start(kind: type[Carrier], start: memoryview, size: int) -> tuple[Carrier, Chunk, int] | None:
    """Reads how a message begins, so that its bulk can go where it belongs without being read.

    Args:
        kind: of the message.
        start: its first bytes.
        size: of the whole message, in bytes.

    Returns:
        The message without its chunks; its only chunk, without its data; and the byte with which the data begin: they
        are all the rest. None where the message is not of that form, or not as an official encoder writes it.
    """
    try:
        at = _end_of_headers(start)
        if at >= len(start) or start[at] != _CHUNK:
            return None
        begin, length = _read_length(start, at + 1, size)
        chunk, end = _read_fields(start, begin, size)
        if begin + length != size or start[end] != _DATA:
            return None
        data, length = _read_length(start, end + 1, size)
        if data + length != size:
            return None
        return kind.FromString(bytes(start[:at])), chunk, data
    except (_Unusual, DecodeError, IndexError):
        return None


def _encode(headers: bytes, chunks: Sequence[Chunk]) -> list[Buffer]:
    pieces: list[Buffer] = []
    small = bytearray(headers)
    for chunk in chunks:
        size = chunk.data.nbytes
        fields = _scalar(_SHARD, chunk.shard, _UINT32)
        fields += _scalar(_ARENA, chunk.arena, _UINT32)
        fields += _scalar(_OFFSET, chunk.offset, _UINT64)
        if size:
            fields += _ONE_BYTE[_DATA] + _varint(size)
        small += _ONE_BYTE[_CHUNK] + _varint(len(fields) + size) + fields
        if size:
            pieces += (small, chunk.data)
            small = bytearray()
    if small:
        pieces.append(small)
    return pieces


def _scalar(tag: int, value: int, most: int) -> bytes:
    if not value:
        return b""
    if not 0 < value <= most:
        raise ValueError(f"a chunk's field {tag >> 3} is {value}; it must be from 0 to {most}")
    return _ONE_BYTE[tag] + _varint(value)


def _varint(value: int) -> bytes:
    """Encodes a number >= 0: 7 bits a byte, the lowest first; all bytes but the last have their highest bit set."""
    if value < 0x80:
        return _ONE_BYTE[value]
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


class _Unusual(Exception):
    """The reader met what no official encoder writes: at byte `args[0]` of the message, as `args[1]` says."""


def _decode_whole(kind: type[Carrier], view: memoryview, at: int, what: str) -> tuple[Carrier, list[Chunk]]:
    """Has the generated class read a message of which the reader here made sense only up to byte `at`."""
    try:
        carrier = kind.FromString(bytes(view))
    except DecodeError as error:
        raise errors.BadChunk(
            f"a {kind.DESCRIPTOR.name} of {len(view)} bytes is malformed at byte {at} or after it: {what}; nothing was "
            "kept, send it again, and if that does not help, look at the sender's version",
            at=at,
        ) from error
    return carrier, [Chunk(chunk.shard, chunk.arena, chunk.offset, memoryview(chunk.data)) for chunk in carrier.chunks]


def _end_of_headers(view: memoryview) -> int:
    at, end = 0, len(view)
    while at < end and view[at] == _HEADER:
        at = sum(_read_length(view, at + 1, end))
    return at


def _read_chunks(view: memoryview, at: int) -> list[Chunk]:
    chunks, end = [], len(view)
    while at < end:
        if view[at] != _CHUNK:
            raise _Unusual(at, f"the tag {view[at]:#04x} is not a chunk's")
        start, size = _read_length(view, at + 1, end)
        at = start + size
        chunks.append(_read_chunk(view, start, at))
    return chunks


def _read_chunk(view: memoryview, at: int, end: int) -> Chunk:
    """Reads the chunk that fills bytes [at, end): its fields in order, each at most once."""
    chunk, at = _read_fields(view, at, end)
    if at < end and view[at] == _DATA:
        start, size = _read_length(view, at + 1, end)
        at = start + size
        if size:
            chunk = Chunk(chunk.shard, chunk.arena, chunk.offset, view[start:at])
    if at != end:
        raise _Unusual(at, f"the tag {view[at]:#04x} is not that of a chunk's next field")
    return chunk


def _read_fields(view: memoryview, at: int, end: int) -> tuple[Chunk, int]:
    """Reads a chunk's numbers; also says where they end."""
    shard = arena = offset = 0
    if at < end and view[at] == _SHARD:
        shard, at = _read_varint(view, at + 1, end, _UINT32)
    if at < end and view[at] == _ARENA:
        arena, at = _read_varint(view, at + 1, end, _UINT32)
    if at < end and view[at] == _OFFSET:
        offset, at = _read_varint(view, at + 1, end, _UINT64)
    return Chunk(shard, arena, offset, _NOTHING), at


def _read_length(view: memoryview, at: int, end: int) -> tuple[int, int]:
    """Reads the length of what lies before byte `end`: where that starts, and its bytes."""
    size, start = _read_varint(view, at, end, _UINT64)
    if size > end - start:
        raise _Unusual(at, f"a length of {size}, where {end - start} bytes are left")
    return start, size


def _read_varint(view: memoryview, at: int, end: int, most: int) -> tuple[int, int]:
    """Reads a number of at most `most` that ends before byte `end`: the number, and where the next field starts."""
    if at < end and view[at] < 0x80:
        return view[at], at + 1
    value = shift = 0
    for index in range(at, min(end, at + _VARINT_BYTES)):
        byte = view[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value > most or (not byte and shift):
                raise _Unusual(at, f"a varint over {most}, or in more bytes than it needs")
            return value, index + 1
        shift += 7
    raise _Unusual(at, f"a varint with no end in the {min(end - at, _VARINT_BYTES)} bytes that it may have")
