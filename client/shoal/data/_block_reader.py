"""Data sets that are read block by block: which blocks are in memory, and how batches are made of them."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal import errors
from shoal.data._reading.prefetcher import Prefetcher
from shoal.program import DEFAULT_PREFETCH, Blocks

# Of one block or chapter: arrays of equal length, always as many and in the same order.
Columns = Sequence[np.ndarray]


@dataclass(slots=True)
class _Stream:
    """A run that is being read."""

    following: int  # the block that comes next
    stop: int  # the run's end, in blocks
    columns: Iterator[Columns]


class BlockReader(ABC):
    """The part that all data sets in blocks share; yours, too, if you write `read_blocks` and `join`.

    Batches are made in chapters: so many batches as the blocks in memory have the samples of. The samples of a
    chapter are gathered at once, one call a column, and its batches are slices. While one chapter is trained on, a
    thread reads and gathers the next; so about three windows of blocks are in memory: what is trained on, what comes
    next, and the blocks that the latter was gathered from.

    Args:
        blocks: of the data set.
        prefetch: batches to read ahead; 0: everything is read in turn, by the thread that asks.

    Raises:
        InvalidData: prefetch is no whole number, 0 or more.
    """

    def __init__(self, blocks: Blocks, *, prefetch: int = DEFAULT_PREFETCH) -> None:
        check_number("prefetch", prefetch, least=0)
        self.blocks, self.prefetch = blocks, prefetch
        self._most = max(1, blocks.window)
        self._held: OrderedDict[int, Columns] = OrderedDict()  # at most _most blocks, the one used last at the end
        self._stream: _Stream | None = None

    @abstractmethod
    def read_blocks(self, first: int, stop: int) -> Iterator[Columns]:
        """Reads the blocks first, first + 1, ..., stop - 1 of one run, one after the other; perhaps not all are taken.

        Returns:
            Arrays whose first dimension is the block's samples, in their order.
        """

    @abstractmethod
    def join(self, columns: Columns) -> Any:
        """What a program gets as its batch, of arrays like those of `read_blocks`."""

    def __len__(self) -> int:
        return self.blocks.samples

    def batch(self, indices: np.ndarray) -> Any:
        """The samples with these numbers, whichever they are; reads the whole of each block that they are in."""
        numbers = np.asarray(indices, np.int64)
        if not len(numbers):
            raise errors.InvalidData("a batch of no samples was asked for; give one number at least")
        if numbers.min() < 0 or numbers.max() >= len(self):
            raise IndexError(f"samples {numbers.min()} to {numbers.max()} were asked for, of {len(self)}")
        return self.join(self._gather([numbers], self._blocks_of(numbers)))

    def batches(self, plan: Iterable[np.ndarray]) -> Iterator[Any]:
        chapters = self._chapters(plan)
        if not self.prefetch:
            yield from self._cut(chapters)
            return
        with Prefetcher(chapters, 1) as ahead:
            yield from self._cut(ahead)

    def _cut(self, chapters: Iterable[tuple[Columns, list[int]]]) -> Iterator[Any]:
        for columns, lengths in chapters:
            start = 0
            for length in lengths:
                yield self.join([column[start : start + length] for column in columns])
                start += length

    def _chapters(self, plan: Iterable[np.ndarray]) -> Iterator[tuple[Columns, list[int]]]:
        """The columns of each chapter, and the lengths of its batches."""
        chapter: list[np.ndarray] = []
        blocks: dict[int, None] = {}  # that the chapter needs, as they are first used
        shuffled = self.blocks.window > 0  # if not, a block that is alone in its chapter need not be copied
        for numbers in plan:
            if not self._are_in(numbers, blocks) or (not shuffled and len(blocks) > 1):
                needed = dict.fromkeys(self._blocks_of(numbers))
                if chapter and not (shuffled and len(blocks | needed) <= self._most):
                    yield self._gather(chapter, blocks), [len(batch) for batch in chapter]
                    chapter, blocks = [], {}
                blocks |= needed
            chapter.append(numbers)
        if chapter:
            yield self._gather(chapter, blocks), [len(batch) for batch in chapter]

    def _are_in(self, numbers: np.ndarray, blocks: Collection[int]) -> bool:
        """Whether all of these samples are in these few blocks."""
        if len(blocks) == 1:
            start, stop = self._bounds(*blocks)
            return bool(numbers.min() >= start and numbers.max() < stop)
        return sum(int(np.count_nonzero(self._is_in(numbers, block))) for block in blocks) == len(numbers)

    def _is_in(self, numbers: np.ndarray, block: int) -> np.ndarray:
        start, stop = self._bounds(block)
        found: np.ndarray = (numbers >= start) & (numbers < stop)
        return found

    def _blocks_of(self, numbers: np.ndarray) -> list[int]:
        """The blocks of these samples, as they are first used."""
        homes, firsts = np.unique(np.searchsorted(self.blocks.starts, numbers, side="right") - 1, return_index=True)
        return [int(home) for home in homes[np.argsort(firsts)]]

    def _bounds(self, block: int) -> tuple[int, int]:
        return int(self.blocks.starts[block]), int(self.blocks.starts[block + 1])

    def _gather(self, chapter: Sequence[np.ndarray], blocks: Collection[int]) -> Columns:
        """The samples of some batches, in their order; they are in these blocks."""
        numbers = chapter[0] if len(chapter) == 1 else np.concatenate(chapter)
        if not self.blocks.window and len(blocks) == 1 and _consecutive(numbers):
            (block,) = blocks
            begin = int(numbers[0]) - self._bounds(block)[0]
            return [column[begin : begin + len(numbers)] for column in self._block(block)]
        gathered: list[np.ndarray] = []
        for block in self._in_reading_order(blocks):
            columns = self._block(block)
            gathered = gathered or [np.empty((len(numbers), *column.shape[1:]), column.dtype) for column in columns]
            places = np.flatnonzero(self._is_in(numbers, block)) if len(blocks) > 1 else np.arange(len(numbers))
            rows = numbers[places] - self._bounds(block)[0]
            for target, column in zip(gathered, columns, strict=True):
                _put(target, places, column, rows)
        return gathered

    def _in_reading_order(self, blocks: Collection[int]) -> list[int]:
        """Those in memory as they are used; then what the run in hand goes on with; then the others, as they lie."""
        stream = self._stream
        held = [block for block in blocks if block in self._held]
        going_on = {block for block in blocks if stream and stream.following <= block < stream.stop}
        return held + sorted(set(blocks) - set(held), key=lambda block: (block not in going_on, block))

    def _block(self, block: int) -> Columns:
        columns = self._held.pop(block, None)
        if columns is None:
            columns = self._load(block)
        self._make_room()
        self._held[block] = columns
        return columns

    def _make_room(self) -> None:
        while len(self._held) >= self._most:
            self._held.popitem(last=False)

    def _load(self, block: int) -> Columns:
        """Reads a block. Those that are passed on the way are kept as long as there is room: they are in its window."""
        stream, self._stream = self._stream, None  # which stays so if reading fails
        if stream is None or not stream.following <= block < stream.stop:
            stream = self._begin(block)
        while True:
            self._make_room()
            columns = self._check(stream.following, next(stream.columns, None))
            stream.following += 1
            if stream.following > block:
                break
            self._held[stream.following - 1] = columns
        if stream.following < stream.stop:
            self._stream = stream
        return columns

    def _begin(self, block: int) -> _Stream:
        """Begins to read the block's run: a little before it, where the window's other blocks may be asked for next."""
        runs = self.blocks.runs
        run = int(np.searchsorted(runs, block, side="right")) - 1
        first, stop = max(int(runs[run]), block - self._most + 1), int(runs[run + 1])
        return _Stream(first, stop, iter(self.read_blocks(first, stop)))

    def _check(self, block: int, columns: Columns | None) -> Columns:
        start, stop = self._bounds(block)
        found = {len(column) for column in columns or ()}
        if columns is None or found != {stop - start}:
            told = " and ".join(str(number) for number in sorted(found)) or "no"
            raise errors.InvalidData(
                f"{type(self).__name__} gave {told} rows for the samples {start} to {stop - 1}; the data must not "
                "change while a job runs"
            )
        return columns


def check_number(name: str, value: object, *, least: int) -> None:
    """Raises InvalidData unless an argument is a whole number, and not too small."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise errors.InvalidData(f"{name} is {value!r}; give a whole number, {least} or more")


def _consecutive(numbers: np.ndarray) -> bool:
    return bool(numbers[-1] - numbers[0] + 1 == len(numbers) and (np.diff(numbers) == 1).all())


def _put(target: np.ndarray, places: np.ndarray, column: np.ndarray, rows: np.ndarray) -> None:
    """target[places] = column[rows], without an array in between where the places are side by side."""
    if places[-1] - places[0] + 1 == len(places):  # they rise
        begin = int(places[0])
        # The rows are known to be in the column; "clip" spares NumPy a copy that it makes for when they are not.
        np.take(column, rows, axis=0, out=target[begin : begin + len(places)], mode="clip")
    else:
        target[places] = column[rows]


__all__ = ["BlockReader", "Columns", "check_number"]
