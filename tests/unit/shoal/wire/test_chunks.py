"""Hand-written encoding of chunks: it writes and reads the same bytes and fields as the generated classes."""

import itertools
import random
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal import errors
from shoal._wire.chunks import Buffer, Chunk, decode_push, encode_push, encode_values
from shoal.v1 import header_pb2, tensor_pb2
from shoal.v1 import parameter_server_pb2 as pb
from support.pull_replies import decode_values
from support.run_lengths import draws

BORDERS = [0, 1, 127, 128, 16_383, 16_384, (1 << 21) - 1, 1 << 21, (1 << 32) - 1]
SIZES = [0, 1, 5, 127, 128, 16_383, 16_384, 20_000]
DATA = memoryview(np.random.default_rng(0).bytes(1 << 15))
LONGEST_NAME = 200

uint32s = st.one_of(st.sampled_from(BORDERS), st.integers(0, (1 << 32) - 1))
uint64s = st.one_of(st.sampled_from([*BORDERS, 1 << 32, (1 << 63) + 5, (1 << 64) - 1]), st.integers(0, (1 << 64) - 1))
names = st.text("ab-é鱼", max_size=LONGEST_NAME)
stamps = st.builds(header_pb2.Stamp, job=names, worker=names, incarnation=uint64s, step=uint64s, generation=uint64s)
push_headers = st.builds(
    pb.PushHeader,
    stamp=st.none() | stamps,
    shards=st.lists(uint32s, max_size=5),
    weight=st.floats(0, 1e9),
    commit=st.booleans(),
    aggregations=st.lists(st.sampled_from(tensor_pb2.Aggregation.values()), max_size=3),
    versions=st.lists(uint64s, max_size=5),
    region=uint32s,
)
shard_headers = st.lists(
    st.builds(header_pb2.ShardHeader, shard=uint32s, generation=uint64s, version=uint64s, step=uint64s), max_size=4
)
datas = st.builds(
    lambda size, start: DATA[start : start + size],
    st.one_of(st.sampled_from(SIZES), st.integers(0, 300)),
    st.integers(0, 1000),
)
chunk_lists = st.lists(st.builds(Chunk, uint32s, uint32s, uint64s, datas), max_size=5)


def encoded(headers: Sequence[header_pb2.ShardHeader]) -> bytes:
    return pb.PullReply(headers=headers).SerializeToString()


def generated(chunks: Sequence[Chunk]) -> list[pb.Chunk]:
    return [pb.Chunk(shard=c.shard, arena=c.arena, offset=c.offset, data=bytes(c.data)) for c in chunks]


def plain(chunks: Sequence[Chunk | pb.Chunk]) -> list[tuple[int, int, int, bytes]]:
    return [(c.shard, c.arena, c.offset, bytes(c.data)) for c in chunks]


def checked_message(pieces: Sequence[Buffer]) -> bytes:
    """Joins the pieces of a message; asserts that none is empty, and that no two adjacent ones are small."""
    assert all(len(piece) for piece in pieces)
    assert not any(a is b is bytearray for a, b in itertools.pairwise(map(type, pieces)))
    return b"".join(pieces)


def check_reads_alike(message: bytes) -> bool:
    """Asserts that both decoders read a message alike, as either kind. Returns whether it is a push."""
    check_values_read_alike(message)
    try:
        expected = pb.PushRequest.FromString(message)
    except DecodeError:
        with pytest.raises(errors.BadChunk, match="malformed at byte"):
            decode_push(message)
        return False
    header, chunks = decode_push(message)
    assert plain(chunks) == plain(expected.chunks)
    assert (header is not None) == expected.HasField("header")
    # As bytes: NaN is not equal to itself, and unknown fields count.
    assert (header or pb.PushHeader()).SerializeToString() == expected.header.SerializeToString()
    return True


