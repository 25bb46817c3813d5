"""Framing of arenas: their division into chunks or shared-memory regions at one end, and assembly at the other.

Both ends do both: a server sends values that a client pulls, and a client sends gradients that it pushes.
`shoal._wire.chunks` encodes the messages.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shoal import errors
from shoal._wire.chunks import Chunk
from shoal._wire.layout import Aggregation, ArenaLayout, ShardLayout
from shoal._wire.limits import CHUNK_BYTES

# An arena of a call: the number of its shard, and its index in the shard.
ArenaKey = tuple[int, int]

_REGION_ALIGNMENT = 64  # bytes: a cache line
_MAX_PIECES = 1 << 16  # separate pieces of an arena, with gaps between them
_MAX_TARGETS = 64  # buffers into which the kernel receives one chunk; more would cost more than a copy
_CHUNK_OVERHEAD = 64  # upper bound of one chunk's framing, in bytes


@dataclass(frozen=True, slots=True)
class ArenaRange:
    """Elements [start, stop) of an arena, and the flat memory that receives them."""

    start: int
    stop: int
    target: np.ndarray


def arenas_of(
    layouts: Iterable[ShardLayout], aggregations: Collection[Aggregation] | None = None
) -> dict[ArenaKey, ArenaLayout]:
    """Returns the arenas of some shards, in the order in which they are sent.

    Args:
        layouts: layouts of the shards.
        aggregations: selects arenas by aggregation; None means all arenas.
    """
    return {
        (layout.shard, index): arena
        for layout in layouts
        for index, arena in enumerate(layout.arenas)
        if aggregations is None or arena.aggregation in aggregations
    }


def region_offsets(layouts: Iterable[ShardLayout]) -> tuple[dict[ArenaKey, int], int]:
    """Computes where the arenas of some shards lie in a region of shared memory.

    Args:
        layouts: layouts of the shards.

    Returns:
        The offset of each arena in bytes, and the bytes that all of them occupy.
    """
    offsets, end = {}, 0
    for key, arena in arenas_of(layouts).items():
        offsets[key] = end
        end += -(-arena.nbytes // _REGION_ALIGNMENT) * _REGION_ALIGNMENT
    return offsets, end


def region_arrays(
    region: np.ndarray, layouts: Sequence[ShardLayout], aggregations: Collection[Aggregation] | None = None
) -> dict[ArenaKey, np.ndarray]:
    """Returns the arenas in a region as flat arrays of their wire dtype.

    Args:
        region: unsigned bytes, at least as many as `region_offsets` returns.
        layouts: layouts of all shards of the call.
        aggregations: selects arenas by aggregation; None means all arenas.

    Returns:
        The arrays by arena, as views of the region.
    """
    offsets, _ = region_offsets(layouts)
    return {
        key: region[offsets[key] : offsets[key] + arena.nbytes].view(arena.wire_dtype)
        for key, arena in arenas_of(layouts, aggregations).items()
    }


def chunks_of(key: ArenaKey, elements: np.ndarray, offset: int = 0) -> Iterator[Chunk]:
    """Splits elements of an arena into chunks, which are views of them.

    Args:
        key: the arena.
        elements: flat and contiguous, of the wire dtype.
        offset: position of the elements, in bytes from the arena's start.

    Returns:
        Chunks of at most `CHUNK_BYTES`, in order.
    """
    data = elements.view(np.uint8).data
    for start in range(0, len(data), CHUNK_BYTES):
        yield Chunk(*key, offset + start, data[start : start + CHUNK_BYTES])


def messages(stream: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """Groups chunks so that a message carries at most about `CHUNK_BYTES`."""
    group: list[Chunk] = []
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


def copy_elements(target: np.ndarray, source: np.ndarray) -> bool:
    """Copies received elements to their destination, and converts half precision to float32.

    Args:
        target: flat.
        source: flat, of the same length, at any address.

    Returns:
        Always True: this function does not look for NaN or Inf.
    """
    if source.dtype == target.dtype:
        np.copyto(target.view(np.uint8), source.view(np.uint8))  # as bytes, which need no alignment
    else:
        np.copyto(target, source, casting="unsafe")
    return True


class _Cover:
    """Record of the bytes of an arena that have arrived."""

    def __init__(self) -> None:
        self.size = 0  # bytes that have arrived
        # Bounds of the pieces that have arrived, in order: [begin, end, begin, end, ...].
        self._edges: list[int] = []

    @property
    def missing(self) -> int:
        """The first byte that has not arrived."""
        return self._edges[1] if self._edges and not self._edges[0] else 0

    def objection(self, start: int, size: int) -> str:
        """Returns why a chunk must be refused; empty if it is acceptable."""
        at, stop = bisect_right(self._edges, start), start + size
        if at % 2 or (at < len(self._edges) and self._edges[at] < stop):
            return f"a chunk of bytes {start} to {stop} overlaps bytes that have already arrived"
        apart = self._edges[max(0, at - 1) : at] != [start] and self._edges[at : at + 1] != [stop]
        if apart and len(self._edges) >= 2 * _MAX_PIECES:
            return f"chunks leave more than {_MAX_PIECES} gaps: send neighbouring chunks in order"
        return ""

    def add(self, start: int, size: int) -> None:
        """Records that a chunk has arrived."""
        at, stop = bisect_right(self._edges, start), start + size
        first = at - 1 if at and self._edges[at - 1] == start else at
        last = at + 1 if at < len(self._edges) and self._edges[at] == stop else at
        self._edges[first:last] = ([] if first < at else [start]) + ([] if last > at else [stop])
        self.size += size


class Assembler:
    """Assembles the chunks of a call. They may arrive in any order, and must cover each arena exactly once.

    Args:
        arenas: the expected arenas.
        runs: the memory of each arena, in order and without gaps, in any dtype that `receive` can fill.
        receive: writes received elements to their memory; returns False if they include NaN or Inf.
        accept: checks elements that are already in their memory; returns False if they include NaN or Inf.

    Attributes:
        non_finite: for each arena with NaN or Inf, the first such element that was found.
    """

    def __init__(
        self,
        arenas: Mapping[ArenaKey, ArenaLayout],
        runs: Mapping[ArenaKey, Sequence[ArenaRange]],
        receive: Callable[[np.ndarray, np.ndarray], bool] = copy_elements,
        accept: Callable[[np.ndarray], bool] = lambda _: True,
    ) -> None:
        self._arenas, self._runs, self._receive, self._accept = arenas, runs, receive, accept
        self._stops = {key: [run.stop for run in runs[key]] for key in arenas}
        self._filled = {key: _Cover() for key in arenas}  # in bytes on the wire
        self.non_finite: dict[ArenaKey, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas on the wire."""
        return sum(arena.nbytes for arena in self._arenas.values())

    def add(self, chunk: Chunk) -> None:
        """Adds a chunk.

        Raises:
            BadChunk: the chunk names an unexpected arena, overlaps an earlier chunk, exceeds its arena, or splits an
                element.
        """
        key, size = (chunk.shard, chunk.arena), len(chunk.data)
        self._check(key, chunk.offset, size)
        elements = np.frombuffer(chunk.data, self._arenas[key].wire_dtype)
        taken = 0
        for target, first in self._targets(key, chunk.offset, size):
            if not self._receive(target, elements[taken : taken + target.size]):
                self._note(key, target, first)
            taken += target.size
        self._filled[key].add(chunk.offset, size)

    def memory(self, chunk: Chunk, size: int) -> list[memoryview] | None:
        """Returns memory into which the bytes of a chunk can be received directly; call `filled` afterwards.

        Args:
            chunk: the chunk, without data.
            size: bytes of its data.

        Returns:
            Memory for all of the data. None if the chunk must go through `add`, which also reports what is wrong with
            it.
        """
        key = chunk.shard, chunk.arena
        try:
            self._check(key, chunk.offset, size)
        except errors.BadChunk:
            return None
        targets = [target for target, _ in self._targets(key, chunk.offset, size)]
        if len(targets) > _MAX_TARGETS or any(target.dtype != self._arenas[key].wire_dtype for target in targets):
            return None
        return [target.view(np.uint8).data for target in targets]

    def filled(self, chunk: Chunk, size: int) -> None:
        """Adds a chunk whose bytes are already in the buffers that `memory` returned."""
        key = chunk.shard, chunk.arena
        for target, first in self._targets(key, chunk.offset, size):
            if not self._accept(target):
                self._note(key, target, first)
        self._filled[key].add(chunk.offset, size)

    def finish(self) -> None:
        """Ends the call.

        Raises:
            BadChunk: bytes are missing.
        """
        for key, arena in self._arenas.items():
            filled = self._filled[key]
            if filled.size != arena.nbytes:
                raise _bad(
                    key,
                    f"the stream ended after {filled.size} of {arena.nbytes} bytes; byte {filled.missing} is missing",
                )

    def _check(self, key: ArenaKey, offset: int, size: int) -> None:
        arena = self._arenas.get(key)
        if arena is None:
            raise _bad(key, f"not one of the expected arenas, {sorted(self._arenas)}")
        if offset + size > arena.nbytes:
            raise _bad(key, f"a chunk ends at byte {offset + size} of {arena.nbytes}")
        itemsize = arena.wire_dtype.itemsize
        if not size or size % itemsize:
            raise _bad(key, f"a chunk of {size} bytes is not a whole number of {itemsize}-byte elements")
        if offset % itemsize:
            raise _bad(key, f"a chunk starts at byte {offset}, within an element of {itemsize} bytes")
        if complaint := self._filled[key].objection(offset, size):
            raise _bad(key, complaint)

    def _targets(self, key: ArenaKey, offset: int, size: int) -> Iterator[tuple[np.ndarray, int]]:
        """Yields the memory of a chunk's elements in pieces, each with the index of its first element in the arena."""
        itemsize = self._arenas[key].wire_dtype.itemsize
        start, stop = offset // itemsize, (offset + size) // itemsize
        runs = self._runs[key]
        for index in range(bisect_right(self._stops[key], start), len(runs)):
            run = runs[index]
            if run.start >= stop:
                return
            first = max(start, run.start)
            yield run.target[first - run.start : min(stop, run.stop) - run.start], first

    def _note(self, key: ArenaKey, target: np.ndarray, first: int) -> None:
        self.non_finite.setdefault(key, first + int(np.flatnonzero(~np.isfinite(target))[0]))


def _bad(key: ArenaKey, what: str) -> errors.BadChunk:
    shard, arena = key
    return errors.BadChunk(f"shard {shard}, arena {arena}: {what}; the call was discarded; send it again", shard=shard)
