"""Collectives through shared memory, for ranks on one host.

Each rank has a segment with a few blocks of memory, and all ranks map all segments. An array goes through them block by
block. In an all-reduce, each rank copies its block in, adds its own part of the blocks of all ranks, and copies the
parts of all ranks out. The blocks stay in the processor's cache, so an array of any size is read and written in memory
once. Counters in the segments say how far each rank is.
"""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal._transport import Segment
from shoal_distribute.collectives.calls import ReduceOp
from shoal_distribute.collectives.futex import Futex
from shoal_distribute.collectives.members import Members
from shoal_distribute.collectives.schedule import LINE_BYTES, Part, pieces, slices

BLOCK_BYTES = 1 << 20
# So many blocks are in the segments at a time: one is copied in, one is added, one is copied out, one is free.
_BLOCKS = 4
_PAGE_BYTES = 4096
_COUNTERS_BYTES = _PAGE_BYTES
# Blocks begin in the middle of a memory page, and large arrays 16 bytes after the beginning of one. AMD's Zen 3 copies
# four times slower (`rep movsb`) if the destination is a few bytes further in its page than the source.
_BLOCKS_AT = _COUNTERS_BYTES + 2048
SEGMENT_BYTES = _BLOCKS_AT + _BLOCKS * BLOCK_BYTES
_FILLED, _REDUCED, _EMPTIED = range(3)
# A rank that waits yields its core so many times, and then sleeps until the counter changes.
_YIELDS = 20
# Seconds between two looks at whether a rank has failed.
_CHECK_S = 0.01


