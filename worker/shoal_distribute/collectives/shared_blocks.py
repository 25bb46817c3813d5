"""Collectives through shared memory, for ranks on one host.

Each rank has a segment with a few blocks of memory, and all ranks map all segments. An array goes through them block by
block: each rank copies its block in, adds its own part of the blocks of all ranks, and copies the parts of all ranks
out. The blocks stay in the processor's cache, so an array of any size is read and written in memory once. Counters in
the segments say how far each rank is.
"""

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal._transport import Segment
from shoal_distribute.collectives.calls import ReduceOp
from shoal_distribute.collectives.futex import Futex
from shoal_distribute.collectives.mesh import Mesh
from shoal_distribute.collectives.schedule import slices

BLOCK_BYTES = 1 << 20
# So many blocks are in the segments at a time: one is copied in, one is added, one is copied out, one is free.
_BLOCKS = 4
# Parts begin at multiples of a cache line, so that no two ranks write to one line.
LINE_BYTES = 64
_COUNTERS_BYTES = 4096
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
    """The mapped segments of all ranks.

    Args:
        mesh: tells, while this rank waits, whether another one has failed.
        segments: the segment of each rank, of SEGMENT_BYTES.
    """

    def __init__(self, mesh: Mesh, segments: Sequence[Segment]) -> None:
        self.rank, self.ranks = mesh.rank, mesh.ranks
        self._segments, self._mesh = segments, mesh
        # A rank changes only its own counters, each after it has written a block. Each counter has a line of its own.
        self._counters = [
            [Futex(np.frombuffer(it.view(LINE_BYTES * counter, 8), np.uint64)) for counter in range(3)]
            for it in segments
        ]
        self._own = self._counters[self.rank]
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
        """Replaces an array by the sum or the mean of all ranks' arrays.

        Args:
            flat: the array, of one dimension.
            op: how the arrays are joined.
        """
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

    def broadcast(self, flat: np.ndarray[Any, Any], root: int) -> None:
        """Replaces an array by that of one rank.

        Args:
            flat: the array, of one dimension.
            root: the rank whose array all get.
        """
        for place, part in enumerate(_blocks_of(flat)):
            number = self._done
            if self.rank == root:
                self._fill(number, part)
            else:
                self._wait(_FILLED, number + 1, [root], counted=place == 0)
                np.copyto(part, self._block(root, number, part))
            for counter in self._own:
                counter.set(number + 1)
            self._done += 1

    def close(self) -> None:
        """Releases the memory of all segments."""
        self._counters, self._blocks = [], []
        del self._own
        for segment in self._segments:
            segment.close()

    def _fill(self, number: int, part: np.ndarray[Any, Any]) -> None:
        self._wait(_EMPTIED, number - _BLOCKS + 1)
        np.copyto(self._block(self.rank, number, part), part)
        self._own[_FILLED].set(number + 1)

    def _reduce(self, number: int, part: np.ndarray[Any, Any], op: ReduceOp, *, counted: bool) -> None:
        self._wait(_FILLED, number + 1, counted=counted)
        mine = self._slices(part)[self.rank]
        if mine.stop > mine.start:
            own = self._block(self.rank, number, part)[mine]
            total = self._block(0, number, part)[mine]
            for rank in range(1, self.ranks):
                # The last sum goes to the own block, whose contribution has been added by then.
                out = own if rank + 1 == self.ranks else self._scratch[: own.nbytes].view(part.dtype)
                total = np.add(total, self._block(rank, number, part)[mine], out=out)
            op.finish(own, self.ranks)
        self._own[_REDUCED].set(number + 1)

    def _empty(self, number: int, part: np.ndarray[Any, Any]) -> None:
        self._wait(_REDUCED, number + 1)
        for rank, theirs in enumerate(self._slices(part)):
            np.copyto(part[theirs], self._block(rank, number, part)[theirs])
        self._own[_EMPTIED].set(number + 1)

    def _slices(self, part: np.ndarray[Any, Any]) -> list[slice]:
        return slices(part.size, self.ranks, max(1, LINE_BYTES // part.itemsize))

    def _block(self, rank: int, number: int, part: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return self._blocks[rank][number % _BLOCKS][: part.nbytes].view(part.dtype)

    def _wait(self, counter: int, target: int, ranks: Sequence[int] = (), *, counted: bool = False) -> None:
        """Waits until a counter of all ranks, or of some, has reached a number.

        Args:
            counter: number of the counter.
            target: what it has to reach.
            ranks: the ranks; by default all.
            counted: whether the time counts as `times.wait`.
        """
        began = time.perf_counter()
        for rank in ranks or range(self.ranks):
            reached = self._counters[rank][counter]
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
    """Returns the parts of an array that go through one block each."""
    step = BLOCK_BYTES // flat.itemsize
    return [flat[start : start + step] for start in range(0, flat.size, step)]


__all__ = ["LINE_BYTES", "SEGMENT_BYTES", "SharedBlocks"]
