"""The data set of CSV files, which an index divides into blocks."""

import csv as standard_csv
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from shoal import errors
from shoal._system import load
from shoal.data import _block_reader
from shoal.data._block_reader import BlockReader, check_number
from shoal.data._columns import Columns, chosen
from shoal.data._csv_index import Index, index
from shoal.data._files import DataFile, Where, errors_naming, find
from shoal.program import DEFAULT_PREFETCH, Blocks

_SUFFIXES = (".csv", ".tsv")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")
_INDEXED_AT_ONCE = 4
# Arrow counts the bytes of its input in 32 bits.
_MOST_BLOCK_BYTES = 1 << 30


class Csv(BlockReader):
    """The rows of CSV files.

        dataset = Csv("train-*.csv", columns=["height", "label"], types={"height": "float32"})

    A batch is a dict of arrays by column, as for `Parquet`.

    The positions of rows are not known until a file is read. Every worker therefore reads all files once when it
    creates the data set: 1 to 3 s per GB on a local disk, with 4 MiB of memory per file. Parquet does not need this and
    is read many times faster, so convert files that you use more than once.

    Args:
        files: a path, a pattern, a folder or a URL that fsspec supports, or a list of these. The files are read in the
            order of their names. They must be UTF-8 and not compressed.
        columns: names of the columns to read, in this order. None means all columns.
        types: name of the Arrow type of a column, such as "float32", "int8" or "string". Other types are inferred from
            the first block and must fit all rows.
        names: names of all columns, for files without a header. None means that the first row is a header.
        delimiter: one character.
        quote: character around values that contain delimiters or line feeds. A quote within a value is doubled. ""
            means no quotes.
        fill: value that replaces empty values, by column. Without it, empty values are an error, except in texts.
        window: number of blocks whose samples are shuffled together; see `shoal.data.Blocks`.
        block_bytes: approximate size of a block in its file, in bytes; at most 1 GiB.
        prefetch: number of batches to read ahead, with one window of blocks. 0 means no prefetching.

    Raises:
        InvalidData: a file is missing, empty, compressed or has other columns than the first, or an argument is
            invalid. Reading a batch raises it if a row has too few or too many values, or a value has another type or
            is missing.
        ImportError: pyarrow is not installed, or fsspec is not installed and a URL is given.
    """

    def __init__(
        self,
        files: Where,
        columns: Sequence[str] | None = None,
        *,
        types: Mapping[str, str] | None = None,
        names: Sequence[str] | None = None,
        delimiter: str = ",",
        quote: str = '"',
        fill: Mapping[str, Any] | None = None,
        window: int = 1,
        block_bytes: int = 4 << 20,
        prefetch: int = DEFAULT_PREFETCH,
    ) -> None:
        self._pa, self._csv = load("pyarrow", "shoal.data.Csv"), load("pyarrow.csv", "shoal.data.Csv")
        _check_text(delimiter, quote)
        check_number("block_bytes", block_bytes, least=1)
        block_bytes = min(block_bytes, _MOST_BLOCK_BYTES)
        self._delimiter, self._quote, self._block_bytes = delimiter, quote, block_bytes
        self._files = find(files, _SUFFIXES, "shoal.data.Csv")
        self._names = None if names is None else list(names)  # names of all columns; read from the header if None
        with ThreadPoolExecutor(_INDEXED_AT_ONCE) as pool:
            self._indices = list(pool.map(self._index, self._files))
        self._names = self._same_header()
        # The file of each block, and the block's number within the file.
        self._places = [
            (number, block) for number, found in enumerate(self._indices) for block in range(len(found.rows))
        ]
        if not self._places:
            raise errors.InvalidData(f"{self._files[0].name} and all other files have no rows; give a file with rows")
        # The first sample of each file, and the number of all samples.
        self.file_starts = np.cumsum([0, *(int(np.sum(found.rows)) for found in self._indices)])
        starts = np.append(0, np.cumsum(np.concatenate([found.rows for found in self._indices])))
        super().__init__(Blocks(starts, window), prefetch=prefetch)
        self._types = {name: self._type(name, alias) for name, alias in (types or {}).items()}
        wanted = chosen(self._names, columns, self._files[0].name)
        first = self._table(0, wanted)  # infers the types
        self._columns = Columns(first.schema, wanted, fill, self._files[0].name)
        self._types = {name: self._columns.schema.field(name).type for name in wanted}

    def read_blocks(self, first: int, stop: int) -> Iterator[_block_reader.ColumnArrays]:
        for block in range(first, stop):
            yield self._columns.arrays(self._table(block, self._columns.names), self._where(block))

    def concatenate(self, columns: _block_reader.ColumnArrays) -> dict[str, np.ndarray]:
        return dict(zip(self._columns.names, columns, strict=True))

    def _table(self, block: int, wanted: Sequence[str]) -> Any:
        """Returns the block's rows as an Arrow table."""
        number, place = self._places[block]
        file, found = self._files[number], self._indices[number]
        start, stop = (int(offset) for offset in found.offsets[place : place + 2])
        with errors_naming(file.name), file.open() as opened:
            opened.seek(start)
            data = opened.read(stop - start)
        spoilt: list[Any] = []

        def refuse(row: Any) -> str:
            spoilt.append(row)
            return "error"

        known = {name: kind for name, kind in self._types.items() if name in wanted}
        try:
            return self._csv.read_csv(
                self._pa.BufferReader(data),
                # With one thread Arrow counts rows, and with one block each column has one chunk.
                self._csv.ReadOptions(column_names=self._names, use_threads=False, block_size=len(data) + 1),
                self._csv.ParseOptions(
                    delimiter=self._delimiter,
                    quote_char=self._quote or False,
                    newlines_in_values=found.has_long_rows,
                    invalid_row_handler=refuse,
                ),
                self._csv.ConvertOptions(column_types=known, include_columns=list(wanted)),
            )
        except self._pa.ArrowException as error:
            reason = self._spoilt_row(block, spoilt[0]) if spoilt else f"{self._where(block)}: {_value_problem(error)}"
            raise errors.InvalidData(reason) from None

    def _spoilt_row(self, block: int, row: Any) -> str:
        name, first, _ = self._rows_of(block)
        which = "a row" if row.number is None else f"row {first + row.number - 1}"
        values = "value" if row.actual_columns == 1 else "values"
        return (
            f"{name}: {which} has {row.actual_columns} {values} instead of {row.expected_columns}: "
            f"{row.text[:80]!r}; correct it, or check delimiter and quote"
        )

    def _where(self, block: int) -> str:
        return "{}, rows {} to {}".format(*self._rows_of(block))

    def _rows_of(self, block: int) -> tuple[str, int, int]:
        """Returns the block's file, and its first and last row there, counted from 1 without the header."""
        number, place = self._places[block]
        rows = self._indices[number].rows
        before = int(rows[:place].sum())
        return self._files[number].name, before + 1, before + int(rows[place])

    def _index(self, file: DataFile) -> Index:
        if file.name.endswith(_COMPRESSED):
            raise errors.InvalidData(
                f"{file.name} is compressed, so workers cannot read from its middle; unpack it first"
            )
        if not file.size:
            raise errors.InvalidData(f"{file.name} is empty; write it again, or remove it")
        with errors_naming(file.name), file.open() as opened:
            return index(
                opened, file.name, block_bytes=self._block_bytes, quote=self._quote, has_header=self._names is None
            )

    def _same_header(self) -> list[str]:
        """Returns the names of all columns. Raises InvalidData if the files differ."""
        if self._names is not None:
            return self._names
        headers = [self._header(file, found) for file, found in zip(self._files, self._indices, strict=True)]
        for file, header in zip(self._files, headers, strict=True):
            if header != headers[0]:
                raise errors.InvalidData(
                    f"{file.name} has the columns {', '.join(header)}, but {self._files[0].name} has "
                    f"{', '.join(headers[0])}; write the files alike, or give names=[...] if they have no header"
                )
        return headers[0]

    def _header(self, file: DataFile, found: Index) -> list[str]:
        start, stop = found.header
        with errors_naming(file.name, UnicodeDecodeError, standard_csv.Error), file.open() as opened:
            opened.seek(start)
            lines = opened.read(stop - start).decode("utf-8-sig").splitlines(keepends=True)
            if self._quote:
                rows = standard_csv.reader(lines, delimiter=self._delimiter, quotechar=self._quote)
            else:
                rows = standard_csv.reader(lines, delimiter=self._delimiter, quoting=standard_csv.QUOTE_NONE)
            for row in rows:
                return row
        raise errors.InvalidData(
            f"{file.name} has a header without names; write the names of the columns into its first row, or give "
            "names=[...] if it has no header"
        )

    def _type(self, name: str, alias: Any) -> Any:
        if name not in (self._names or ()):
            raise errors.InvalidData(f"types has a type for {name!r}, which is not one of the columns {self._names}")
        try:
            return self._pa.type_for_alias(alias) if isinstance(alias, str) else self._pa.field(name, alias).type
        except (ValueError, TypeError):
            raise errors.InvalidData(
                f"types: {alias!r} of column {name!r} is not an Arrow type; give a name such as 'float32' or 'string'"
            ) from None


def _value_problem(error: Exception) -> str:
    reason = " ".join(str(error).split())
    if "conversion error" not in reason:
        return f"{reason}; correct the file, or check delimiter and quote"
    return (
        f"{reason}; correct the value, or give the column's type: types={{'column': 'float64'}}; other types are "
        "inferred from the first rows"
    )


def _check_text(delimiter: object, quote: object) -> None:
    for name, value, lengths in (("delimiter", delimiter, (1,)), ("quote", quote, (0, 1))):
        if not isinstance(value, str) or len(value.encode()) not in lengths:
            raise errors.InvalidData(f"{name} is {value!r}; give one ASCII character")


__all__ = ["Csv"]
