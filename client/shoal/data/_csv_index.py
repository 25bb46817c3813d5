"""The index of a CSV file: the positions of its blocks, found in one pass over its bytes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from shoal import errors

# Bytes that are read at a time.
CHUNK_BYTES = 4 << 20
_NEWLINE, _RETURN = ord("\n"), ord("\r")


@dataclass(frozen=True, slots=True)
class Index:
    """The rows of one file, without its header.

    Attributes:
        header: bytes [start, stop) of the header. start == stop means no header.
        offsets: int64 [blocks + 1]. Block b has the bytes from offsets[b] up to, but not including, offsets[b + 1].
        rows: number of rows of each block, int64 [blocks], each > 0.
        has_long_rows: whether a quoted value contains a line feed.
    """

    header: tuple[int, int]
    offsets: np.ndarray
    rows: np.ndarray
    has_long_rows: bool


def index(file: BinaryIO, name: str, *, block_bytes: int, quote: str, has_header: bool) -> Index:
    """Reads a file and returns its index.

    A row ends with a line feed that is not within quotes; empty lines do not count as rows. A block has the rows that
    start within the same `block_bytes` bytes of the file.

    Args:
        file: the file, at its start.
        name: name of the file, for messages.
        block_bytes: approximate length of a block.
        quote: character around values that contain delimiters or line feeds. "" means none.
        has_header: whether the first row is a header.

    Returns:
        The index.

    Raises:
        InvalidData: a quote is not closed.
    """
    homes: list[int] = []
    starts: list[int] = []
    rows: list[int] = []
    header_start = -1
    scan = _Scan(file, name, quote)
    for begins in scan.row_starts():
        if has_header and header_start < 0 and len(begins):
            header_start, begins = int(begins[0]), begins[1:]  # noqa: PLW2901 - the header is no row
        found, firsts, counts = np.unique(begins // block_bytes, return_index=True, return_counts=True)
        for home, first, count in zip(found.tolist(), firsts.tolist(), counts.tolist(), strict=True):
            if homes and homes[-1] == home:
                rows[-1] += count
            else:
                homes.append(home)
                starts.append(int(begins[first]))
                rows.append(count)
    offsets = np.array([*starts, scan.size], np.int64)
    header = (header_start, int(offsets[0])) if header_start >= 0 else (0, 0)
    return Index(header, offsets, np.array(rows, np.int64), scan.has_long_rows)


class _Scan:
    """One pass over a file. `size` and `has_long_rows` are valid after the pass has ended."""

    def __init__(self, file: BinaryIO, name: str, quote: str) -> None:
        self._file, self._name = file, name
        self._quote = quote.encode()
        self._quoted = 0  # 1 if a quote is open
        self.size = 0  # bytes so far
        self.has_long_rows = False

    def row_starts(self) -> Iterator[np.ndarray]:
        """Yields the positions at which rows start, as int64 arrays."""
        start, last = 0, 0  # the start of the current line; the byte before the chunk
        while chunk := self._file.read(CHUNK_BYTES):
            data = np.frombuffer(chunk, np.uint8)
            ends = self._outside_quotes(chunk, data, np.flatnonzero(data == _NEWLINE))
            starts = np.append(start, self.size + ends + 1)
            lengths = self.size + ends - starts[:-1]
            before = data[ends - 1]
            before[ends == 0] = last
            empty = (lengths == 0) | ((lengths == 1) & (before == _RETURN))
            yield starts[:-1][~empty]
            start, last = int(starts[-1]), chunk[-1]
            self.size += len(chunk)
        if self._quoted:
            raise errors.InvalidData(
                f"{self._name}: a quote is not closed at the file's end; copy the file again if it is truncated, or "
                "give quote='' if quotes are part of values"
            )
        if start < self.size and not (self.size - start == 1 and last == _RETURN):  # the last line has no line feed
            yield np.array([start], np.int64)

    def _outside_quotes(self, chunk: bytes, data: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Returns the line feeds that end a row. A doubled quote within quotes does not change the result."""
        if not self._quote or (not self._quoted and self._quote not in chunk):
            return ends
        quotes = np.flatnonzero(data == self._quote[0])
        inside = (np.searchsorted(quotes, ends) + self._quoted) % 2 == 1
        self._quoted = (self._quoted + len(quotes)) % 2
        self.has_long_rows = self.has_long_rows or bool(inside.any())
        outside: np.ndarray = ends[~inside]
        return outside


__all__ = ["Index", "index"]
