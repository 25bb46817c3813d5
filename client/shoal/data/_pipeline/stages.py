"""Pipelines as users call them, and the stages that transform their elements. `sources` has their sources."""

import copy
import itertools
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np

from shoal import errors
from shoal._system import check_count, check_type
from shoal.data._pipeline.elements import BatchElement, Element, Function, MappedElement, ReadyElement
from shoal.data._pipeline.options import Options
from shoal.data._reading.prefetcher import Prefetcher

# Lets Shoal choose a number: of batches to prefetch, or of threads.
AUTOTUNE = -1
_PREFETCHED = 2


class DataPipeline(ABC):
    """Elements that are computed when they are needed, in the style of tf.data.

        dataset = shoal.data.from_arrays(x, y).map(resized).shuffle(1000).batch(32).prefetch(2)
        for images, labels in dataset:
            ...

    Each method returns a new pipeline, and computes nothing. An iteration computes one element after the other, so
    memory holds only the elements in use. A pipeline can be iterated any number of times.

    `len()` is the number of elements. It raises TypeError if the number is not known (`from_generator`) or infinite
    (`repeat`).

    Attributes:
        options: how strategies divide the pipeline between processes.
    """

    def __init__(self) -> None:
        self._iterations = itertools.count()
        self._options: Options | None = None

    @property
    def options(self) -> Options:
        """How strategies divide the pipeline between processes."""
        return self._options or Options()

    @abstractmethod
    def _elements(self) -> Iterator[Element]:
        """Yields the elements of one iteration, without computing them."""

    @abstractmethod
    def _count(self) -> float | None:
        """Returns the number of elements, which may be infinite. None means that it is not known."""

    def fresh(self) -> Self:
        """Returns the same pipeline, not iterated yet: its orders do not depend on iterations of this one."""
        other = copy.copy(self)
        other._iterations = itertools.count()
        return other

    def __iter__(self) -> Iterator[Any]:
        for element in self._elements():
            yield element.value()

    def __len__(self) -> int:
        count = self._count()
        if count is None or count == math.inf:
            kind = "unknown" if count is None else "infinite; limit it with take(n)"
            raise TypeError(f"the length of this pipeline is {kind}")
        return int(count)

    def __bool__(self) -> bool:
        """Returns True: a pipeline is there, whatever its length."""
        return True

    def map(self, function: Callable[..., Any], num_parallel_calls: int | None = None) -> "DataPipeline":
        """Applies a function to each element.

        Args:
            function: takes an element, and returns the new one. If the element is a tuple, its items are separate
                arguments. It is called only when its result is needed, even if later stages move or drop elements.
            num_parallel_calls: number of threads that call it for the elements of one batch. None means that the
                iterating thread does, and `AUTOTUNE` one thread per core. The results keep their order.
        """
        if not callable(function):
            raise errors.BadRequest(f"the function of map is {function!r:.200}; give a function of one element")
        threads = 1
        if num_parallel_calls is not None:
            threads = _or_auto("num_parallel_calls", num_parallel_calls, os.cpu_count() or 1)
        return Map(self, Function(function, threads))

    def shuffle(
        self, buffer_size: int, seed: int | None = None, reshuffle_each_iteration: bool = True
    ) -> "DataPipeline":
        """Returns the elements in another order: each comes from a random place of a buffer, which is then refilled.

        Args:
            buffer_size: number of elements in the buffer. The order is uniformly random if it is at least the number of
                all elements. The buffer holds what is needed to compute an element, such as the number of a sample.
            seed: the order depends on it and on the number of earlier iterations. None means 0, so that all processes
                of a strategy have the same order.
            reshuffle_each_iteration: whether each iteration has a new order.
        """
        check_count("buffer_size", buffer_size, 1)
        return Shuffle(self, buffer_size, check_count("seed", seed or 0), reshuffle_each_iteration)

    def batch(self, batch_size: int, drop_remainder: bool = False) -> "DataPipeline":
        """Joins consecutive elements to batches: each array gets a first dimension, the samples.

        Args:
            batch_size: number of elements of a batch. With a strategy, it is the number for all replicas together.
            drop_remainder: whether to leave out the last batch if it has fewer elements.
        """
        return Batched(self, check_count("batch_size", batch_size, 1), drop_remainder)

    def prefetch(self, buffer_size: int) -> "DataPipeline":
        """Computes elements ahead, in one thread. The thread ends when the iteration ends or is abandoned.

        Args:
            buffer_size: largest number of elements that are ready. `AUTOTUNE` means 2.
        """
        return Prefetch(self, _or_auto("buffer_size", buffer_size, _PREFETCHED))

    def repeat(self, count: int | None = None) -> "DataPipeline":
        """Iterates several times. A stage `shuffle` before it has a new order each time.

        Args:
            count: number of iterations. None or -1 means that it never ends.
        """
        return Repeat(self, None if count in (None, -1) else check_count("count", count))

    def take(self, count: int) -> "DataPipeline":
        """Ends after some elements.

        Args:
            count: the largest number of elements; -1 means all.
        """
        return self if count == -1 else Subrange(self, 0, check_count("count", count), 1)

    def skip(self, count: int) -> "DataPipeline":
        """Leaves out the first elements.

        Args:
            count: number of elements to leave out.
        """
        return Subrange(self, check_count("count", count), None, 1)

    def shard(self, num_shards: int, index: int) -> "DataPipeline":
        """Keeps the elements whose number modulo `num_shards` is `index`.

        Args:
            num_shards: number of shards.
            index: number of this shard, from 0.
        """
        check_count("num_shards", num_shards, 1)
        if check_count("index", index) >= num_shards:
            raise errors.BadRequest(f"index is {index}, but there are {num_shards} shards; give a number below that")
        return Subrange(self, index, None, num_shards)

    def with_options(self, options: Options) -> "DataPipeline":
        """Returns the same pipeline with other options."""
        check_type("options", options, Options, "shoal.data.Options()")
        other = copy.copy(self)
        other._options = options
        return other


