"""Encoding of the messages that carry chunks, `PushRequest` and `PullReply`, without copies of the bulk data.

protobuf's generated classes would copy a chunk's data when they write and when they read a message. This module writes
and reads the same bytes, but it sends data from the views that the caller passes, and returns received data as views
into the message. The generated classes still handle the headers. `shoal._wire.framing` defines what chunks mean.

The encoding is protobuf's (https://protobuf.dev/programming-guides/encoding). In both messages the headers are field 1
and the chunks field 2. So a message is the generated class's encoding of the headers, followed by the chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError

from shoal import errors
from shoal.v1 import parameter_server_pb2 as pb

Buffer = bytes | bytearray | memoryview

Carrier = TypeVar("Carrier", pb.PushRequest, pb.PullReply)

# Tags: a field's number and its wire type. Tags of the messages:
_HEADER, _CHUNK = 0x0A, 0x12
# Tags of a chunk:
_SHARD, _ARENA, _OFFSET, _DATA = 0x08, 0x10, 0x18, 0x22

_UINT32, _UINT64 = (1 << 32) - 1, (1 << 64) - 1
_VARINT_BYTES = 10  # the most for 64 bits
_ONE_BYTE = tuple(bytes([value]) for value in range(128))
_NOTHING = memoryview(b"")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a slab in a message.

    Attributes:
        shard: number of the shard of one of the slab's arenas.
        arena: index of this arena in its shard.
        offset: bytes from the arena's start. The piece may lie in later arenas of the slab, or go on in them.
        data: unsigned bytes, flat and contiguous. They are never copied here, so their owner must not change them until
            the message has been sent, or until the receiver has processed the chunk.
    """

    shard: int
    arena: int
    offset: int
    data: memoryview


def encode_push(header: pb.PushHeader | None, chunks: Sequence[Chunk]) -> list[Buffer]:
    """Encodes a `PushRequest`.

    Args:
        header: the header; None means that the field is absent.
        chunks: the chunks, in order.

    Returns:
        The message in pieces. Joined, they are the bytes that the generated class would write. No piece is empty, and
        pieces with data are the chunks' own views. Without header and chunks, the list is empty.

    Raises:
        ValueError: a shard, arena or offset is out of its field's range.
    """
    return _encode(pb.PushRequest(header=header).SerializeToString(), chunks)


def encode_values(headers: bytes, chunks: Sequence[Chunk]) -> list[Buffer]:
    """Encodes a `PullReply`.

    Args:
        headers: an encoded `PullReply` that has only the headers, or nothing.
        chunks: the chunks, in order.

    Returns:
        As `encode_push`, which raises the same errors.
    """
    return _encode(headers, chunks)


def decode_push(message: Buffer) -> tuple[pb.PushHeader | None, list[Chunk]]:
    """Decodes a `PushRequest`. Accepts every message that the generated class accepts, with the same result.

    Args:
        message: the whole message, contiguous.

    Returns:
        The header, or None if it is absent, and the chunks. Their data are views into the message. If no official
        encoder wrote the message, they are views into a copy.

    Raises:
        BadChunk: the bytes are not such a message.
    """
    carrier, chunks = decode(pb.PushRequest, message)
    return carrier.header if carrier.HasField("header") else None, chunks


def decode(kind: type[Carrier], message: Buffer) -> tuple[Carrier, list[Chunk]]:
    """Decodes a message of one kind.

    Args:
        kind: the generated class of the message.
        message: the whole message, contiguous.

    Returns:
        The message, whose field of chunks may be empty, and a list of the chunks, as for `decode_push`.

    Raises:
        BadChunk: the bytes are not such a message.
    """
    view = memoryview(message).cast("B")
    try:
        start = _end_of_headers(view)
        # The generated class parses all headers at once: limits and merging are then as in the whole message.
        return kind.FromString(bytes(view[:start])), _read_chunks(view, start)
    except _Unusual as unusual:
        at, what = unusual.args
    except DecodeError:
        at, what = 0, "a header cannot be read"
    return _decode_whole(kind, view, at, what)


def read_start(kind: type[Carrier], start: memoryview, size: int) -> tuple[Carrier, Chunk, int] | None:
    """Reads the beginning of a message, so that its bulk can be received straight into its destination.

    Args:
        kind: the generated class of the message.
        start: the first bytes of the message.
        size: bytes of the whole message.

    Returns:
        The message without its chunks; its only chunk, without data; and the position of the first data byte. The data
        fill the rest of the message. None if the message does not have this form, or no official encoder wrote it.
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
    """Encodes a number >= 0 with 7 bits per byte, lowest first. All bytes but the last have their highest bit set."""
    if value < 0x80:
        return _ONE_BYTE[value]
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


class _Unusual(Exception):
    """The reader met bytes that no official encoder writes: at byte `args[0]`, for the reason `args[1]`."""


def _decode_whole(kind: type[Carrier], view: memoryview, at: int, what: str) -> tuple[Carrier, list[Chunk]]:
    """Decodes a message with the generated class, after the reader here failed at byte `at`."""
    try:
        carrier = kind.FromString(bytes(view))
    except DecodeError as error:
        raise errors.BadChunk(
            f"a {kind.DESCRIPTOR.name} of {len(view)} bytes is malformed at byte {at} or later: {what}; it was "
            "discarded; send it again, and if the error persists, check the sender's version",
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
            raise _Unusual(at, f"the tag {view[at]:#04x} does not begin a chunk")
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
        raise _Unusual(at, f"the tag {view[at]:#04x} does not begin the next field of a chunk")
    return chunk


def _read_fields(view: memoryview, at: int, end: int) -> tuple[Chunk, int]:
    """Reads a chunk's numeric fields. Returns the chunk without data, and the position after the fields."""
    shard = arena = offset = 0
    if at < end and view[at] == _SHARD:
        shard, at = _read_varint(view, at + 1, end, _UINT32)
    if at < end and view[at] == _ARENA:
        arena, at = _read_varint(view, at + 1, end, _UINT32)
    if at < end and view[at] == _OFFSET:
        offset, at = _read_varint(view, at + 1, end, _UINT64)
    return Chunk(shard, arena, offset, _NOTHING), at


def _read_length(view: memoryview, at: int, end: int) -> tuple[int, int]:
    """Reads the length of a field that ends before byte `end`. Returns its position and its size in bytes."""
    size, start = _read_varint(view, at, end, _UINT64)
    if size > end - start:
        raise _Unusual(at, f"a length of {size}, but only {end - start} bytes are left")
    return start, size


def _read_varint(view: memoryview, at: int, end: int, most: int) -> tuple[int, int]:
    """Reads a number of at most `most` that ends before byte `end`. Returns it, and the position after it."""
    if at < end and view[at] < 0x80:
        return view[at], at + 1
    value = shift = 0
    for index in range(at, min(end, at + _VARINT_BYTES)):
        byte = view[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value > most or (not byte and shift):
                raise _Unusual(at, f"a varint is larger than {most}, or longer than necessary")
            return value, index + 1
        shift += 7
    raise _Unusual(at, f"a varint does not end within {min(end - at, _VARINT_BYTES)} bytes")