def check_values_read_alike(message: bytes) -> None:
    try:
        expected = pb.PullReply.FromString(message)
    except DecodeError:
        with pytest.raises(errors.BadChunk, match="malformed at byte"):
            decode_values(message)
        return
    headers, chunks = decode_values(message)
    assert plain(chunks) == plain(expected.chunks)
    assert [h.SerializeToString() for h in headers] == [h.SerializeToString() for h in expected.headers]


@given(st.none() | push_headers, chunk_lists)
@example(pb.PushHeader(), [])
@example(None, [])
def test_a_push_is_written_and_read_as_the_generated_class_does(
    header: pb.PushHeader | None, chunks: Sequence[Chunk]
) -> None:
    message = pb.PushRequest(header=header, chunks=generated(chunks)).SerializeToString()
    assert checked_message(encode_push(header, chunks)) == message
    assert decode_push(message) == (header, chunks)


@given(shard_headers, chunk_lists)
def test_values_are_written_and_read_as_the_generated_class_does(
    headers: Sequence[header_pb2.ShardHeader], chunks: Sequence[Chunk]
) -> None:
    message = pb.PullReply(headers=headers, chunks=generated(chunks)).SerializeToString()
    assert checked_message(encode_values(encoded(headers), chunks)) == message
    assert decode_values(message) == (headers, chunks)


def test_every_pair_of_a_field_and_a_border() -> None:
    chunk = Chunk(3, 3, 3, memoryview(b"xyz"))
    for border, size in itertools.product([*BORDERS, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1], SIZES):
        chunks = [replace(chunk, offset=border, data=DATA[:size])]
        if border < 1 << 32:
            chunks += [replace(chunk, shard=border), replace(chunk, arena=border)]
        message = pb.PushRequest(chunks=generated(chunks)).SerializeToString()
        assert checked_message(encode_push(None, chunks)) == message
        assert decode_push(message) == (None, chunks)


def test_one_large_chunk_is_two_pieces_and_its_data_are_lent() -> None:
    data = memoryview(bytes(1 << 20))
    pieces = encode_push(pb.PushHeader(weight=1), [Chunk(1, 2, 3, data)])
    assert len(pieces) == 2
    assert pieces[1] is data
    nothing = Chunk(1, 1, 0, memoryview(b""))
    assert (
        len(encode_values(encoded([header_pb2.ShardHeader()]), [nothing, nothing, Chunk(1, 2, 3, data), nothing])) == 3
    )
    assert encode_push(None, []) == []


@pytest.mark.parametrize("field", ["shard", "arena", "offset"])
@pytest.mark.parametrize("value", [-1, -(1 << 40), 1 << 64])
def test_number_beyond_its_field_is_refused(field: str, value: int) -> None:
    change: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=f"is {value}; it must be from 0 to"):
        encode_push(None, [replace(Chunk(0, 0, 0, memoryview(b"")), **change)])


@pytest.mark.parametrize("lend", [bytes, bytearray, memoryview, lambda message: memoryview(bytearray(message))])
def test_data_are_views_into_the_message(lend: Any) -> None:
    chunks = [Chunk(1, 0, 1 << 40, DATA[:300]), Chunk(1, 1, 0, DATA[300:301])]
    message = lend(checked_message(encode_push(pb.PushHeader(weight=1), chunks)))
    owner = message.obj if isinstance(message, memoryview) else message
    _, decoded = decode_push(message)
    assert decoded == chunks
    assert all(chunk.data.obj is owner for chunk in decoded)
    assert all(np.shares_memory(np.frombuffer(c.data, np.uint8), np.frombuffer(message, np.uint8)) for c in decoded)


def test_a_view_of_other_elements_is_read_as_bytes() -> None:
    chunks = [Chunk(1, 0, 0, DATA[:26])]
    message = checked_message(encode_push(None, chunks))
    assert len(message) == 32
    elements: Any = memoryview(bytes(8) + message + bytes(8)).cast("d")
    assert decode_push(elements[1:-1]) == (None, chunks)


# Encodings that protobuf allows and Shoal does not send.