class PipelineStage(DataPipeline):
    """Base class of the pipelines that transform another one."""

    def __init__(self, before: DataPipeline) -> None:
        super().__init__()
        self.before = before

    @property
    def options(self) -> Options:
        return self._options or self.before.options

    def over(self, before: DataPipeline) -> Self:
        """Returns this stage over another pipeline."""
        other = copy.copy(self)
        other.before = before
        return other

    def fresh(self) -> Self:
        return super().fresh().over(self.before.fresh())

    def _count(self) -> float | None:
        return self.before._count()


class Map(PipelineStage):
    """Elements that a function computes; see `DataPipeline.map`."""

    def __init__(self, before: DataPipeline, function: Function) -> None:
        super().__init__(before)
        self._function = function

    def _elements(self) -> Iterator[Element]:
        for element in self.before._elements():
            yield MappedElement(self._function, element)


class Shuffle(PipelineStage):
    """Elements in another order; see `DataPipeline.shuffle`."""

    def __init__(self, before: DataPipeline, size: int, seed: int, again: bool) -> None:
        super().__init__(before)
        self._size, self._seed, self._again = size, seed, again

    def _elements(self) -> Iterator[Element]:
        iteration = next(self._iterations) if self._again else 0
        rng = np.random.default_rng([self._seed, iteration])
        buffer: list[Element] = []
        for element in self.before._elements():
            if len(buffer) < self._size:
                buffer.append(element)
                continue
            place = int(rng.integers(self._size))
            yield buffer[place]
            buffer[place] = element
        for place in rng.permutation(len(buffer)):
            yield buffer[place]


class Batched(PipelineStage):
    """Batches of elements; see `DataPipeline.batch`."""

    def __init__(self, before: DataPipeline, size: int, drop: bool) -> None:
        super().__init__(before)
        self.size, self._drop = size, drop

    def _elements(self) -> Iterator[Element]:
        rest = iter(self.before._elements())
        while batch := tuple(itertools.islice(rest, self.size)):
            if len(batch) == self.size or not self._drop:
                yield BatchElement(batch)

    def _count(self) -> float | None:
        before = self.before._count()
        if before is None or before == math.inf:
            return before
        return int(before) // self.size if self._drop else -(-int(before) // self.size)


class Prefetch(PipelineStage):
    """Elements that a thread computes ahead; see `DataPipeline.prefetch`."""

    def __init__(self, before: DataPipeline, size: int) -> None:
        super().__init__(before)
        self._size = size

    def _elements(self) -> Iterator[Element]:
        if not self._size:
            yield from self.before._elements()
            return
        with Prefetcher(iter(self.before), self._size) as ahead:
            for value in ahead:
                yield ReadyElement(value)


class Repeat(PipelineStage):
    """Several iterations, one after the other; see `DataPipeline.repeat`."""

    def __init__(self, before: DataPipeline, times: int | None) -> None:
        super().__init__(before)
        self._times = times

    def _elements(self) -> Iterator[Element]:
        for _ in itertools.count() if self._times is None else range(self._times):
            empty = True
            for element in self.before._elements():
                empty = False
                yield element
            if empty:
                return

    def _count(self) -> float | None:
        before = self.before._count()
        if self._times == 0 or before == 0:
            return 0
        return None if before is None else math.inf if self._times is None else before * self._times


class Subrange(PipelineStage):
    """Some elements, by number: every `step`th from `start` on, and before `stop`."""

    def __init__(self, before: DataPipeline, start: int, stop: int | None, step: int) -> None:
        super().__init__(before)
        self._start, self._stop, self._step = start, stop, step

    def _elements(self) -> Iterator[Element]:
        if self._stop == 0:
            return
        yield from itertools.islice(self.before._elements(), self._start, self._stop, self._step)

    def _count(self) -> float | None:
        before = self.before._count()
        if before is None:
            return None
        stop = before if self._stop is None else min(before, self._stop)
        return stop if stop == math.inf else max(0, -(-(int(stop) - self._start) // self._step))


def _or_auto(name: str, value: int, auto: int) -> int:
    return auto if value == AUTOTUNE else check_count(name, value)


__all__ = ["AUTOTUNE", "Batched", "DataPipeline", "PipelineStage", "Prefetch"]
