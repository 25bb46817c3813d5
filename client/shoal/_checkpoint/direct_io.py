"""Files that are written past the page cache: what is in them goes to the disk and nowhere else.

A copy of a checkpoint in the kernel's memory costs more than the checkpoint: pages have to be found for it while
training goes on, and what others read again and again has to leave them. So blocks of memory that begin where a page
does are filled by turns, and the disk takes one while the next is filled (Wang et al., "FastPersist: Accelerating Model
Checkpointing in Deep Learning", 2024).
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

# Written at a time. A file of less is no matter, and takes the usual way.
BLOCK_BYTES = 4 << 20
# What file systems and disks ask of places, lengths and memory is this, or a part of it.
_ALIGNMENT = mmap.PAGESIZE


def write_file(descriptor: int, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
    """Writes a new file, which is not synced yet.

    Where the file system knows no direct writes (a tmpfs, some network file systems), they are usual ones.

    Args:
        descriptor: of the file, empty and open for writing.
        pieces: of any size.

    Raises:
        OSError: as of `write`.
    """
    room = np.frombuffer(mmap.mmap(-1, 2 * BLOCK_BYTES), np.uint8)
    block, other = room[:BLOCK_BYTES], room[BLOCK_BYTES:]
    start = filled = 0  # where in the file the block begins, and what is in it
    under_way: Future[None] | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="disk") as disk:
        for piece in pieces:
            rest = np.frombuffer(piece, np.uint8)
            while rest.size:
                part, rest = rest[: BLOCK_BYTES - filled], rest[BLOCK_BYTES - filled :]
                block[filled : filled + part.size] = part
                filled += part.size
                if filled == BLOCK_BYTES:
                    if under_way:
                        under_way.result()
                    else:
                        _set_direct(descriptor, wanted=True)
                    under_way = disk.submit(_write_at, descriptor, start, block)
                    block, other = other, block
                    start, filled = start + BLOCK_BYTES, 0
        if under_way:
            under_way.result()
    if under_way is None:
        _write_at(descriptor, 0, block[:filled])
    elif filled:
        padded = -(-filled // _ALIGNMENT) * _ALIGNMENT
        block[filled:padded] = 0
        _write_at(descriptor, start, block[:padded])
        os.ftruncate(descriptor, start + filled)


def _write_at(descriptor: int, start: int, data: np.ndarray) -> None:
    while data.size:
        try:
            count = os.pwrite(descriptor, data.data, start)
        except OSError as error:
            if error.errno != errno.EINVAL or not _set_direct(descriptor, wanted=False):
                raise
            continue  # it took the flag and not the write
        start, data = start + count, data[count:]


def _set_direct(descriptor: int, *, wanted: bool) -> bool:
    """Asks for direct writes, or for usual ones; whether that made a difference."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    new = flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, new)
    except OSError as error:
        if error.errno != errno.EINVAL:  # which is how a file system says that it knows none
            raise
        return False
    return new != flags


__all__ = ["BLOCK_BYTES", "write_file"]
