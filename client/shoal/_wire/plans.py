"""Packing plans: all properties of a slab that can be computed before its arrays are packed."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from sys import intern
from typing import NamedTuple

import numpy as np

from shoal._wire.layout import row_elements, rows_of
from shoal._wire.limits import CHUNK_BYTES
from shoal._wire.slabs import Slab
from shoal.variables import Variable

# Minimum size of a slice that is sent as chunks of its own, without a copy of its array.
GATHERED_BYTES = CHUNK_BYTES // 4


class PlannedSlice(NamedTuple):
    """A slice with the properties that packing needs."""

    variable: str
    rows: slice | None  # None means the whole variable
    shape: tuple[int, ...]
    start: int  # of the slab's elements
    stop: int

    @property
    def elements(self) -> slice:
        """Range of elements in the slab."""
        return slice(self.start, self.stop)


class SlabPlan:
    """Packing plan of a slab.

    Args:
        slab: the slab.
        variables: variables of the placement, by name.

    Attributes:
        slab: as given.
        parts: the slices of the slab's arenas.
        all: all slices as one group.
        groups: the slices as they are sent: large ones alone, small ones gathered.
        partial: the slices that are not whole variables.
        names: the variables that lie in the slab with all their rows.
    """

    def __init__(self, slab: Slab, variables: Mapping[str, Variable]) -> None:
        self.slab = slab
        self.parts = _parts(slab, variables)
        self.all = SliceGroup(self.parts)
        self.groups = [SliceGroup(parts) for parts in _groups(self.parts, slab.wire_dtype.itemsize)]
        self.partial = [part for part in self.parts if part.rows is not None]
        whole = [part for part in self.parts if part.rows is None]
        self.names = [part.variable for part in whole]
        self._blocks = list(_blocks(whole))

    @property
    def travels_as_it_is(self) -> bool:
        """Whether the wire dtype is the slab's own dtype."""
        return self.slab.wire_dtype == self.slab.dtype

    def whole(self, flat: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the variables that lie in the slab with all their rows, as views of its elements."""
        return zip(self.names, chain.from_iterable(block.views(flat) for block in self._blocks), strict=True)


class SliceGroup:
    """Adjacent slices of an arena that are packed together.

    This class and `_Block` process many thousand variables at once, in C loops.

    Args:
        parts: at least one slice.

    Attributes:
        names: name of each slice's variable; a name may occur twice.
        elements: range of elements in the slab.
    """

    def __init__(self, parts: Sequence[PlannedSlice]) -> None:
        self.names = [part.variable for part in parts]
        self.elements = slice(parts[0].start, parts[-1].stop)
        self._get = getter(self.names)
        self._partial = [(index, part.rows) for index, part in enumerate(parts) if part.rows is not None]

    def slices(self, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Returns the slices of these arrays, in order."""
        found = [*self._get(arrays)]
        for index, rows in self._partial:
            found[index] = found[index][rows]
        return found


@dataclass(frozen=True, slots=True)
class _Block:
    """Adjacent whole variables of one shape, which become views in one operation."""

    elements: slice  # of the slab
    count: int
    shape: tuple[int, ...]  # of each

    def views(self, flat: np.ndarray) -> Iterable[np.ndarray]:
        """Returns the variables as views of the slab's elements."""
        if not self.shape:
            return [flat[self.elements].reshape(())]  # a row of a vector would be a number, not a view
        return flat[self.elements].reshape(self.count, *self.shape)


def _blocks(parts: Iterable[PlannedSlice]) -> Iterator[_Block]:
    start, count, stop = 0, 0, 0
    shape: tuple[int, ...] = ()
    for part in parts:
        if count and (part.shape != shape or not shape or part.start != stop):
            yield _Block(slice(start, stop), count, shape)
            count = 0
        if not count:
            start, shape = part.start, part.shape
        count, stop = count + 1, part.stop
    if count:
        yield _Block(slice(start, stop), count, shape)


def getter(names: Sequence[str]) -> Callable[[Mapping[str, np.ndarray]], Sequence[np.ndarray]]:
    """Returns a function that looks up these names in one call."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda arrays: [arrays[name] for name in names]


def _groups(parts: Sequence[PlannedSlice], itemsize: int) -> Iterator[list[PlannedSlice]]:
    """Yields slices that are sent together: a large slice alone, small ones up to a chunk's size."""
    gathered: list[PlannedSlice] = []
    size = 0
    for part in parts:
        nbytes = (part.stop - part.start) * itemsize
        large = nbytes >= GATHERED_BYTES
        if gathered and (large or size + nbytes > CHUNK_BYTES):
            yield gathered
            gathered, size = [], 0
        if large:
            yield [part]
        else:
            gathered.append(part)
            size += nbytes
    if gathered:
        yield gathered


def _parts(slab: Slab, variables: Mapping[str, Variable]) -> list[PlannedSlice]:
    parts = []
    for arena, first in zip(slab.arenas, slab.starts, strict=True):
        for variable, row_start, row_stop, offset in arena.slices:
            name = intern(variable)  # one string object per name, so that look-ups compare identity
            shape = variables[name].shape
            count, start = row_stop - row_start, first + offset
            stop = start + count * row_elements(shape)
            if count == rows_of(shape):
                parts.append(PlannedSlice(name, None, shape, start, stop))
            else:
                parts.append(PlannedSlice(name, slice(row_start, row_stop), (count, *shape[1:]), start, stop))
    return parts


__all__ = ["GATHERED_BYTES", "PlannedSlice", "SlabPlan", "SliceGroup", "getter"]
