"""Framing of slabs: their division into chunks at one end, and assembly at the other.

Both ends do both: a server sends values that a client pulls, and a client sends gradients that it pushes.
`shoal._wire.chunks` encodes the messages.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shoal import errors
from shoal._wire.chunks import Chunk
from shoal._wire.limits import CHUNK_BYTES
from shoal._wire.slabs import ArenaKey, CallLayout, Slab

MAX_PIECES = 1 << 16  # separate pieces of a slab, with gaps between them
_MAX_TARGETS = 64  # buffers into which the kernel receives one chunk; more would cost more than a copy
_CHUNK_OVERHEAD = 64  # upper bound of one chunk's framing, in bytes


@dataclass(frozen=True, slots=True)
class SlabRange:
    """Elements [start, stop) of a slab, and the flat memory that receives them."""

    start: int
    stop: int
    target: np.ndarray


def chunks_of(slab: Slab, elements: np.ndarray, offset: int = 0) -> Iterator[Chunk]:
    """Splits elements of a slab into chunks, which are views of them.

    Args:
        slab: the slab.
        elements: flat and contiguous, of the wire dtype.
        offset: position of the elements, in bytes from the slab's start.

    Returns:
        Chunks of at most `CHUNK_BYTES`, in order. They name the slab's first arena.
    """
    data = elements.view(np.uint8).data
    for start in range(0, len(data), CHUNK_BYTES):
        yield Chunk(*slab.keys[0], offset + start, data[start : start + CHUNK_BYTES])


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
    """Record of the bytes of a slab that have arrived."""

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
        if apart and len(self._edges) >= 2 * MAX_PIECES:
            return f"chunks leave more than {MAX_PIECES} gaps: send neighbouring chunks in order"
        return ""

    def add(self, start: int, size: int) -> None:
        """Records that a chunk has arrived."""
        at, stop = bisect_right(self._edges, start), start + size
        first = at - 1 if at and self._edges[at - 1] == start else at
        last = at + 1 if at < len(self._edges) and self._edges[at] == stop else at
        self._edges[first:last] = ([] if first < at else [start]) + ([] if last > at else [stop])
        self.size += size


class Assembler:
    """Assembles the chunks of a call. They may arrive in any order, and must cover each slab exactly once.

    Args:
        layout: layout of the call.
        runs: the memory of each expected slab, in order and without gaps, in any dtype that `receive` can fill.
        receive: writes received elements to their memory; returns False if they include NaN or Inf.
        accept: checks elements that are already in their memory; returns False if they include NaN or Inf.

    Attributes:
        non_finite: for each slab with NaN or Inf, the first such element that was found.
    """

    def __init__(
        self,
        layout: CallLayout,
        runs: Mapping[Slab, Sequence[SlabRange]],
        receive: Callable[[np.ndarray, np.ndarray], bool] = copy_elements,
        accept: Callable[[np.ndarray], bool] = lambda _: True,
    ) -> None:
        self._layout, self._runs, self._receive, self._accept = layout, runs, receive, accept
        self._stops = {slab: [run.stop for run in parts] for slab, parts in runs.items()}
        self._filled = {slab: _Cover() for slab in runs}  # in bytes on the wire
        self.non_finite: dict[Slab, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs on the wire."""
        return sum(slab.nbytes for slab in self._runs)

    def add(self, chunk: Chunk) -> None:
        """Adds a chunk.

        Raises:
            BadChunk: the chunk names an unexpected arena, overlaps an earlier chunk, exceeds its slab, or splits an
                element.
        """
        size = len(chunk.data)
        slab, offset = self._place(chunk, size)
        elements = np.frombuffer(chunk.data, slab.wire_dtype)
        taken = 0
        for target, first in self._targets(slab, offset, size):
            if not self._receive(target, elements[taken : taken + target.size]):
                self._note(slab, target, first)
            taken += target.size
        self._filled[slab].add(offset, size)

    def memory(self, chunk: Chunk, size: int) -> list[memoryview] | None:
        """Returns memory into which the bytes of a chunk can be received directly; call `filled` afterwards.

        Args:
            chunk: the chunk, without data.
            size: bytes of its data.

        Returns:
            Memory for all of the data. None if the chunk must go through `add`, which also reports what is wrong with
            it.
        """
        try:
            slab, offset = self._place(chunk, size)
        except errors.BadChunk:
            return None
        targets = [target for target, _ in self._targets(slab, offset, size)]
        if len(targets) > _MAX_TARGETS or any(target.dtype != slab.wire_dtype for target in targets):
            return None
        return [target.view(np.uint8).data for target in targets]

    def filled(self, chunk: Chunk, size: int) -> None:
        """Adds a chunk whose bytes are already in the buffers that `memory` returned."""
        slab, start = self._layout.places[chunk.shard, chunk.arena]
        for target, first in self._targets(slab, start + chunk.offset, size):
            if not self._accept(target):
                self._note(slab, target, first)
        self._filled[slab].add(start + chunk.offset, size)

    def finish(self) -> None:
        """Ends the call.

        Raises:
            BadChunk: bytes are missing.
        """
        for slab, filled in self._filled.items():
            if filled.size != slab.nbytes:
                raise _bad(
                    slab.keys[0],
                    f"the stream ended after {filled.size} of {slab.nbytes} bytes; byte {filled.missing} is missing",
                )

    def _place(self, chunk: Chunk, size: int) -> tuple[Slab, int]:
        """Returns the slab that a chunk belongs to, and the byte of the slab at which it starts."""
        key = chunk.shard, chunk.arena
        slab, start = self._layout.places.get(key, (None, 0))
        if slab is None or slab not in self._runs:
            raise _bad(
                key, f"not one of the expected arenas, {sorted(key for slab in self._runs for key in slab.keys)}"
            )
        offset = start + chunk.offset
        if offset + size > slab.nbytes:
            raise _bad(key, f"a chunk ends at byte {chunk.offset + size} of {slab.nbytes - start}")
        itemsize = slab.wire_dtype.itemsize
        if not size or size % itemsize:
            raise _bad(key, f"a chunk of {size} bytes is not a whole number of {itemsize}-byte elements")
        if offset % itemsize:
            raise _bad(key, f"a chunk starts at byte {chunk.offset}, within an element of {itemsize} bytes")
        if complaint := self._filled[slab].objection(offset, size):
            raise _bad(key, complaint)
        return slab, offset

    def _targets(self, slab: Slab, offset: int, size: int) -> Iterator[tuple[np.ndarray, int]]:
        """Yields the memory of a chunk's elements in pieces, each with the index of its first element in the slab."""
        itemsize = slab.wire_dtype.itemsize
        start, stop = offset // itemsize, (offset + size) // itemsize
        runs = self._runs[slab]
        for index in range(bisect_right(self._stops[slab], start), len(runs)):
            run = runs[index]
            if run.start >= stop:
                return
            first = max(start, run.start)
            yield run.target[first - run.start : min(stop, run.stop) - run.start], first

    def _note(self, slab: Slab, target: np.ndarray, first: int) -> None:
        self.non_finite.setdefault(slab, first + int(np.flatnonzero(~np.isfinite(target))[0]))


def _bad(key: ArenaKey, what: str) -> errors.BadChunk:
    shard, arena = key
    return errors.BadChunk(f"shard {shard}, arena {arena}: {what}; the call was discarded; send it again", shard=shard)