def varint(value: int, more: int = 0) -> bytes:
    """A number, in so many more bytes than it needs."""
    encoded = bytearray()
    while value >= 0x80 or more > len(encoded) + 1:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(encoded) + bytes([value])


def test_varint_has_the_stated_length() -> None:
    assert [varint(300), varint(0), varint(0, 3), varint(1, 2)] == [b"\xac\x02", b"\0", b"\x80\x80\0", b"\x81\0"]


varints = st.builds(varint, uint64s, st.integers(0, 10))
lengths_more = st.integers(0, 5)


@st.composite
def lengthy(draw: Callable[..., Any], number: int, contents: st.SearchStrategy[bytes]) -> bytes:
    content = draw(contents)
    tag, size = varint(number << 3 | 2, draw(st.integers(0, 4))), varint(len(content), draw(lengths_more))
    return tag + size + bytes(content)


numbers = st.sampled_from([1, 2, 3, 4, 5, 15, 16, 2047, (1 << 29) - 1])
unknown_values = st.one_of(
    varints.map(lambda value: (0, value)),
    st.binary(min_size=8, max_size=8).map(lambda value: (1, value)),
    st.binary(max_size=20).map(lambda value: (2, varint(len(value)) + value)),
    st.binary(min_size=4, max_size=4).map(lambda value: (5, value)),
)
# Of any number and wire type, the known ones included: a known field of another wire type is an unknown one.
scalars = st.builds(lambda number, value: varint(number << 3 | value[0]) + value[1], numbers, unknown_values)
groups = st.builds(
    lambda number, inner: varint(number << 3 | 3) + b"".join(inner) + varint(number << 3 | 4),
    numbers,
    st.lists(scalars, max_size=3),
)
unknowns = scalars | groups


