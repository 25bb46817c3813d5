"""The base class of data sets with blocks: it keeps blocks in memory, and cuts batches from them."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal import errors
from shoal.data._reading.prefetcher import Prefetcher
from shoal.program import DEFAULT_PREFETCH, Blocks

# The arrays of one block or chapter: of equal length, always in the same number and order.
ColumnArrays = Sequence[np.ndarray]


@dataclass(slots=True)
class _Stream:
    """The state of reading a run of blocks."""

    following: int  # the next block
    stop: int  # the block after the run
    columns: Iterator[ColumnArrays]


class BlockReader(ABC):
    """The base class of data sets with blocks. A subclass needs `read_blocks` and `concatenate`.

    Batches are read in chapters. A chapter consists of consecutive batches whose samples all lie in one window of
    blocks. The reader copies the samples of a chapter to one array per column, and its batches are slices of these
    arrays. While the program trains on one chapter, a thread reads the next. Memory then holds about three windows: the
    arrays of the chapter in use, those of the next chapter, and the blocks that the next chapter is copied from.

    Args:
        blocks: blocks of the data set.
        prefetch: number of batches to read ahead. 0 means that the calling thread reads each block when it is needed.

    Attributes:
        blocks: blocks of the data set.
        prefetch: number of batches to read ahead.

    Raises:
        InvalidData: prefetch is not a whole number, 0 or more.
    """

    def __init__(self, blocks: Blocks, *, prefetch: int = DEFAULT_PREFETCH) -> None:
        check_number("prefetch", prefetch, least=0)
        self.blocks, self.prefetch = blocks, prefetch
        self._most = max(1, blocks.window)
        self._held: OrderedDict[int, ColumnArrays] = OrderedDict()  # at most _most blocks, least recently used first
        self._stream: _Stream | None = None

    @abstractmethod
    def read_blocks(self, first: int, stop: int) -> Iterator[ColumnArrays]:
        """Reads the blocks first, first + 1, ..., stop - 1 of one run in order. The caller may stop earlier.

        Args:
            first: number of the first block.
            stop: number after the last block.

        Yields:
            The arrays of one block, whose first dimension is its samples, in order.
        """

    @abstractmethod
    def concatenate(self, columns: ColumnArrays) -> Any:
        """Returns the batch that the program receives, from arrays like those of `read_blocks`."""

    def __len__(self) -> int:
        return self.blocks.samples

    def batch(self, indices: np.ndarray) -> Any:
        """Returns a batch of any samples. Reads each of their blocks completely.

        Args:
            indices: numbers of the samples, int64 [n].

        Raises:
            InvalidData: `indices` is empty, or a block cannot be read.
            IndexError: a number is out of range.
        """
        numbers = np.asarray(indices, np.int64)
        if not len(numbers):
            raise errors.InvalidData("a batch without samples was requested; give at least one number")
        if numbers.min() < 0 or numbers.max() >= len(self):
            raise IndexError(f"samples {numbers.min()} to {numbers.max()} were requested; there are {len(self)}")
        return self.concatenate(self._gather([numbers], self._blocks_of(numbers)))

    def batches(self, plan: Iterable[np.ndarray]) -> Iterator[Any]:
        """Yields what `batch` returns for each item of the plan, with the next blocks prefetched."""
        chapters = self._chapters(plan)
        if not self.prefetch:
            yield from self._cut(chapters)
            return
        with Prefetcher(chapters, 1) as ahead:
            yield from self._cut(ahead)

    def _cut(self, chapters: Iterable[tuple[ColumnArrays, list[int]]]) -> Iterator[Any]:
        for columns, lengths in chapters:
            start = 0
            for length in lengths:
                yield self.concatenate([column[start : start + length] for column in columns])
                start += length

    def _chapters(self, plan: Iterable[np.ndarray]) -> Iterator[tuple[ColumnArrays, list[int]]]:
        """Yields the columns of each chapter, and the lengths of its batches."""
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
        """Returns the blocks of these samples, in order of first use."""
        homes, firsts = np.unique(np.searchsorted(self.blocks.starts, numbers, side="right") - 1, return_index=True)
        return [int(home) for home in homes[np.argsort(firsts)]]

    def _bounds(self, block: int) -> tuple[int, int]:
        return int(self.blocks.starts[block]), int(self.blocks.starts[block + 1])

    def _gather(self, chapter: Sequence[np.ndarray], blocks: Collection[int]) -> ColumnArrays:
        """Returns the samples of a chapter's batches in order, gathered from the given blocks."""
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
        """Returns the blocks in reading order: those in memory, the rest of the current run, and then the others."""
        stream = self._stream
        held = [block for block in blocks if block in self._held]
        going_on = {block for block in blocks if stream and stream.following <= block < stream.stop}
        return held + sorted(set(blocks) - set(held), key=lambda block: (block not in going_on, block))

    def _block(self, block: int) -> ColumnArrays:
        columns = self._held.pop(block, None)
        if columns is None:
            columns = self._load(block)
        self._make_room()
        self._held[block] = columns
        return columns

    def _make_room(self) -> None:
        while len(self._held) >= self._most:
            self._held.popitem(last=False)

    def _load(self, block: int) -> ColumnArrays:
        """Reads a block. Keeps the blocks read before it while there is room, because they are in its window."""
        stream, self._stream = self._stream, None  # it stays None if reading fails
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
        """Starts to read the block's run, early enough for the other blocks of its window."""
        runs = self.blocks.runs
        run = int(np.searchsorted(runs, block, side="right")) - 1
        first, stop = max(int(runs[run]), block - self._most + 1), int(runs[run + 1])
        return _Stream(first, stop, iter(self.read_blocks(first, stop)))

    def _check(self, block: int, columns: ColumnArrays | None) -> ColumnArrays:
        start, stop = self._bounds(block)
        found = {len(column) for column in columns or ()}
        if columns is None or found != {stop - start}:
            counts = " and ".join(str(number) for number in sorted(found)) or "no"
            raise errors.InvalidData(
                f"{type(self).__name__} returned {counts} rows for samples {start} to {stop - 1}; the data must not "
                "change while a job runs"
            )
        return columns


def check_number(name: str, value: object, *, least: int) -> None:
    """Raises InvalidData unless an argument is a whole number of at least `least`.

    Args:
        name: name of the argument, for the message.
        value: its value.
        least: smallest allowed number.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise errors.InvalidData(f"{name} is {value!r}; give a whole number, {least} or more")


def _consecutive(numbers: np.ndarray) -> bool:
    return bool(numbers[-1] - numbers[0] + 1 == len(numbers) and (np.diff(numbers) == 1).all())


def _put(target: np.ndarray, places: np.ndarray, column: np.ndarray, rows: np.ndarray) -> None:
    """Sets target[places] = column[rows], without a temporary array if the places are consecutive."""
    if places[-1] - places[0] + 1 == len(places):  # the places increase
        begin = int(places[0])
        # All rows are in range. With "clip", NumPy does not make the copy that it needs to raise an IndexError.
        np.take(column, rows, axis=0, out=target[begin : begin + len(places)], mode="clip")
    else:
        target[places] = column[rows]


__all__ = ["BlockReader", "ColumnArrays", "check_number"]
