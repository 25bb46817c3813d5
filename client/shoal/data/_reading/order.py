"""The order of an epoch's samples, which depends only on the job's seed, the epoch and the data set.

A leased range is a range of places in this order. The order does not depend on the workers or their number.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import numpy as np

from shoal.data._reading.permutation import IndexPermutation
from shoal.program import Blocks

# Places of an order that are computed at once. This bounds memory, at about half a megabyte.
_PLACES_AT_ONCE = 8192


class SampleOrder(ABC):
    """The order of the samples in each epoch."""

    @abstractmethod
    def numbers(self, epoch: int, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yields the numbers of the samples at the places [start, stop) of an epoch's order, as int64 arrays.

        Args:
            epoch: the epoch, from 0.
            start: the first place.
            stop: the place after the last one.
        """


class ShuffledSamples(SampleOrder):
    """A permutation of single samples, computed element by element: version 1 of the order.

    Args:
        samples: number of samples in one epoch.
        seed: seed of the job.
    """

    def __init__(self, samples: int, seed: int) -> None:
        self._samples, self._seed = samples, seed

    def numbers(self, epoch: int, start: int, stop: int) -> Iterator[np.ndarray]:
        permutation = IndexPermutation(self._samples, self._seed, epoch)
        for place in range(start, stop, _PLACES_AT_ONCE):
            yield permutation.at(np.arange(place, min(place + _PLACES_AT_ONCE, stop)))


class PermutedSamples(SampleOrder):
    """A permutation of single samples, drawn as a whole for each epoch: version 0 of the order.

    Jobs whose ledger is from before version 1 continue in this order. It takes 8 bytes of memory a sample.

    Args:
        samples: number of samples in one epoch.
        seed: seed of the job.
    """

    def __init__(self, samples: int, seed: int) -> None:
        self._samples, self._seed = samples, seed
        self._epoch: int | None = None  # the epoch of _permutation
        self._permutation = np.empty(0, np.int64)

    def numbers(self, epoch: int, start: int, stop: int) -> Iterator[np.ndarray]:
        if epoch != self._epoch:
            self._permutation, self._epoch = _generator(self._seed, epoch).permutation(self._samples), epoch
        yield self._permutation[start:stop]


class ShuffledBlocks(SampleOrder):
    """A permutation of the runs of blocks, then a permutation of the samples of each window of blocks.

    Each window has its own random stream, so the cost of a range does not depend on the size of the epoch.

    Args:
        blocks: blocks of the data set.
        seed: seed of the job.
    """

    def __init__(self, blocks: Blocks, seed: int) -> None:
        self._blocks, self._seed = blocks, seed
        self._epoch: int | None = None  # the epoch of the next two attributes
        self._sequence = np.empty(0, np.int64)  # the blocks in order
        self._ends = np.empty(0, np.int64)  # the end of each window, as a place in the epoch's order

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
    """Yields the same numbers in arrays of one size. The last one may be shorter.

    Args:
        pieces: arrays of any length.
        size: length of the new arrays, 1 or more.
    """
    rest: list[np.ndarray] = []
    missing = size
    for piece in pieces:
        start = 0
        while len(piece) - start >= missing:
            part = piece[start : start + missing]
            yield np.concatenate([*rest, part]) if rest else part
            start, rest, missing = start + missing, [], size
        if start < len(piece):
            rest.append(piece[start:])
            missing -= len(piece) - start
    if rest:
        yield np.concatenate(rest)


def _generator(seed: int, epoch: int, stream: int = 0) -> np.random.Generator:
    """Returns the generator of a stream. The streams of one epoch start 2^192 draws apart."""
    counter, key = np.array([0, 0, 0, stream], np.uint64), np.array([seed, epoch], np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))


def _ranges(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Returns the whole numbers of all ranges [start, stop), one range after the other."""
    lengths = stops - starts
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum(), dtype=np.int64)


__all__ = ["PermutedSamples", "SampleOrder", "ShuffledBlocks", "ShuffledSamples", "cut"]
