"""Reader and writer of tensor files, with a checksum for each block, and without copies in memory."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import xxhash

from shoal import errors
from shoal._checkpoint.manifest import BLOCK_BYTES, FileEntry, sum_of, sums_of
from shoal._checkpoint.storage import CheckpointStorage, StorageFile
from shoal._checkpoint.tensors import LENGTH_BYTES, Contents, decode_header, encode_header, entry_of, header_bytes
from shoal._wire import Buffer

TensorHeader = tuple[str, np.dtype, tuple[int, ...]]
# An offset in a file, and the memory for the bytes from there.
Piece = tuple[int, memoryview]


class _BlockChecksums:
    """Computes the checksums of the blocks of a file while it is written."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._done: list[str] = []
        self._block = xxhash.xxh3_64()
        self._room = BLOCK_BYTES

    def of(self, pieces: Iterable[Buffer]) -> Iterator[Buffer]:
        """Yields the same bytes, in pieces that end at block boundaries."""
        for piece in pieces:
            rest = memoryview(piece).cast("B")
            while len(rest):
                part, rest = rest[: self._room], rest[self._room :]
                self._block.update(part)
                self._room -= len(part)
                self.nbytes += len(part)
                if not self._room:
                    self._end_block()
                yield part

    def finish(self) -> tuple[str, ...]:
        if self._room < BLOCK_BYTES:
            self._end_block()
        return tuple(self._done)

    def _end_block(self) -> None:
        self._done.append(self._block.hexdigest())
        self._block = xxhash.xxh3_64()
        self._room = BLOCK_BYTES


def write_tensors(
    folder: CheckpointStorage,
    path: Sequence[str],
    tensors: Iterable[TensorHeader],
    data: Iterable[Buffer],
    metadata: Mapping[str, str] | None = None,
) -> FileEntry:
    """Writes a tensor file.

    Args:
        folder: the checkpoint storage.
        path: path of the file.
        tensors: name, dtype and shape of each tensor.
        data: the bytes of the tensors in that order, in pieces of any size.
        metadata: texts by name, for people.

    Returns:
        The file's entry for the manifest.

    Raises:
        StorageFailed: the file could not be written. No part of it remains.
    """
    sums, tensors = _BlockChecksums(), list(tensors)

    def pieces() -> Iterator[Buffer]:
        yield encode_header(tensors, metadata)
        yield from data

    folder.write(path, sums.of(pieces()))
    entries = tuple(entry_of(*tensor) for tensor in tensors)
    return FileEntry(path[-1], sums.nbytes, sums.finish(), entries)


