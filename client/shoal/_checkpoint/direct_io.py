"""Direct file writes, which bypass the kernel's page cache.

A copy of a checkpoint in the page cache is expensive: the kernel must find memory for it during training, and evicts
pages that other processes use. So this module uses two page-aligned blocks of memory in turn: it fills one while the
other is written to disk. The method is from Wang et al., "FastPersist: Accelerating Model Checkpointing in Deep
Learning", 2024.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

# Bytes written at a time. A smaller file is written without direct I/O.
BLOCK_BYTES = 4 << 20
# File systems and disks require this alignment of offsets, lengths and memory, or a divisor of it.
_ALIGNMENT = mmap.PAGESIZE


def write_file(descriptor: int, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
    """Writes a new file without syncing it.

    If the file system has no direct writes, as tmpfs and some network file systems, the writes are buffered.

    Args:
        descriptor: descriptor of an empty file that is open for writing.
        pieces: the contents, in pieces of any size.

    Raises:
        OSError: a write failed.
    """
    room = np.frombuffer(mmap.mmap(-1, 2 * BLOCK_BYTES), np.uint8)
    block, other = room[:BLOCK_BYTES], room[BLOCK_BYTES:]
    start = filled = 0  # the block's offset in the file, and the bytes in it
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
            continue  # the file system accepted the flag but not the write
        start, data = start + count, data[count:]


def _set_direct(descriptor: int, *, wanted: bool) -> bool:
    """Switches direct writes on or off. Returns whether that changed the flags."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    new = flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, new)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: the file system has no direct writes
            raise
        return False
    return new != flags


__all__ = ["BLOCK_BYTES", "write_file"]
