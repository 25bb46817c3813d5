"""A file of tensors on its way out and in: checksums block by block, and nothing in memory twice."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import xxhash

from shoal import errors
from shoal._checkpoint.manifest import BLOCK_BYTES, FileEntry, sum_of, sums_of
from shoal._checkpoint.storage import Buffer, CheckpointStorage, StorageFile
from shoal._checkpoint.tensors import LENGTH_BYTES, Contents, decode_header, encode_header, header_bytes

Named = tuple[str, np.dtype, tuple[int, ...]]
# A place in a file, and the memory that takes what is there.
Piece = tuple[int, memoryview]


class _Sums:
    """The checksums of what passes by."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._done: list[str] = []
        self._block = xxhash.xxh3_64()
        self._room = BLOCK_BYTES

    def of(self, pieces: Iterable[Buffer]) -> Iterator[Buffer]:
        """The same pieces, cut where blocks end."""
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
    tensors: Iterable[Named],
    data: Iterable[Buffer],
    metadata: Mapping[str, str] | None = None,
) -> FileEntry:
    """Writes a file of tensors.

    Args:
        folder: where.
        path: of the file.
        tensors: name, dtype and shape of each.
        data: their bytes, in that order; in pieces of any size.
        metadata: texts for people.

    Raises:
        StorageFailed: it could not be written. Nothing is there.
    """
    sums = _Sums()

    def pieces() -> Iterator[Buffer]:
        yield encode_header(tensors, metadata)
        yield from data

    folder.write(path, sums.of(pieces()))
    return FileEntry(path[-1], sums.nbytes, sums.finish())


class TensorReader:
    """A file of tensors that is open; what it gives has been compared with the checksums.

    Args:
        file: the open file.
        entry: of the manifest.
        where: the file's name, for messages.

    Raises:
        CorruptCheckpoint: its size or its header is not what was written.

    Attributes:
        contents: what it holds.
    """

    def __init__(self, file: StorageFile, entry: FileEntry, where: str) -> None:
        self._file, self._entry, self._where = file, entry, where
        self._kept: tuple[int, memoryview] = (-1, memoryview(b""))  # the last block of which a part was wanted
        if file.nbytes != entry.nbytes or len(entry.sums) != sums_of(entry.nbytes):
            raise errors.CorruptCheckpoint(
                f"{where} has {file.nbytes} bytes; {entry.nbytes} were written, in {sums_of(entry.nbytes)} blocks",
                file=where,
            )
        beginning = self._bytes(0, min(LENGTH_BYTES, entry.nbytes))
        size = header_bytes(beginning, entry.nbytes, where)
        self.contents: Contents = decode_header(self._bytes(0, size), entry.nbytes, where)

    def place(self, name: str, target: np.ndarray, first: int = 0) -> Piece:
        """Where in the file elements of a tensor are, and the memory that they belong to: for `fill`.

        Args:
            name: of the tensor; KeyError if there is none.
            target: flat and contiguous, of the tensor's dtype.
            first: the tensor's element with which it begins.
        """
        tensor = self.contents.tensors[name]
        start = tensor.start + first * tensor.dtype.itemsize
        if target.dtype != tensor.dtype or not tensor.start <= start <= start + target.nbytes <= tensor.stop:
            raise ValueError(f"{target.size} of {target.dtype} from {first} on are not in {name!r}, {tensor}")
        return start, target.view(np.uint8).data

    def fill(self, pieces: Iterable[Piece]) -> None:
        """Fills pieces of memory, none of which wants what another does, each from its place in the file on.

        A block that is wanted as a whole is read where it belongs, in however many pieces. The more are asked for at
        once, the more are.
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
        """Reads everything; CorruptCheckpoint if any of it is not what was written."""
        window = BLOCK_BYTES * self._file.at_a_time
        scratch = memoryview(bytearray(min(window, self._entry.nbytes)))
        for start in range(0, self._entry.nbytes, window):
            self.fill([(start, scratch[: self._entry.nbytes - start])])

    def _bytes(self, start: int, size: int) -> bytes:
        target = bytearray(size)
        self.fill([(start, memoryview(target))])
        return bytes(target)

    def _fill_from(self, number: int, parts: Sequence[Piece]) -> None:
        """Fills what wants bytes of a block, each from its place in the block on."""
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
                f"{self._where} is damaged: bytes {start} to {start + self._block_bytes(number)} are not those that "
                "were written",
                file=self._where,
            )


def _by_block(pieces: Iterable[Piece]) -> dict[int, list[Piece]]:
    """By number of the block, what wants bytes of it: place within it, and memory, in their order there."""
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
    """Opens a file of tensors.

    Raises:
        CorruptCheckpoint: it is missing, or not what was written.
    """
    where = "/".join((folder.url, *path))
    try:
        opened = folder.open(path)
        with opened as file:
            yield TensorReader(file, entry, where)
    except errors.UnknownCheckpoint:
        raise errors.CorruptCheckpoint(f"{where} is missing", file=where) from None


__all__ = ["Named", "Piece", "TensorReader", "open_tensors", "write_tensors"]