class TensorReader:
    """An open tensor file. All bytes that it returns have been compared with their checksums.

    Args:
        file: the open file.
        entry: the file's entry in the manifest.
        where: the file's name, for messages.

    Raises:
        CorruptCheckpoint: the size or the header is damaged.

    Attributes:
        contents: the tensors in the file.
    """

    def __init__(self, file: StorageFile, entry: FileEntry, where: str) -> None:
        self._file, self._entry, self._where = file, entry, where
        self._kept: tuple[int, memoryview] = (-1, memoryview(b""))  # the last block that was read in part
        if file.nbytes != entry.nbytes or len(entry.sums) != sums_of(entry.nbytes):
            raise errors.CorruptCheckpoint(
                f"{where} has {file.nbytes} bytes and {len(entry.sums)} checksums, instead of {entry.nbytes} bytes and "
                f"{sums_of(entry.nbytes)} checksums",
                file=where,
            )
        beginning = self._bytes(0, min(LENGTH_BYTES, entry.nbytes))
        size = header_bytes(beginning, entry.nbytes, where)
        self.contents: Contents = decode_header(self._bytes(0, size), entry.nbytes, where)

    def place(self, name: str, target: np.ndarray, first: int = 0) -> Piece:
        """Returns a piece for `fill`: the offset of a tensor's elements in the file, and the memory to fill with them.

        Args:
            name: name of the tensor.
            target: the memory to fill: flat, contiguous, of the tensor's dtype.
            first: the first element of the tensor to read.

        Raises:
            KeyError: there is no such tensor.
            ValueError: the tensor does not have these elements, or has another dtype.
        """
        tensor = self.contents.tensors[name]
        start = tensor.start + first * tensor.dtype.itemsize
        if target.dtype != tensor.dtype or not tensor.start <= start <= start + target.nbytes <= tensor.stop:
            raise ValueError(
                f"{name!r} ({tensor}) does not have {target.size} elements of {target.dtype} from element {first} on"
            )
        return start, target.view(np.uint8).data

    def fill(self, pieces: Iterable[Piece]) -> None:
        """Fills pieces of memory from their offsets in the file. The pieces must not overlap.

        A block that the pieces cover completely is read directly into them. Calls with more pieces cover more blocks.

        Raises:
            CorruptCheckpoint: a block is damaged.
        """
        blocks = _by_block(pieces)
        threads = min(self._file.at_a_time, len(blocks))
        if threads < 2:
            for number, parts in blocks.items():
                self._fill_from(number, parts)
            return
        with ThreadPoolExecutor(threads, thread_name_prefix="blocks") as pool:
            filled = [pool.submit(self._fill_from, number, parts) for number, parts in blocks.items()]
            try:
                for block in filled:
                    block.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def verify(self) -> None:
        """Reads the whole file.

        Raises:
            CorruptCheckpoint: a block is damaged.
        """
        window = BLOCK_BYTES * self._file.at_a_time
        scratch = memoryview(bytearray(min(window, self._entry.nbytes)))
        for start in range(0, self._entry.nbytes, window):
            self.fill([(start, scratch[: self._entry.nbytes - start])])

    def _bytes(self, start: int, size: int) -> bytes:
        target = bytearray(size)
        self.fill([(start, memoryview(target))])
        return bytes(target)

    def _fill_from(self, number: int, parts: Sequence[Piece]) -> None:
        """Fills pieces of memory from their offsets in one block."""
        targets = [target for _, target in parts]
        if sum(map(len, targets)) == self._block_bytes(number):
            self._read(number, targets)
            return
        block = self._block(number)
        for within, target in parts:
            target[:] = block[within : within + len(target)]

    def _block(self, number: int) -> memoryview:
        kept, block = self._kept
        if kept != number:
            block = np.empty(self._block_bytes(number), np.uint8).data
            self._read(number, [block])
            self._kept = number, block
        return block

    def _block_bytes(self, number: int) -> int:
        return min(BLOCK_BYTES, self._entry.nbytes - number * BLOCK_BYTES)

    def _read(self, number: int, targets: Sequence[memoryview]) -> None:
        start = number * BLOCK_BYTES
        self._file.read_into(start, targets)
        if sum_of(*targets) != self._entry.sums[number]:
            raise errors.CorruptCheckpoint(
                f"{self._where} is damaged: bytes {start} to {start + self._block_bytes(number)} do not match their "
                "checksum",
                file=self._where,
            )


def _by_block(pieces: Iterable[Piece]) -> dict[int, list[Piece]]:
    """Returns the pieces of each block: the offset within the block and the memory, in ascending order."""
    blocks: dict[int, list[Piece]] = {}
    for place, whole in sorted(pieces, key=lambda piece: piece[0]):
        start, rest = place, whole
        while len(rest):
            number, within = divmod(start, BLOCK_BYTES)
            part, rest = rest[: BLOCK_BYTES - within], rest[BLOCK_BYTES - within :]
            blocks.setdefault(number, []).append((within, part))
            start += len(part)
    return blocks


@contextmanager
def open_tensors(folder: CheckpointStorage, path: Sequence[str], entry: FileEntry) -> Iterator[TensorReader]:
    """Opens a tensor file.

    Args:
        folder: the checkpoint storage.
        path: path of the file.
        entry: the file's entry in the manifest.

    Raises:
        CorruptCheckpoint: the file is missing or damaged.
    """
    where = "/".join((folder.url, *path))
    try:
        opened = folder.open(path)
        with opened as file:
            yield TensorReader(file, entry, where)
    except errors.UnknownCheckpoint:
        raise errors.CorruptCheckpoint(f"{where} is missing", file=where) from None


__all__ = ["Piece", "TensorHeader", "TensorReader", "open_tensors", "write_tensors"]
