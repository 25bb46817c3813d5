"""What travels of an arena and how it is put together again: chunks over a wire, regions in shared memory.

Both ends use both directions: a server sends what a client pulls, a client sends what it pushes. The bytes of a message
are written in `shoal._wire.chunks`.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shoal import errors
from shoal._wire.chunks import Chunk
from shoal._wire.layout import Aggregation, ArenaLayout, ShardLayout
from shoal._wire.limits import CHUNK_BYTES

# An arena of a call: its shard's number, and its own within the shard.
ArenaKey = tuple[int, int]

_REGION_ALIGNMENT = 64  # bytes: a cache line
_MAX_PIECES = 1 << 16  # of an arena that have come with gaps between them
_MAX_TARGETS = 64  # of a chunk that the kernel puts where it belongs; more cost more than a copy
_CHUNK_OVERHEAD = 64  # bytes, at most, of one chunk's framing


@dataclass(frozen=True, slots=True)
class ArenaRange:
    """Elements [start, stop) of an arena, and the flat memory that takes them."""

    start: int
    stop: int
    target: np.ndarray


def arenas_of(
    layouts: Iterable[ShardLayout], aggregations: Collection[Aggregation] | None = None
) -> dict[ArenaKey, ArenaLayout]:
    """The arenas of some shards, in the order in which they travel.

    Args:
        layouts: of the shards.
        aggregations: only arenas of these; None: all.
    """
    return {
        (layout.shard, index): arena
        for layout in layouts
        for index, arena in enumerate(layout.arenas)
        if aggregations is None or arena.aggregation in aggregations
    }


def region_offsets(layouts: Iterable[ShardLayout]) -> tuple[dict[ArenaKey, int], int]:
    """Where the arenas of some shards lie in a region of shared memory, in bytes, and the bytes that they take."""
    offsets, end = {}, 0
    for key, arena in arenas_of(layouts).items():
        offsets[key] = end
        end += -(-arena.nbytes // _REGION_ALIGNMENT) * _REGION_ALIGNMENT
    return offsets, end


def region_arrays(
    region: np.ndarray, layouts: Sequence[ShardLayout], aggregations: Collection[Aggregation] | None = None
) -> dict[ArenaKey, np.ndarray]:
    """The arenas that lie in a region, flat, in the dtype in which they travel.

    Args:
        region: unsigned bytes, as many as `region_offsets` says, or more.
        layouts: of the shards, all those of the call.
        aggregations: only arenas of these; None: all.
    """
    offsets, _ = region_offsets(layouts)
    return {
        key: region[offsets[key] : offsets[key] + arena.nbytes].view(arena.wire)
        for key, arena in arenas_of(layouts, aggregations).items()
    }


def chunks_of(key: ArenaKey, elements: np.ndarray, offset: int = 0) -> Iterator[Chunk]:
    """Elements of an arena as chunks, which are views of them.

    Args:
        key: of the arena.
        elements: flat and contiguous, of the wire's dtype.
        offset: bytes from the arena's start.
    """
    data = elements.view(np.uint8).data
    for start in range(0, len(data), CHUNK_BYTES):
        yield Chunk(*key, offset + start, data[start : start + CHUNK_BYTES])


def messages(stream: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """Groups chunks so that a message carries about `CHUNK_BYTES` at most."""
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
    """Copies elements of the wire to where they belong, widening halves; always True.

    Args:
        target: flat.
        source: flat, as many, at any address.
    """
    if source.dtype == target.dtype:
        np.copyto(target.view(np.uint8), source.view(np.uint8))  # bytes, which need no alignment
    else:
        np.copyto(target, source, casting="unsafe")
    return True


class _Cover:
    """Which bytes of an arena have come."""

    def __init__(self) -> None:
        self.size = 0  # bytes that have come
        # Where what has come begins and ends, in order: [begin, end, begin, end, ...].
        self._edges: list[int] = []

    @property
    def missing(self) -> int:
        """The first byte that has not come."""
        return self._edges[1] if self._edges and not self._edges[0] else 0

    def objection(self, start: int, size: int) -> str:
        """Why a chunk cannot be taken; empty: it can."""
        at, stop = bisect_right(self._edges, start), start + size
        if at % 2 or (at < len(self._edges) and self._edges[at] < stop):
            return f"a chunk of bytes {start} to {stop} overlaps what has come already"
        apart = self._edges[max(0, at - 1) : at] != [start] and self._edges[at : at + 1] != [stop]
        if apart and len(self._edges) >= 2 * _MAX_PIECES:
            return f"chunks leave more than {_MAX_PIECES} gaps: send what lies together in order"
        return ""

    def add(self, start: int, size: int) -> None:
        """A chunk has come."""
        at, stop = bisect_right(self._edges, start), start + size
        first = at - 1 if at and self._edges[at - 1] == start else at
        last = at + 1 if at < len(self._edges) and self._edges[at] == stop else at
        self._edges[first:last] = ([] if first < at else [start]) + ([] if last > at else [stop])
        self.size += size


class Assembler:
    """Puts the chunks of a call together. They may come in any order, but must cover each arena whole, and once.

    Args:
        arenas: that are to come.
        runs: the memory for each, in order and without gaps, in whatever dtype `receive` fills.
        receive: takes elements of the wire to their memory; False if they include NaN or Inf.
        accept: the same for elements that are where they belong.
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
        self._filled = {key: _Cover() for key in arenas}  # bytes of the wire
        # The first element that was not finite, by arena.
        self.non_finite: dict[ArenaKey, int] = {}

    def add(self, chunk: Chunk) -> None:
        """Takes a chunk.

        Raises:
            BadChunk: it names an arena that is not expected, overlaps what came before, overruns the arena, or splits
                an element.
        """
        key, size = (chunk.shard, chunk.arena), len(chunk.data)
        self._check(key, chunk.offset, size)
        elements = np.frombuffer(chunk.data, self._arenas[key].wire)
        taken = 0
        for target, first in self._targets(key, chunk.offset, size):
            if not self._receive(target, elements[taken : taken + target.size]):
                self._note(key, target, first)
            taken += target.size
        self._filled[key].add(chunk.offset, size)

    def memory(self, chunk: Chunk, size: int) -> list[memoryview] | None:
        """Where the bytes of a chunk may be put as they are; `filled` then takes it.

        Args:
            chunk: as it begins; it has no data yet.
            size: bytes that it will have.

        Returns:
            Memory for all of it; None: only `add` can take it, or say what is wrong with it.
        """
        key = chunk.shard, chunk.arena
        try:
            self._check(key, chunk.offset, size)
        except errors.BadChunk:
            return None
        targets = [target for target, _ in self._targets(key, chunk.offset, size)]
        if len(targets) > _MAX_TARGETS or any(target.dtype != self._arenas[key].wire for target in targets):
            return None
        return [target.view(np.uint8).data for target in targets]

    def filled(self, chunk: Chunk, size: int) -> None:
        """Takes the chunk whose bytes are in the `memory` for it."""
        key = chunk.shard, chunk.arena
        for target, first in self._targets(key, chunk.offset, size):
            if not self._accept(target):
                self._note(key, target, first)
        self._filled[key].add(chunk.offset, size)

    def finish(self) -> None:
        """Says that no more will come.

        Raises:
            BadChunk: something is missing.
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
            raise _bad(key, f"is not one of those expected, {sorted(self._arenas)}")
        if offset + size > arena.nbytes:
            raise _bad(key, f"a chunk ends at byte {offset + size} of {arena.nbytes}")
        if not size or size % arena.wire.itemsize:
            raise _bad(key, f"a chunk of {size} bytes is not a number of {arena.wire.itemsize}-byte elements")
        if offset % arena.wire.itemsize:
            raise _bad(key, f"a chunk starts at byte {offset}, within an element of {arena.wire.itemsize} bytes")
        if complaint := self._filled[key].objection(offset, size):
            raise _bad(key, complaint)

    def _targets(self, key: ArenaKey, offset: int, size: int) -> Iterator[tuple[np.ndarray, int]]:
        """The memory of a chunk's elements, and the element of the arena with which each piece begins."""
        itemsize = self._arenas[key].wire.itemsize
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
    return errors.BadChunk(f"shard {shard}, arena {arena}: {what}; nothing was kept, send it again", shard=shard)
