"""The data set of a source that can be read from any position."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from shoal import errors
from shoal.data._block_reader import BlockReader, ColumnArrays, check_number
from shoal.data._structure import Rebuild, flatten
from shoal.program import DEFAULT_PREFETCH, Blocks


class Seekable(BlockReader):
    """The samples of a source that can be read from any position, such as a database, a log or a simulation.

        class Games:
            def __len__(self):
                return 1_000_000

            def read(self, start, stop):
                return {"board": ..., "result": ...}  # arrays of stop - start rows

        dataset = Seekable(Games(), block=4096)

    Args:
        source: an object with `len()` and one of the following methods. It is called from one thread at a time, only
            for the blocks of leased ranges.
            `read(start, stop)` returns the samples from start up to, but not including, stop: an array of stop - start
            rows, or a dict or tuple of such arrays.
            `iterate(start)` returns an iterator of single samples from number start on. Each is a number, an array, or
            a dict or tuple of these, always with the same shapes.
        block: number of samples in a block. The last block may be smaller.
        window: number of blocks whose samples are shuffled together; see `shoal.data.Blocks`. 0 keeps the samples of a
            block in order, and batches may share memory with the arrays that `read` returned.
        prefetch: number of batches to read ahead. 0 means no prefetching.

    Raises:
        InvalidData: the source has no samples or neither method, or a number is out of range. Reading a batch raises it
            if the source returns arrays of another length or structure.
    """

    def __init__(self, source: Any, *, block: int = 1024, window: int = 1, prefetch: int = DEFAULT_PREFETCH) -> None:
        kind = type(source).__name__
        read, iterate = getattr(source, "read", None), getattr(source, "iterate", None)
        if not hasattr(source, "__len__") or not (callable(read) or callable(iterate)):
            raise errors.InvalidData(
                f"Seekable needs a source with len() and with read(start, stop) or iterate(start); a {kind} lacks them"
            )
        check_number("block", block, least=1)
        samples = len(source)
        if not samples:
            raise errors.InvalidData(f"Seekable: the {kind} has no samples: its len() is 0; give at least one")
        starts = np.append(np.arange(0, samples, block), samples)
        super().__init__(Blocks(starts, window), prefetch=prefetch)
        self._kind = kind
        self._read: Callable[[int, int], Any] = source.read if callable(read) else _reader_of(source.iterate, kind)
        self._names: list[str] | None = None  # names of the arrays; set by the first block
        self._rebuild: Rebuild = lambda arrays: arrays[0]

    def read_blocks(self, first: int, stop: int) -> Iterator[ColumnArrays]:
        for block in range(first, stop):
            start, end = (int(number) for number in self.blocks.starts[block : block + 2])
            what = f"what {self._kind} returned for the samples {start} to {end - 1}"
            arrays, rebuild = flatten(self._read(start, end), what)
            if self._names is None:
                self._names, self._rebuild = [*arrays], rebuild
            if self._names != [*arrays]:
                raise errors.InvalidData(f"{what} has the arrays {[*arrays]}, but earlier blocks had {self._names}")
            length = len(next(iter(arrays.values())))
            if length != end - start:
                raise errors.InvalidData(f"{what} has {length} rows; return {end - start}")
            yield [*arrays.values()]

    def concatenate(self, columns: ColumnArrays) -> Any:
        return self._rebuild(columns)


def _reader_of(iterate: Callable[[int], Iterator[Any]], kind: str) -> Callable[[int, int], Any]:
    def read(start: int, stop: int) -> Any:
        samples = list(islice(iterate(start), stop - start))
        if len(samples) != stop - start:
            raise errors.InvalidData(
                f"{kind}.iterate({start}) ended after {len(samples)} samples, but by its len() it must have at least "
                f"{stop - start}; make them agree"
            )
        return _stacked(samples)

    return read


def _stacked(samples: list[Any]) -> Any:
    """Returns single samples as arrays of all samples, in the structure of the first."""
    match first := samples[0]:
        case dict():
            return {key: _stacked([sample[key] for sample in samples]) for key in first}
        case tuple() | list():
            items = [_stacked([sample[place] for sample in samples]) for place in range(len(first))]
            named = type(first) is not tuple and isinstance(first, tuple)
            return type(first)(*items) if named else type(first)(items)
    return np.stack([np.asarray(sample) for sample in samples])


__all__ = ["Seekable"]
