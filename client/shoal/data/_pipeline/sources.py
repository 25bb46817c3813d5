"""Sources of pipelines: the samples of a data set, the rows of arrays, and the elements of an iterable."""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from shoal import errors
from shoal._numerics import seeded
from shoal._system import check_count
from shoal.data._arrays import Arrays
from shoal.data._pipeline.elements import Element, Read, ReadyElement, SampleElement
from shoal.data._pipeline.splitting import length_of, mapped
from shoal.data._pipeline.stages import DataPipeline
from shoal.data._reading.batches import read
from shoal.program import Blocks, Dataset, RandomDataset

# Samples that are read at a time from a data set in blocks.
_ROWS = 256


class Samples(DataPipeline):
    """The samples of a data set, in the order of their numbers; see `pipeline`."""

    def __init__(self, dataset: Dataset | RandomDataset, seed: int) -> None:
        super().__init__()
        self.dataset, self._seed = dataset, seed
        self._ranges: tuple[tuple[int, int], ...] = ((0, len(dataset)),)

    def within(self, ranges: Iterable[tuple[int, int]]) -> "Samples":
        """Returns some of the samples: those from each start up to, but not including, its stop."""
        other = copy.copy(self)
        other._ranges = tuple(ranges)
        return other

    def _elements(self) -> Iterator[Element]:
        seed = int(np.random.SeedSequence([self._seed, next(self._iterations)]).generate_state(1, np.uint64)[0]) >> 1
        if isinstance(getattr(self.dataset, "blocks", None), Blocks):
            yield from self._in_blocks(seed)
            return
        one_by_one: Read = seeded(self.dataset.batch, seed)
        for start, stop in self._ranges:
            for number in range(start, stop):
                yield SampleElement(one_by_one, number)

    def _count(self) -> float | None:
        return sum(stop - start for start, stop in self._ranges)

    def _in_blocks(self, seed: int) -> Iterator[Element]:
        plan = (
            np.arange(place, min(place + _ROWS, stop))
            for start, stop in self._ranges
            for place in range(start, stop, _ROWS)
        )
        for batch in read(self.dataset, plan, seed):
            for row in range(length_of(batch)):
                yield ReadyElement(mapped(lambda array, row=row: _owned(array[row]), batch))


class Generated(DataPipeline):
    """The elements of an iterable; see `from_generator`."""

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        super().__init__()
        self._make = make

    def _elements(self) -> Iterator[Element]:
        for item in self._make():
            yield ReadyElement(item)

    def _count(self) -> float | None:
        return None


def pipeline(source: Dataset | RandomDataset, *, seed: int = 0) -> DataPipeline:
    """Returns a pipeline of the samples of a data set.

        shoal.data.pipeline(shoal.data.Cifar10("cifar-10-binary.tar.gz")).shuffle(50_000).batch(128)

    Samples that stay as they are between the source and `batch` are read a batch at a time.

    Args:
        source: a data set, such as `shoal.data.Cifar10` or one of your own.
        seed: seed for a data set that draws random numbers (`shoal.data.Augmented`). They differ in each iteration.

    Raises:
        BadRequest: `source` is not a data set.
    """
    given: object = source
    if isinstance(given, DataPipeline) or not isinstance(given, Dataset):  # a pipeline has a method `batch`, too
        raise errors.BadRequest(
            f"the source of a pipeline is {source!r:.200}; give a data set, such as shoal.data.Cifar10(FOLDER), or use "
            "shoal.data.from_arrays or from_generator"
        )
    return Samples(source, check_count("seed", seed))


def from_arrays(*arrays: Any) -> DataPipeline:
    """Returns a pipeline of the rows of arrays, as `tf.data.Dataset.from_tensor_slices` does.

        shoal.data.from_arrays(x, y)  # elements are tuples: x[0], y[0]

    Args:
        arrays: arrays of equal length, or one dict or tuple of arrays; as for `shoal.data.Arrays`, paths of .npy and
            .npz files are allowed.

    Raises:
        InvalidData: the arrays have different lengths or no rows, or a file cannot be read.
    """
    return pipeline(Arrays(arrays[0] if len(arrays) == 1 else arrays))


def from_generator(make: Callable[[], Iterable[Any]]) -> DataPipeline:
    """Returns a pipeline of the elements of an iterable, whose number is not known.

        shoal.data.from_generator(lambda: (line.split() for line in open("log.txt")))

    Args:
        make: returns the iterable. It is called at the start of each iteration.

    Raises:
        BadRequest: `make` cannot be called.
    """
    if not callable(make):
        raise errors.BadRequest(
            f"from_generator was given {make!r:.200}; give a function that returns an iterable, such as lambda: items"
        )
    return Generated(make)


def _owned(value: Any) -> Any:
    """Copies a row. A view would keep its whole block in memory while a shuffle buffer holds one of the samples."""
    return value.copy() if isinstance(value, np.ndarray) else value


__all__ = ["Samples", "from_arrays", "from_generator", "pipeline"]
