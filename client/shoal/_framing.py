"""Arenas as chunks, and chunks as arenas again: the one place that knows how tensors travel.

Both ends use both directions: a server sends what a client pulls, a client sends what it pushes.
"""

from collections.abc import Collection, Iterable, Iterator

import numpy as np

from shoal import errors
from shoal._layout import Aggregation, ShardLayout
from shoal._rpc import CHUNK_BYTES
from shoal.v1 import parameter_server_pb2 as pb

# What a message's chunks may hold together. Small arenas share a message, large ones take many.
_CHUNK_OVERHEAD = 64  # bytes, at most, of one chunk's framing


def chunks(shard: int, arenas: Iterable[tuple[int, np.ndarray]]) -> Iterator[pb.Chunk]:
    """Cuts a shard's arenas, each a flat array with its index, into chunks in the order that the contract asks for."""
    for index, array in arenas:
        raw = array.view(np.uint8)
        for offset in range(0, raw.nbytes, CHUNK_BYTES):
            yield pb.Chunk(shard=shard, arena=index, offset=offset, data=raw[offset : offset + CHUNK_BYTES].tobytes())


def messages(stream: Iterable[pb.Chunk]) -> Iterator[list[pb.Chunk]]:
    """Groups chunks so that a message carries about `CHUNK_BYTES` at most."""
    group: list[pb.Chunk] = []
    size = 0
    for chunk in stream:
        cost = len(chunk.data) + _CHUNK_OVERHEAD
        if group and size + cost > CHUNK_BYTES + _CHUNK_OVERHEAD:
            yield group
            group, size = [], 0
        group.append(chunk)
        size += cost
    if group:
        yield group


class Assembler:
    """Puts the chunks of one shard together again, refusing any that is not exactly the next.

    Args:
        layout: of the shard.
        aggregations: the arenas of these are to come; None: all.
    """

    def __init__(self, layout: ShardLayout, aggregations: Collection[Aggregation] | None = None) -> None:
        self._shard = layout.shard
        self._arenas = {
            index: np.empty(arena.elements, arena.dtype)
            for index, arena in enumerate(layout.arenas)
            if aggregations is None or arena.aggregation in aggregations
        }
        self._filled = dict.fromkeys(self._arenas, 0)  # bytes, by arena

    def add(self, chunk: pb.Chunk) -> None:
        """Takes the next chunk.

        Raises:
            BadChunk: it names an arena that is not expected, does not start where the last one ended, overruns the
                arena, or splits an element.
        """
        array = self._arenas.get(chunk.arena)
        if array is None:
            raise self._bad(f"arena {chunk.arena} is not one of those expected, {sorted(self._arenas)}")
        filled, size = self._filled[chunk.arena], len(chunk.data)
        if chunk.offset != filled:
            raise self._bad(
                f"arena {chunk.arena}: a chunk starts at byte {chunk.offset}, but the last ended at {filled}"
            )
        if filled + size > array.nbytes:
            raise self._bad(f"arena {chunk.arena}: a chunk ends at byte {filled + size} of {array.nbytes}")
        if not size or size % array.itemsize:
            raise self._bad(
                f"arena {chunk.arena}: a chunk of {size} bytes is not a number of {array.itemsize}-byte elements"
            )
        array.view(np.uint8)[filled : filled + size] = np.frombuffer(chunk.data, np.uint8)
        self._filled[chunk.arena] = filled + size

    def finish(self) -> dict[int, np.ndarray]:
        """The whole arenas by index.

        Raises:
            BadChunk: something is missing.
        """
        for index, array in self._arenas.items():
            if self._filled[index] != array.nbytes:
                raise self._bad(f"arena {index}: the stream ended after {self._filled[index]} of {array.nbytes} bytes")
        return self._arenas

    def _bad(self, what: str) -> errors.BadChunk:
        return errors.BadChunk(f"shard {self._shard}, {what}; nothing was kept, send it again", shard=self._shard)
