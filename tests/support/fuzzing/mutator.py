"""Mutation of valid inputs: each fuzzed input is a seed with a few bytes flipped, cut, repeated, spliced or replaced.

All choices come from the generator that the caller passes, so a number reproduces an input.
"""

import random
import struct
from collections.abc import Sequence

# Integers at the edges of their types, and floats that are not finite.
EDGES = (0, 1, 2, 127, 128, 255, 256, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63)
EDGES_64 = (*EDGES, 2**64 - 1)
ODD_FLOATS = (float("nan"), float("inf"), float("-inf"), -0.0, 5e-324, 3e38, -1.0)
_MOST_MUTATIONS = 4
_MOST_BYTES = 1 << 16


def _fixed() -> tuple[bytes, ...]:
    """Returns encodings of the edges: fixed size in both byte orders, varints, decimal text, and floats."""
    found: list[bytes] = []
    for edge in EDGES_64:
        for size in (1, 2, 4, 8):
            if edge < 1 << 8 * size:
                found += [edge.to_bytes(size, "little"), edge.to_bytes(size, "big")]
        found += [varint(edge), b"%d" % edge, b"-%d" % edge]
    for number in ODD_FLOATS:
        found += [struct.pack("<d", number), struct.pack("<f", number), repr(number).encode()]
    found += [b"\0", b"\xff" * 8, b"../", b"/", b"\\", b"[" * 64, b"{" * 64, b"\xc3\x28", b"\xed\xa0\x80", b"\\ud800"]
    found += [b"1e999", b"NaN", b"null", b"[]", b"{}", b'""', b"true", b"9" * 400, b"%00", b"%2e%2e", b"\r\n", b"\n"]
    return tuple(dict.fromkeys(found))


def varint(value: int) -> bytes:
    """Returns the varint of protobuf for a number >= 0."""
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


FIXED = _fixed()


def mutated(draw: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Returns a mutation of one of the seeds.

    Args:
        draw: the source of all choices.
        seeds: valid inputs, at least one.
    """
    data = bytearray(draw.choice(seeds))
    for _ in range(draw.randint(1, _MOST_MUTATIONS)):
        _mutate(draw, data, seeds)
    return bytes(data[:_MOST_BYTES])


def _mutate(draw: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    kind = draw.randrange(8)
    at = draw.randrange(len(data) + 1)
    stop = min(len(data), at + draw.choice((1, 2, 4, 8, 16, 64, 1024)))
    if kind == 0 and at < len(data):
        data[at] ^= 1 << draw.randrange(8)
    elif kind == 1 and at < len(data):
        data[at] = draw.randrange(256)
    elif kind == 2:
        del data[at:]
    elif kind == 3:
        del data[at:stop]
    elif kind == 4:
        data[at:at] = data[at:stop] * draw.choice((1, 1, 1, 2, 16))
    elif kind == 5:
        other = draw.choice(seeds)
        begin = draw.randrange(len(other) + 1)
        data[at : draw.choice((at, stop, len(data)))] = other[begin : begin + draw.choice((4, 32, 1 << 16))]
    else:
        edge = draw.choice(FIXED)
        data[at : draw.choice((at, at + len(edge)))] = edge
