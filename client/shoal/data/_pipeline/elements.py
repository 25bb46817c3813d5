"""The elements of a pipeline: samples and batches whose values are computed when they are needed.

The stages that choose and order elements (shuffle, take, shard, the shares of processes) compute no values. So a
shuffle buffer holds the numbers of samples, not their images, and a process computes only its own part of a batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal import errors
from shoal.data._pipeline.splitting import length_of, mapped, sliced

# Returns a batch of the samples with these numbers, int64 [n].
Read = Callable[[np.ndarray], Any]


class Element(ABC):
    """One element of a pipeline. It may be computed more than once."""

    @abstractmethod
    def value(self) -> Any:
        """Computes the element."""


@dataclass(frozen=True, slots=True)
class ReadyElement(Element):
    """An element that is computed already."""

    item: Any

    def value(self) -> Any:
        return self.item


@dataclass(frozen=True, slots=True)
class SampleElement(Element):
    """A sample of a data set, by number."""

    read: Read
    number: int

    def value(self) -> Any:
        return _rows(self.read(np.array([self.number])), 1)[0]


@dataclass(frozen=True, slots=True)
class Function:
    """The function of a stage `map`, and the number of threads that call it."""

    call: Callable[..., Any]
    threads: int

    def __call__(self, value: Any) -> Any:
        """Calls the function: the items of a tuple are separate arguments, as in TensorFlow."""
        return self.call(*value) if isinstance(value, tuple) else self.call(value)


@dataclass(frozen=True, slots=True)
class MappedElement(Element):
    """An element that a function computes from another one."""

    function: Function
    before: Element

    def value(self) -> Any:
        return self.function(self.before.value())


@dataclass(frozen=True, slots=True)
class BatchElement(Element):
    """A batch of elements, at least one."""

    elements: Sequence[Element]

    def value(self) -> Any:
        read = _same_source(self.elements)
        if read is not None:
            return read(_numbers(self.elements))
        return _stacked(_values(self.elements))

    def part(self, start: int, stop: int) -> Element:
        """Returns some samples of the batch. Only these are computed; a part without samples costs one sample.

        Args:
            start: the first sample.
            stop: the sample after the last.
        """
        if start < stop:
            return BatchElement(self.elements[start:stop])
        return ReadyElement(sliced(BatchElement(self.elements[:1]).value(), 0, 0))


def part_of(element: Element, bounds: Callable[[int], tuple[int, int]]) -> Element:
    """Returns some samples of a batch, without computing the others if the batch is not computed yet.

    Args:
        element: the batch.
        bounds: takes the number of samples, and returns the first sample of the part and the one after the last.
    """
    if isinstance(element, BatchElement):
        return element.part(*bounds(len(element.elements)))
    whole = element.value()
    return ReadyElement(sliced(whole, *bounds(length_of(whole))))


def _same_source(elements: Sequence[Element]) -> Read | None:
    """Returns the function that reads all of these samples at once, or None."""
    first = elements[0]
    if isinstance(first, SampleElement) and all(
        isinstance(it, SampleElement) and it.read == first.read for it in elements
    ):
        return first.read
    return None


def _numbers(elements: Sequence[Element]) -> np.ndarray:
    return np.fromiter((it.number for it in elements if isinstance(it, SampleElement)), np.int64, len(elements))


def _values(elements: Sequence[Element]) -> list[Any]:
    """Computes several elements: samples of one source are read together, and a function may run on several threads."""
    if (read := _same_source(elements)) is not None:
        return _rows(read(_numbers(elements)), len(elements))
    first = elements[0]
    if isinstance(first, MappedElement):
        function = first.function
        before = [it.before for it in elements if isinstance(it, MappedElement) and it.function is function]
        if len(before) == len(elements):
            return _called(function, _values(before))
    return [it.value() for it in elements]


def _called(function: Function, values: list[Any]) -> list[Any]:
    threads = min(function.threads, len(values))
    if threads < 2:
        return [function(value) for value in values]
    with ThreadPoolExecutor(threads, thread_name_prefix="pipeline-map") as pool:
        return list(pool.map(function, values))


def _rows(batch: Any, count: int) -> list[Any]:
    return [mapped(lambda array, row=row: array[row], batch) for row in range(count)]


def _stacked(values: list[Any]) -> Any:
    def stack(*leaves: Any) -> np.ndarray:
        try:
            return np.stack([np.asarray(leaf) for leaf in leaves])
        except ValueError:
            shapes = sorted({np.shape(leaf) for leaf in leaves})
            raise errors.InvalidData(
                f"the samples of a batch have the shapes {', '.join(map(str, shapes[:4]))}; make them alike with map, "
                "for example with shoal.data.augment.resize, before batch"
            ) from None

    first, *others = values
    try:
        return mapped(stack, first, *others)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise errors.InvalidData(
            f"the samples of a batch differ in their structure ({type(error).__name__}: {error}); return the same "
            "tuples and dicts for each sample"
        ) from None


__all__ = ["BatchElement", "Element", "Function", "MappedElement", "Read", "ReadyElement", "SampleElement", "part_of"]
