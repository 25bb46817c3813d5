"""The data set of Parquet files. Its blocks are row groups, or parts of large row groups."""

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
# Footers that are read at the same time; for remote files, most of the time is waiting.
_FOOTERS_AT_ONCE = 8
# Files that are kept open: row groups come in random order, and opening a file reads its footer again.
_MOST_OPEN = 16
# Limits of what footers promise, because a few bytes can promise any number of rows. The coordinator leases no more.
_MOST_ROWS, _MOST_BLOCKS = 1 << 48, 1 << 22


@dataclass(frozen=True, slots=True)
class _Footer:
    schema: Any  # Arrow's
    rows: list[int]  # by row group


class Parquet(BlockReader):
    """The rows of Parquet files.

        dataset = Parquet("s3://bucket/train/part-*.parquet", columns=["x", "label"])

    A batch is a dict of arrays by column. Numbers, booleans, timestamps, dates and durations are arrays of NumPy types.
    A column of lists of fixed size is an array with one more dimension. A column of binary values of fixed size is a
    uint8 array with one more dimension. Texts and other binary values are arrays of Python objects, which stay on the
    host. Other types are refused.

    The files are read in the order of their names. The constructor reads their footers. A block is a row group, or a
    part of a row group that needs more than `block_bytes` in memory. The parts of a row group stay in order, because
    they are decoded together.

    Args:
        files: a path, a pattern, a folder or a URL that fsspec supports, or a list of these.
        columns: names of the columns to read, in this order. None means all columns.
        fill: value that replaces nulls, by column; in lists, it replaces null elements. Without it, nulls are an error.
        window: number of blocks whose samples are shuffled together; see `shoal.data.Blocks`. 0 keeps the rows of a
            block in order, and batches are read-only views of the decoded block. This is the fastest choice for rows
            that are already shuffled.
        block_bytes: approximate size of a block in memory, in bytes.
        prefetch: number of batches to read ahead, with one window of blocks. 0 means no prefetching.

    Raises:
        InvalidData: a file is missing, damaged or differs from the first, or a column is missing or not supported. A
            batch raises it if a file is damaged or has changed, or if a column has nulls.
        ImportError: pyarrow is not installed, or fsspec is not installed and a URL is given.
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
        # The file and the row group of each run of blocks.
        self._groups = [
            (number, group) for number, footer in enumerate(footers) for group, rows in enumerate(footer.rows) if rows
        ]
        if not self._groups:
            raise errors.InvalidData(f"{self._files[0].name} and all other files have no rows; give a file with rows")
        # The first sample of each file, and the number of all samples.
        self.file_starts = np.cumsum([0, *(sum(footer.rows) for footer in footers)])
        self._part_rows = max(1, block_bytes // self._columns.row_bytes())
        super().__init__(self._cut_blocks(footers, window), prefetch=prefetch)
        self._open: OrderedDict[int, Any] = OrderedDict()  # open files by number, least recently used first

    def read_blocks(self, first: int, stop: int) -> Iterator[_block_reader.ColumnArrays]:
        run = int(np.searchsorted(self.blocks.runs, first, side="right")) - 1
        start, end = (int(block) for block in self.blocks.runs[run : run + 2])
        number, group = self._groups[run]
        where = f"{self._files[number].name}, row group {group}"
        lengths = np.diff(self.blocks.starts[start : end + 1]).tolist()
        with self._blamed(where):
            file = self._file(number)
            if group >= file.num_row_groups or file.metadata.row_group(group).num_rows != sum(lengths):
                raise errors.InvalidData(f"{where} has changed; files must not change while a job runs")
            parts = self._parts(file, group, lengths)
            for block, table in enumerate(parts, start):
                if first <= block < stop:
                    yield self._columns.arrays(table, where)

    def concatenate(self, columns: _block_reader.ColumnArrays) -> dict[str, np.ndarray]:
        return dict(zip(self._columns.names, columns, strict=True))

    def _parts(self, file: Any, group: int, lengths: Sequence[int]) -> Iterator[Any]:
        """Yields the row group as tables of these lengths, and decodes them one by one."""
        # Arrow takes its number of threads from OMP_NUM_THREADS, as NumPy does.
        options = {"columns": self._columns.names, "use_threads": self._pa.cpu_count() > 1}
        if len(lengths) == 1:
            yield file.read_row_group(group, **options)
            return
        batches = file.iter_batches(batch_size=max(lengths), row_groups=[group], **options)
        pieces: list[Any] = []  # record batches that are read and not yielded yet
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
                    f"{file.name} is empty and so not a Parquet file; write it again, or remove it"
                )
            with self._opened(file) as opened:
                groups = opened.metadata
                rows = [groups.row_group(group).num_rows for group in range(groups.num_row_groups)]
                return _Footer(opened.schema_arrow, rows)

    def _cut_blocks(self, footers: Sequence[_Footer], window: int) -> Blocks:
        promised = [footers[number].rows[group] for number, group in self._groups]
        blocks = sum(-(-rows // self._part_rows) for rows in promised)
        if min(promised) < 0 or sum(promised) > _MOST_ROWS or blocks > _MOST_BLOCKS:
            raise errors.InvalidData(
                f"{self._files[0].name} and the other files promise {sum(promised):,} rows in {blocks:,} blocks, but a "
                f"data set has at most {_MOST_ROWS:,} rows and {_MOST_BLOCKS:,} blocks; give larger block_bytes, or "
                "compare the files with their source if they are smaller"
            )
        rows = np.array(promised, np.int64)
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
                self._open.popitem(last=False)  # closes when its last reader is done
            file = self._opened(self._files[number])
        self._open[number] = file
        return file

    def _opened(self, file: DataFile) -> Any:
        far = file.system is not None
        source = file.open() if far else file.path
        # Arrow verifies checksums if the file has them. pre_buffer reads remote files in few requests.
        return self._pq.ParquetFile(source, pre_buffer=far, page_checksum_verification=True)

    def _blamed(self, where: str) -> AbstractContextManager[None]:
        return errors_naming(where, self._pa.ArrowException, UnicodeDecodeError)


__all__ = ["Parquet"]