class SharedBlocks:
    """The `Way` of ranks on one host. Sums are added in the order of the ranks.

    Args:
        members: two or more ranks. The mesh tells, while this rank waits, whether another one has failed.
        segments: the segment of each member, of SEGMENT_BYTES.
    """

    def __init__(self, members: Members, segments: Sequence[Segment]) -> None:
        self._mesh, self._ranks, self._place = members.mesh, members.ranks, members.place
        self._segments = segments
        # A rank changes only its own counters, each after it has written a block. Each counter has a line of its own.
        self._counters = [
            [Futex(np.frombuffer(it.view(LINE_BYTES * counter, 8), np.uint64)) for counter in range(3)]
            for it in segments
        ]
        self._own = self._counters[self._place]
        self._blocks = [
            [
                np.frombuffer(it.view(_BLOCKS_AT + number * BLOCK_BYTES, BLOCK_BYTES), np.uint8)
                for number in range(_BLOCKS)
            ]
            for it in segments
        ]
        self._scratch = np.empty(BLOCK_BYTES, np.uint8)
        self._done = 0  # blocks of all calls so far

    def all_reduce(self, flat: np.ndarray[Any, Any], op: ReduceOp) -> None:
        """Replaces an array by the sum or the mean of all ranks' arrays: see `Way`."""
        parts = _blocks_of(flat)
        first, count = self._done, len(parts)
        for number in range(count + 2):
            if number < count:
                self._fill(first + number, parts[number])
            if 0 <= number - 1 < count:
                self._reduce(first + number - 1, parts[number - 1], op, counted=number == 1)
            if 0 <= number - 2 < count:
                self._empty(first + number - 2, parts[number - 2])
        self._done += count

    def reduce_scatter(self, flat: np.ndarray[Any, Any], parts: Sequence[Part], op: ReduceOp) -> None:
        """Reduces one part for each rank. A block has pieces of all parts.

        Args:
            flat, parts, op: see `Way`.
        """
        owners = [place for place, part in enumerate(parts) if part]
        room = BLOCK_BYTES // max(1, len(owners)) // _PAGE_BYTES * _PAGE_BYTES
        starts = {place: number * room for number, place in enumerate(owners)}
        blocks, first = _by_block(flat, parts, room), self._done
        for number in range(len(blocks) + 1):
            if number < len(blocks):
                self._scatter(first + number, blocks[number], starts)
            if number:
                mine = blocks[number - 1].get(self._place)
                if mine is not None:
                    self._wait(_FILLED, first + number, counted=number == 1)
                    block = (first + number - 1, mine, starts[self._place])
                    self._add([mine if at == self._place else self._block(at, *block) for at in self._places], mine)
                    op.finish(mine, self._mesh.ranks)
                self._own[_EMPTIED].set(first + number)
        self._done += len(blocks)

    def all_gather(self, flat: np.ndarray[Any, Any], parts: Sequence[Part]) -> None:
        """Gets the parts of the other ranks: see `Way`. A block has a piece of one part."""
        blocks, first = _by_block(flat, parts, BLOCK_BYTES), self._done
        for number in range(len(blocks) + 1):
            if number < len(blocks) and self._place in blocks[number]:
                self._fill(first + number, blocks[number][self._place])
            if number:
                for place, piece in blocks[number - 1].items():
                    if place != self._place:
                        self._wait(_FILLED, first + number, [place], counted=number == 1)
                        np.copyto(piece, self._block(place, first + number - 1, piece))
                self._own[_EMPTIED].set(first + number)
        self._done += len(blocks)

    def broadcast(self, flat: np.ndarray[Any, Any], root: int) -> None:
        """Replaces an array by that of one rank: see `Way`."""
        self.all_gather(flat, [[slice(0, flat.size)] if rank == root else [] for rank in self._ranks])

    def barrier(self) -> None:
        """Waits until all ranks have called it."""
        self._done += 1  # a block without content
        self._own[_FILLED].set(self._done)
        self._wait(_FILLED, self._done, counted=True)
        self._own[_EMPTIED].set(self._done)

    def close(self) -> None:
        """Releases the memory of all segments."""
        self._counters, self._blocks, self._own = [], [], []
        for segment in self._segments:
            segment.close()

    @property
    def _places(self) -> range:
        return range(len(self._ranks))

    def _fill(self, number: int, part: np.ndarray[Any, Any]) -> None:
        self._wait(_EMPTIED, number - _BLOCKS + 1)
        np.copyto(self._block(self._place, number, part), part)
        self._own[_FILLED].set(number + 1)

    def _scatter(self, number: int, pieces: Mapping[int, np.ndarray[Any, Any]], starts: Mapping[int, int]) -> None:
        """Copies the pieces that other ranks add into a block."""
        self._wait(_EMPTIED, number - _BLOCKS + 1)
        for place, piece in pieces.items():
            if place != self._place:
                np.copyto(self._block(self._place, number, piece, starts[place]), piece)
        self._own[_FILLED].set(number + 1)

    def _reduce(self, number: int, part: np.ndarray[Any, Any], op: ReduceOp, *, counted: bool) -> None:
        self._wait(_FILLED, number + 1, counted=counted)
        mine = self._slices(part)[self._place]
        if mine.stop > mine.start:
            blocks = [self._block(place, number, part)[mine] for place in self._places]
            self._add(blocks, blocks[self._place])
            op.finish(blocks[self._place], self._mesh.ranks)
        self._own[_REDUCED].set(number + 1)

    def _add(self, addends: Sequence[np.ndarray[Any, Any]], out: np.ndarray[Any, Any]) -> None:
        """Adds two or more arrays in their order.

        Args:
            addends: the arrays.
            out: memory of the sum, which may be one of them: only the last addition writes to it.
        """
        total = addends[0]
        for each in addends[1:-1]:
            total = np.add(total, each, out=self._scratch[: out.nbytes].view(out.dtype))
        np.add(total, addends[-1], out=out)

    def _empty(self, number: int, part: np.ndarray[Any, Any]) -> None:
        self._wait(_REDUCED, number + 1)
        for place, theirs in enumerate(self._slices(part)):
            np.copyto(part[theirs], self._block(place, number, part)[theirs])
        self._own[_EMPTIED].set(number + 1)

    def _slices(self, part: np.ndarray[Any, Any]) -> list[slice]:
        return slices(part.size, len(self._ranks), max(1, LINE_BYTES // part.itemsize))

    def _block(self, place: int, number: int, part: np.ndarray[Any, Any], start: int = 0) -> np.ndarray[Any, Any]:
        """Returns the memory for a part of an array in a block of one rank."""
        return self._blocks[place][number % _BLOCKS][start : start + part.nbytes].view(part.dtype)

    def _wait(self, counter: int, target: int, places: Sequence[int] = (), *, counted: bool = False) -> None:
        """Waits until a counter of all ranks, or of some, has reached a number.

        Args:
            counter: number of the counter.
            target: what it has to reach.
            places: the places of the ranks; by default all.
            counted: whether the time counts as `times.wait`.
        """
        began = time.perf_counter()
        for place in places or self._places:
            reached, rank = self._counters[place][counter], self._ranks[place]
            yields = 0
            while (value := reached.value) < target:
                yields += 1
                if yields < _YIELDS:
                    os.sched_yield()
                    continue
                reached.wait(value, _CHECK_S)
                self._mesh.check()
                # In this order: a rank that has left may have finished before.
                if self._mesh.has_left(rank) and reached.value < target:
                    raise self._mesh.lost(rank, "has left")
        if counted:
            self._mesh.times.own.wait += time.perf_counter() - began


def _blocks_of(flat: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Returns the pieces of an array that go through one block each."""
    return [flat[it] for it in pieces([slice(0, flat.size)], BLOCK_BYTES // flat.itemsize)]


def _by_block(flat: np.ndarray[Any, Any], parts: Sequence[Part], room: int) -> list[dict[int, np.ndarray[Any, Any]]]:
    """Returns the pieces of all parts that go through one block each, by place.

    Args:
        flat: the array, of one dimension.
        parts: the part of each place.
        room: the most bytes of a piece.
    """
    cut = [[flat[it] for it in pieces(part, room // flat.itemsize)] for part in parts]
    return [
        {place: its[number] for place, its in enumerate(cut) if number < len(its)}
        for number in range(max(map(len, cut)))
    ]


__all__ = ["SEGMENT_BYTES", "SharedBlocks"]