def fields(*known: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Known and unknown fields, each any number of times and in any order."""
    return st.lists(st.one_of(*known, *known, unknowns), max_size=6).map(b"".join)


def scalar(number: int) -> st.SearchStrategy[bytes]:
    return varints.map(lambda value: varint(number << 3) + value)


odd_chunks = lengthy(2, fields(scalar(1), scalar(2), scalar(3), lengthy(4, st.binary(max_size=20))))
odd_stamps = lengthy(1, fields(lengthy(1, names.map(str.encode)), scalar(3), scalar(4)))
odd_headers = lengthy(1, fields(odd_stamps, scalar(2), scalar(4), lengthy(2, varints), scalar(1), scalar(3)))


@settings(max_examples=draws(60))
@given(fields(odd_headers, odd_chunks, odd_chunks))
def test_valid_message_is_read_as_the_generated_class_reads_it(message: bytes) -> None:
    check_reads_alike(message)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        pytest.param("22 01 61 18 03 10 02 08 01", (1, 2, 3, b"a"), id="fields in another order"),
        pytest.param("08 07 08 01 10 02 22 02 62 62 22 01 61", (1, 2, 0, b"a"), id="the last of a field counts"),
        pytest.param("08 00 10 00 18 00 22 00", (0, 0, 0, b""), id="zeros that need not be there"),
        pytest.param("08 81 00 10 82 80 00 18 83 80 80 80 80 80 80 80 80 00", (1, 2, 3, b""), id="long varints"),
        pytest.param("28 05 08 01", (1, 0, 0, b""), id="an unknown varint"),
        pytest.param("08 01 31 01 02 03 04 05 06 07 08", (1, 0, 0, b""), id="an unknown fixed64"),
        pytest.param("08 01 3a 02 08 02", (1, 0, 0, b""), id="unknown bytes"),
        pytest.param("08 01 43 08 02 44", (1, 0, 0, b""), id="an unknown group"),
        pytest.param("08 01 4d 08 02 08 02", (1, 0, 0, b""), id="an unknown fixed32"),
        pytest.param("08 01 20 05", (1, 0, 0, b""), id="a known field of another wire type"),
        pytest.param("08 ff ff ff ff 7f", ((1 << 32) - 1, 0, 0, b""), id="more than 32 bits"),
        pytest.param("18" + "ff" * 9 + "7f", (0, 0, (1 << 64) - 1, b""), id="more than 64 bits"),
    ],
)
def test_an_odd_chunk_is_read(written: str, read: tuple[int, int, int, bytes]) -> None:
    chunk = bytes.fromhex(written)
    message = b"\x12" + varint(len(chunk)) + chunk
    assert plain(decode_push(message)[1]) == plain(decode_values(message)[1]) == [read]
    assert check_reads_alike(message)


@pytest.mark.parametrize(
    "unknown", ["18 05", "19 01 02 03 04 05 06 07 08", "1a 02 08 01", "1b 08 01 1c", "1d 01 02 03 04"]
)
def test_unknown_field_of_a_message_is_skipped(unknown: str) -> None:
    chunk = Chunk(1, 2, 3, memoryview(b"abc"))
    whole, unread = checked_message(encode_push(pb.PushHeader(weight=1), [chunk])), bytes.fromhex(unknown)
    for message in (unread + whole, whole + unread, whole[:11] + unread + whole[11:]):
        assert decode_push(message) == (pb.PushHeader(weight=1), [chunk])


def test_parts_of_a_header_are_merged() -> None:
    first = pb.PushHeader(stamp=header_pb2.Stamp(job="j", step=3), shards=[1, 2], weight=2)
    second = pb.PushHeader(stamp=header_pb2.Stamp(worker="w", step=4), shards=[3])
    chunk = checked_message(encode_push(None, [Chunk(1, 2, 3, memoryview(b"abc"))]))
    one, other = checked_message(encode_push(first, [])), checked_message(encode_push(second, []))
    merged = pb.PushHeader(stamp=header_pb2.Stamp(job="j", worker="w", step=4), shards=[1, 2, 3], weight=2)
    for parts in ([one, other, chunk], [one, chunk, other], [chunk, one, chunk, other]):
        header, chunks = decode_push(b"".join(parts))
        assert header == merged
        assert plain(chunks) == [(1, 2, 3, b"abc")] * parts.count(chunk)


# What is no message at all.


@pytest.mark.parametrize("decode", [decode_push, decode_values])
@pytest.mark.parametrize(
    ("written", "at", "what"),
    [
        pytest.param("12 05 08 01", 1, "a length of 5, but only 2 bytes are left", id="a chunk beyond the message"),
        pytest.param("0a 7f 08 01", 1, "a length of 127, but only 2", id="a header beyond the message"),
        pytest.param("12 04 22 05 61 61 12 00", 3, "a length of 5, but only 2", id="data beyond their chunk"),
        pytest.param("12 ff ff ff ff 07 08", 1, "a length of 2147483647", id="2 GiB"),
        pytest.param("12 ff ff ff ff ff ff ff ff ff 01", 1, "a length of 1844", id="a negative length"),
        pytest.param("12", 1, "a varint does not end within 0 bytes", id="no length"),
        pytest.param("12 80", 1, "a varint does not end within 1 bytes", id="half a length"),
        pytest.param("12 02 08 80", 3, "a varint does not end within 1 bytes", id="a number beyond its chunk"),
        pytest.param("12 0c 18" + "80" * 10 + "00", 3, "a varint does not end within 10 bytes", id="11 bytes"),
        pytest.param("12 80 80 80 80 80 00", 1, "longer than necessary", id="a length in 6 bytes"),
        pytest.param("12 00 13 08 01", 2, "the tag 0x13 does not begin a chunk", id="a group with no end"),
        pytest.param("12 00 0c", 2, "the tag 0x0c does not begin a chunk", id="an end with no group"),
        pytest.param("12 02 00 01", 2, "the tag 0x00 does not begin the next field of a chunk", id="field 0"),
        pytest.param("12 02 0f 01", 2, "the tag 0x0f does not begin the next field of a chunk", id="wire type 7"),
        pytest.param("0a 02 08 80 12 00", 0, "a header cannot be read", id="half a number in a header"),
    ],
)
def test_malformed_message_is_refused_with_its_position(
    decode: Callable[..., Any], written: str, at: int, what: str
) -> None:
    with pytest.raises(errors.BadChunk, match=f"malformed at byte {at} or later: .*{what}.*send it again") as raised:
        decode(bytes.fromhex(written))
    assert raised.value.details == {"at": str(at)}
    check_reads_alike(bytes.fromhex(written))


def test_a_name_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(errors.BadChunk, match="a header cannot be read"):
        decode_push(bytes.fromhex("0a 05 0a 03 0a 01 ff"))


def test_groups_nest_as_deeply_as_in_the_generated_class() -> None:
    taken = set()
    for depth, inside in itertools.product(range(90, 104), (b"", b"\x0a", b"\x12")):
        nested = b"\x5b" * depth + b"\x5c" * depth
        taken.add(check_reads_alike(inside + varint(len(nested)) + nested if inside else nested))
    assert taken == {True, False}


STAMP = header_pb2.Stamp(job="job", worker="worker-1", incarnation=300, step=70_000, generation=1)
CHUNKS = [
    Chunk(0, 0, 0, DATA[:3]),
    Chunk(300, 1, 1 << 40, DATA[:150]),
    Chunk(1, 0, 0, DATA[:0]),
]
WHOLE = [
    checked_message(encode_push(pb.PushHeader(stamp=STAMP, shards=[1, 300], weight=2.5, versions=[7]), CHUNKS)),
    checked_message(
        encode_values(
            encoded([header_pb2.ShardHeader(shard=1, generation=2, version=300), header_pb2.ShardHeader()]), CHUNKS
        )
    ),
]


@pytest.mark.parametrize("message", WHOLE)
def test_every_beginning_of_a_message(message: bytes) -> None:
    # A beginning that ends between two fields is a message, too.
    assert 3 < sum(check_reads_alike(message[:size]) for size in range(len(message) + 1)) < 20


@pytest.mark.parametrize("message", WHOLE)
def test_every_byte_of_a_message_changed(message: bytes) -> None:
    rng = random.Random(1)
    outcomes = set()
    for at in range(len(message)):
        for byte in {0, 1, 0x7F, 0x80, 0xFF, message[at] ^ 1, message[at] ^ 0x80, rng.randrange(256)}:
            outcomes.add(check_reads_alike(message[:at] + bytes([byte]) + message[at + 1 :]))
    assert outcomes == {True, False}


def test_messages_cut_up_at_random() -> None:
    rng = random.Random(2)
    outcomes = [0, 0]
    for _ in range(3_000):
        message = bytearray(rng.choice(WHOLE))
        for _ in range(rng.randint(1, 4)):
            at, size = rng.randrange(len(message)), rng.randint(0, 4)
            message[at : at + rng.randint(0, 4)] = rng.choice((rng.randbytes(size), message[at : at + size] * 2))
            if not message:
                break
        outcomes[check_reads_alike(bytes(message))] += 1
    assert min(outcomes) > 100


@settings(max_examples=draws(60))
@given(
    st.binary(max_size=60)
    | st.lists(st.sampled_from(b"\x0a\x12\x08\x10\x18\x22\x00\x01\x02\x03\x80\xff\x0b\x0c")).map(bytes)
)
def test_random_bytes_are_read_as_the_generated_class_reads_them(message: bytes) -> None:
    check_reads_alike(message)


def test_a_claimed_length_is_never_allocated() -> None:
    tracemalloc.start()
    try:
        for length, head in itertools.product((1 << 26, (1 << 31) - 1, 1 << 40), (b"\x0a", b"\x12", b"\x12\x0b\x22")):
            with pytest.raises(errors.BadChunk):
                decode_push(head + varint(length))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
