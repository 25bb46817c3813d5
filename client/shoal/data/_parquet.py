"""Parquet files, read by row groups, or by parts of those that are large."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal import errors
from shoal._system import load
from shoal.data import _block_reader
from shoal.data._block_reader import BlockReader
from shoal.data._columns import Columns
from shoal.data._files import DataFile, Where, errors_naming, find
from shoal.program import DEFAULT_PREFETCH, Blocks

_SUFFIXES = (".parquet", ".pq")
# Footers that are read at a time: of far files, most of it is waiting.
_FOOTERS_AT_ONCE = 8
# Files that are kept open. Row groups come in random order, and to open a file again is to read its footer again.
_MOST_OPEN = 16


@dataclass(frozen=True, slots=True)
class _Footer:
    schema: Any  # Arrow's
    rows: list[int]  # by row group


class Parquet(BlockReader):
    """The rows of Parquet files.

        dataset = Parquet("s3://bucket/train/part-*.parquet", columns=["x", "label"])

    A batch is a dict of arrays by column. Numbers, booleans, timestamps, dates and durations are arrays of NumPy's
    types; lists of fixed size are rows of an array with one more dimension, and so are binary values of fixed size, of
    uint8; texts and other binary values are arrays of Python objects, which stay on the host. Types beyond these are
    refused.

    The files are taken by name, and their footers are read when this is made. A block is a row group, or a part of one
    that takes more than `block_bytes` in memory; the parts of a row group stay one after the other in the epoch's
    order, since they are decoded in one go.

    Args:
        files: a path, a pattern, a folder or a URL that fsspec knows, or a list of these.
        columns: to read, in this order; None: all.
        fill: by column, what stands in the place of a null, in a list of its elements. Without it nulls are refused.
        window: blocks whose samples are shuffled together, see `shoal.data.Blocks`. 0: rows stay in order within a
            block, and their batches are read-only views of what was decoded: the fastest, for rows that were shuffled
            before.
        block_bytes: about what a block may take in memory.
        prefetch: batches to read ahead, and one window of blocks; 0: everything is read in turn.

    Raises:
        InvalidData: a file is missing, damaged or differs from the first, or a column is not there or of no use. From a
            batch: a file was damaged or changed, or a column has nulls.
        ImportError: pyarrow, or for a URL fsspec, is not installed.
    """

    def __init__(
        self,
        files: Where,
        columns: Sequence[str] | None = None,
        *,
        fill: Mapping[str, Any] | None = None,
        window: int = 1,
        block_bytes: int = 32 << 20,
        prefetch: int = DEFAULT_PREFETCH,
    ) -> None:
        self._pa, self._pq = load("pyarrow", "shoal.data.Parquet"), load("pyarrow.parquet", "shoal.data.Parquet")
        self._files = find(files, _SUFFIXES, "shoal.data.Parquet")
        with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
            footers = list(pool.map(self._footer, self._files))
        self._columns = Columns(footers[0].schema, columns, fill, self._files[0].name)
        for file, footer in zip(self._files, footers, strict=True):
            self._columns.check(footer.schema, file.name)
        # Of each run of blocks: its file and row group.
        self._groups = [
            (number, group) for number, footer in enumerate(footers) for group, rows in enumerate(footer.rows) if rows
        ]
        if not self._groups:
            raise errors.InvalidData(f"{self._files[0].name} and all other files have no rows; give one at least")
        self._part_rows = max(1, block_bytes // self._columns.row_bytes())
        super().__init__(self._cut_blocks(footers, window), prefetch=prefetch)
        self._open: OrderedDict[int, Any] = OrderedDict()  # by file, the one used last at the end

    def read_blocks(self, first: int, stop: int) -> Iterator[_block_reader.Columns]:
        run = int(np.searchsorted(self.blocks.runs, first, side="right")) - 1
        start, end = (int(block) for block in self.blocks.runs[run : run + 2])
        number, group = self._groups[run]
        where = f"{self._files[number].name}, row group {group}"
        lengths = np.diff(self.blocks.starts[start : end + 1]).tolist()
        with self._blamed(where):
            file = self._file(number)
            if group >= file.num_row_groups or file.metadata.row_group(group).num_rows != sum(lengths):
                raise errors.InvalidData(f"{where} is not what it was; files must not change while a job runs")
            parts = self._parts(file, group, lengths)
            for block, table in enumerate(parts, start):
                if first <= block < stop:
                    yield self._columns.arrays(table, where)

    def join(self, columns: _block_reader.Columns) -> dict[str, np.ndarray]:
        return dict(zip(self._columns.names, columns, strict=True))

    def _parts(self, file: Any, group: int, lengths: Sequence[int]) -> Iterator[Any]:
        """The row group as tables of these lengths, decoded as they are taken."""
        # Of the cores that this process has by OMP_NUM_THREADS, which Arrow heeds as NumPy does.
        options = {"columns": self._columns.names, "use_threads": self._pa.cpu_count() > 1}
        if len(lengths) == 1:
            yield file.read_row_group(group, **options)
            return
        batches = file.iter_batches(batch_size=max(lengths), row_groups=[group], **options)
        pieces: list[Any] = []  # record batches, read and not given
        for length in lengths:
            while sum(piece.num_rows for piece in pieces) < length:
                if (batch := next(batches, None)) is None:
                    return
                pieces.append(batch)
            table = self._pa.Table.from_batches(pieces)
            yield table.slice(0, length)
            pieces = table.slice(length).to_batches()

    def _footer(self, file: DataFile) -> _Footer:
        with self._blamed(file.name):
            if not file.size:
                raise errors.InvalidData(
                    f"{file.name} is empty, which no Parquet file is; write it again, or remove it"
                )
            with self._opened(file) as opened:
                groups = opened.metadata
                rows = [groups.row_group(group).num_rows for group in range(groups.num_row_groups)]
                return _Footer(opened.schema_arrow, rows)

    def _cut_blocks(self, footers: Sequence[_Footer], window: int) -> Blocks:
        rows = np.array([footers[number].rows[group] for number, group in self._groups], np.int64)
        parts = -(-rows // self._part_rows)
        group_ends = np.cumsum(rows)
        pieces = [np.zeros(1, np.int64)]
        for end, length, count in zip(group_ends.tolist(), rows.tolist(), parts.tolist(), strict=True):
            size = -(-length // count)
            pieces.append(np.minimum(end - length + size * np.arange(1, -(-length // size) + 1), end))
        runs = np.cumsum([len(piece) for piece in pieces]) - 1
        return Blocks(np.concatenate(pieces), window, runs)

    def _file(self, number: int) -> Any:
        file = self._open.pop(number, None)
        if file is None:
            while len(self._open) >= _MOST_OPEN:
                self._open.popitem(last=False)  # closed when nothing reads from it any more
            file = self._opened(self._files[number])
        self._open[number] = file
        return file

    def _opened(self, file: DataFile) -> Any:
        far = file.system is not None
        source = file.open() if far else file.path
        # Checksums are looked at where the writer has put some. Of far files, what is needed is fetched in few
        # requests.
        return self._pq.ParquetFile(source, pre_buffer=far, page_checksum_verification=True)

    def _blamed(self, where: str) -> AbstractContextManager[None]:
        return errors_naming(where, self._pa.ArrowException)


__all__ = ["Parquet"]
