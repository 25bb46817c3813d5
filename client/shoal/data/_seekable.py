"""Samples of any kind that can be read from a position on."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from shoal import errors
from shoal.data._block_reader import BlockReader, Columns, check_number
from shoal.data._structure import Rebuild, flatten
from shoal.program import DEFAULT_PREFETCH, Blocks


class Seekable(BlockReader):
    """What can be read from any position on: a database, a log, a simulation that can be set to a time.

        class Games:
            def __len__(self):
                return 1_000_000

            def read(self, start, stop):
                return {"board": ..., "result": ...}  # arrays of stop - start rows

        dataset = Seekable(Games(), block=4096)

    Args:
        source: has `len()` and one of these methods. It is called from one thread at a time, for blocks of the ranges
            that are leased alone.
            `read(start, stop)`: the samples from start up to stop, as an array of stop - start rows, or a dict or
            tuple of such arrays.
            `iterate(start)`: an iterator of single samples from number start on, each a number or an array, or a dict
            or tuple of these; always of the same shapes.
        block: samples that are read at a time; the last block has what is left.
        window: blocks whose samples are shuffled together; 0: samples stay in order within their block, and batches
            may share memory with what `read` returned.
        prefetch: batches to read ahead; 0: everything is read in turn.

    Raises:
        InvalidData: the source has no samples or no such method, or a number is out of range; from a batch: what the
            source gave has other lengths or another structure.
    """

    def __init__(self, source: Any, *, block: int = 1024, window: int = 1, prefetch: int = DEFAULT_PREFETCH) -> None:
        kind = type(source).__name__
        read, iterate = getattr(source, "read", None), getattr(source, "iterate", None)
        if not hasattr(source, "__len__") or not (callable(read) or callable(iterate)):
            raise errors.InvalidData(
                f"Seekable was given a {kind}, which lacks len(), or both read(start, stop) and iterate(start)"
            )
        check_number("block", block, least=1)
        samples = len(source)
        if not samples:
            raise errors.InvalidData(f"Seekable: the {kind} has no samples, by its len(); give one at least")
        starts = np.append(np.arange(0, samples, block), samples)
        super().__init__(Blocks(starts, window), prefetch=prefetch)
        self._kind = kind
        self._read: Callable[[int, int], Any] = source.read if callable(read) else _reader_of(source.iterate, kind)
        self._names: list[str] | None = None  # of the arrays in what is read; known with the first block
        self._rebuild: Rebuild = lambda arrays: arrays[0]

    def read_blocks(self, first: int, stop: int) -> Iterator[Columns]:
        for block in range(first, stop):
            start, end = (int(number) for number in self.blocks.starts[block : block + 2])
            who = f"what {self._kind} gave for the samples {start} to {end - 1}"
            arrays, rebuild = flatten(self._read(start, end), who)
            if self._names is None:
                self._names, self._rebuild = [*arrays], rebuild
            if self._names != [*arrays]:
                raise errors.InvalidData(f"{who} has the arrays {[*arrays]}, and before it was {self._names}")
            length = len(next(iter(arrays.values())))
            if length != end - start:
                raise errors.InvalidData(f"{who} has {length} rows; give {end - start}")
            yield [*arrays.values()]

    def join(self, columns: Columns) -> Any:
        return self._rebuild(columns)


def _reader_of(iterate: Callable[[int], Iterator[Any]], kind: str) -> Callable[[int, int], Any]:
    def read(start: int, stop: int) -> Any:
        samples = list(islice(iterate(start), stop - start))
        if len(samples) != stop - start:
            raise errors.InvalidData(
                f"{kind}.iterate({start}) ended after {len(samples)} samples, and len() says that {stop - start} and "
                "more follow; make them agree"
            )
        return _stacked(samples)

    return read


def _stacked(samples: list[Any]) -> Any:
    """Single samples as arrays of all, in the structure of the first."""
    match first := samples[0]:
        case dict():
            return {key: _stacked([sample[key] for sample in samples]) for key in first}
        case tuple() | list():
            items = [_stacked([sample[place] for sample in samples]) for place in range(len(first))]
            named = type(first) is not tuple and isinstance(first, tuple)
            return type(first)(*items) if named else type(first)(items)
    return np.stack([np.asarray(sample) for sample in samples])


__all__ = ["Seekable"]
