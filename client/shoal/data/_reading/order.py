"""In which order the samples of an epoch come, from the job's seed alone. What is read of it is not known here.

A leased range is a range of places in this order. Who reads it, and how many others there are, changes nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import numpy as np

from shoal.program import Blocks


class SampleOrder(ABC):
    """The order of each epoch."""

    @abstractmethod
    def numbers(self, epoch: int, start: int, stop: int) -> Iterator[np.ndarray]:
        """The numbers of the samples at the places [start, stop) of an epoch's order, int64, in pieces."""


class ShuffledSamples(SampleOrder):
    """A permutation of single samples.

    Args:
        samples: of one pass.
        seed: of the job.
    """

    def __init__(self, samples: int, seed: int) -> None:
        self._samples, self._seed = samples, seed
        self._epoch: int | None = None  # that _permutation belongs to
        self._permutation = np.empty(0, np.int64)

    def numbers(self, epoch: int, start: int, stop: int) -> Iterator[np.ndarray]:
        if epoch != self._epoch:
            self._permutation, self._epoch = _generator(self._seed, epoch).permutation(self._samples), epoch
        yield self._permutation[start:stop]


class ShuffledBlocks(SampleOrder):
    """A permutation of the runs of blocks, then one of the samples of each window of blocks.

    Each window's is drawn from a stream of its own, so that a range costs what is in it, however large the epoch.

    Args:
        blocks: of the data set.
        seed: of the job.
    """

    def __init__(self, blocks: Blocks, seed: int) -> None:
        self._blocks, self._seed = blocks, seed
        self._epoch: int | None = None  # that the two below belong to
        self._sequence = np.empty(0, np.int64)  # the blocks, in their order
        self._ends = np.empty(0, np.int64)  # of the windows, in places of the epoch

    def numbers(self, epoch: int, start: int, stop: int) -> Iterator[np.ndarray]:
        self._draw(epoch)
        for window in range(int(np.searchsorted(self._ends, start, side="right")), len(self._ends)):
            begin = int(self._ends[window - 1]) if window else 0
            if begin >= stop:
                return
            yield self._window(epoch, window)[max(start - begin, 0) : stop - begin]

    def _draw(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        blocks = self._blocks
        order = _generator(self._seed, epoch).permutation(len(blocks.runs) - 1)
        self._sequence = _ranges(blocks.runs[order], blocks.runs[order + 1])
        ends = np.cumsum(np.diff(blocks.starts)[self._sequence])
        step = max(1, blocks.window)
        self._ends = np.append(ends[step - 1 : -1 : step], ends[-1:])
        self._epoch = epoch

    def _window(self, epoch: int, window: int) -> np.ndarray:
        step, starts = max(1, self._blocks.window), self._blocks.starts
        here = self._sequence[window * step : (window + 1) * step]
        numbers = _ranges(starts[here], starts[here + 1])
        if not self._blocks.window:
            return numbers
        return _generator(self._seed, epoch, stream=1 + window).permutation(numbers)


def cut(pieces: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """The same numbers in pieces of this size; the last one may be shorter."""
    rest: list[np.ndarray] = []
    lacking = size
    for piece in pieces:
        start = 0
        while len(piece) - start >= lacking:
            part = piece[start : start + lacking]
            yield np.concatenate([*rest, part]) if rest else part
            start, rest, lacking = start + lacking, [], size
        if start < len(piece):
            rest.append(piece[start:])
            lacking -= len(piece) - start
    if rest:
        yield np.concatenate(rest)


def _generator(seed: int, epoch: int, stream: int = 0) -> np.random.Generator:
    """Streams of one epoch begin 2^192 draws apart."""
    counter, key = np.array([0, 0, 0, stream], np.uint64), np.array([seed, epoch], np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))


def _ranges(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """The whole numbers of all ranges [start, stop), one range after the other."""
    lengths = stops - starts
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum(), dtype=np.int64)


__all__ = ["SampleOrder", "ShuffledBlocks", "ShuffledSamples", "cut"]
