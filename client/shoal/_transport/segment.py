"""Segments: memory that two processes of one host share, as files in /dev/shm or the folder in SHOAL_SHARED_MEMORY.

One process creates and owns a segment, and another one opens it. Either may divide it into regions. Other modules
define its content.
"""

import errno
import fcntl
import hmac
import mmap
import os
import re
import secrets
import stat
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from shoal._memory.borrowed_arrays import lend

# Environment variable for the folder of segments, a tmpfs.
FOLDER_VARIABLE = "SHOAL_SHARED_MEMORY"
SHM = Path(os.environ.get(FOLDER_VARIABLE) or "/dev/shm")  # noqa: S108 - shared memory, not temporary files
# The header has a memory page of its own, so that the data begin at a page boundary.
HEADER_BYTES = 4096
NONCE_BYTES = 16

_MAGIC = b"SHOALSEG"
_VERSION = 1
_HEADER = struct.Struct(f"<8sI{NONCE_BYTES}sQ")  # magic, version, nonce, nbytes
_NAME = re.compile(r"shoal-[0-9a-f]{32}")
# Links under such a name are not followed, and pipes or leased files do not block the process.
_EXISTING = os.O_NOFOLLOW | os.O_NONBLOCK
_MOST_OF_FREE = 0.9  # largest share of the free space for one segment: others need shared memory too
_MOST_OF_MEMORY = 0.5
_MORE_SPACE = (
    f"give the machine or container a larger /dev/shm (docker: --shm-size), or set {FOLDER_VARIABLE} to another tmpfs"
)
_ADVICE = {
    errno.ENOENT: "mount a tmpfs there, the same one for both processes",
    errno.ENOSPC: _MORE_SPACE,
    errno.ENOMEM: "give the process more memory, or address space (ulimit -v)",
    errno.EOPNOTSUPP: "use a tmpfs",
    errno.EACCES: "run both processes as the same user",
}


class SegmentUnavailable(Exception):
    """Shared memory, or the named segment, is not available. The message says why, and what to do."""


class SegmentLost(SegmentUnavailable):
    """A segment's file was truncated. An access to the lost part would kill the process, so it must not be used."""


class Segment:
    """A file in shared memory that two processes map; a context manager that closes it.

    The owner holds a lock on the file while it has it mapped. `remove_stale` uses the lock to see that the owner is
    alive. A process that is forked from the owner without exec shares the lock. The other end holds no lock, so it does
    not keep the file of a dead owner.

    `create` and `open` make segments. Any thread may use a segment, or close it while others use it.

    Attributes:
        name: name of the file, which the owner sends to the other end.
        nbytes: usable bytes.
        nonce: random bytes in the file's header, which the owner also sends. They prove that both ends see the same
            memory.
    """

    def __init__(self, memory: mmap.mmap, directory: Path, name: str, nonce: bytes, *, owner: bool) -> None:
        self.name, self.nonce = name, nonce
        self.nbytes = len(memory) - HEADER_BYTES
        self._path, self._owner = directory / name, owner
        # Never closed explicitly: with its last view, the mapping unmaps itself and closes its only descriptor.
        self._memory: mmap.mmap | None = memory

    @classmethod
    def create(cls, nbytes: int, *, directory: Path = SHM) -> Self:
        """Creates a segment, filled with zeros and fully allocated.

        Args:
            nbytes: usable bytes, at least 1.
            directory: folder of the segment, a tmpfs.

        Returns:
            The segment.

        Raises:
            SegmentUnavailable: there is no tmpfs, or too little space; no file remains.
        """
        if nbytes < 1:
            raise ValueError(f"a segment has at least one byte, not {nbytes}")
        size = HEADER_BYTES + nbytes
        name, nonce = f"shoal-{secrets.token_hex(16)}", secrets.token_bytes(NONCE_BYTES)
        try:
            with _opened(directory, os.O_RDONLY | os.O_DIRECTORY) as folder:
                _check_space(folder, size, directory)
                # The file gets its name when it is locked and complete. A death before that leaves nothing behind.
                with _opened(".", os.O_TMPFILE | os.O_RDWR, folder) as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.fchmod(file, 0o600)  # regardless of the umask
                    # Writing to unallocated memory could cause SIGBUS. Here, the lack of memory is an error.
                    os.posix_fallocate(file, 0, size)
                    os.pwrite(file, _HEADER.pack(_MAGIC, _VERSION, nonce, nbytes), 0)
                    memory = mmap.mmap(file, size)  # duplicates the descriptor, and so keeps the lock
                    # Only linkat follows the link in /proc to the file, and Python calls it only with dst_dir_fd.
                    os.link(f"/proc/self/fd/{file}", name, dst_dir_fd=folder, follow_symlinks=True)
        except OSError as error:
            raise _unavailable(f"no segment of {nbytes:,} bytes in {directory}", error) from error
        return cls(memory, directory, name, nonce, owner=True)

    @classmethod
    def open(cls, name: str, nbytes: int, nonce: bytes, *, directory: Path = SHM) -> Self:
        """Maps a segment that another process has created.

        Args:
            name: name of the segment, which the other process sent; it is checked against the file, as the next two.
            nbytes: its size in bytes.
            nonce: its nonce.
            directory: folder of the segment.

        Returns:
            The segment.

        Raises:
            SegmentUnavailable: the file is missing, belongs to another user, or does not match these values.
        """
        if not _NAME.fullmatch(name):
            raise SegmentUnavailable(f"{name[:50]!r} is not a segment's name")
        path = directory / name
        try:
            with _opened(path, os.O_RDWR | _EXISTING) as file:
                complaint = _complaint(file, nbytes, nonce)
                if complaint:
                    raise SegmentUnavailable(f"{path} {complaint}")
                memory = mmap.mmap(file, HEADER_BYTES + nbytes)
        except OSError as error:
            raise _unavailable(f"no segment {path}", error) from error
        except ValueError as error:  # from mmap, if the file has just been truncated
            raise SegmentLost(f"{path} was truncated: {error}") from error
        return cls(memory, directory, name, nonce, owner=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Returns a part of the segment as writable unsigned bytes. The view stays valid after `close`.

        Args:
            offset: start of the part, in usable bytes.
            nbytes: size of the part.

        Returns:
            The part.

        Raises:
            ValueError: the part exceeds the segment.
            SegmentLost: the file was truncated.
            SegmentUnavailable: the segment is closed.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(
                f"segment {self.name} has {self.nbytes:,} bytes, too few for {nbytes:,} from {offset:,} on"
            )
        start = HEADER_BYTES + offset
        return memoryview(self._mapped())[start : start + nbytes]

    def check(self) -> None:
        """Checks that the file still has its full size. Call it before each access.

        Raises:
            SegmentLost: the file was truncated.
            SegmentUnavailable: the segment is closed.
        """
        self._mapped()

    def unlink(self) -> None:
        """Removes the name, if it still exists. The memory stays until both ends have released it."""
        with suppress(FileNotFoundError):
            self._path.unlink()

    def close(self) -> None:
        """Releases the memory, which is unmapped with its last view. The owner also removes the name."""
        if self._memory is None:
            return
        if self._owner:
            self.unlink()
        self._memory = None

    def _mapped(self) -> mmap.mmap:
        memory = self._memory
        if memory is None:
            raise SegmentUnavailable(f"segment {self.name} is closed")
        size = memory.size()  # of the file
        if size < len(memory):
            raise SegmentLost(f"{self._path} was truncated to {size:,} of {len(memory):,} bytes by another program")
        return memory


class Regions:
    """Equal regions of a segment, each lent to one user at a time. Any thread may use it.

    Args:
        buffers: the regions, contiguous, all of one size > 0. Their memory must stay valid while this object or a lent
            array exists.

    Raises:
        ValueError: there are no regions, or their sizes differ.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        sizes = {buffer.nbytes for buffer in buffers}
        if len(sizes) != 1 or 0 in sizes:
            raise ValueError(f"regions must have one size, not {sorted(sizes)} bytes")
        self._buffers = tuple(buffers)
        # The free regions. They are returned without a lock: an append is atomic in the interpreter.
        self._free = deque(reversed(range(len(buffers))))

    def take(self) -> tuple[int, np.ndarray] | None:
        """Lends the free region that was returned last, because its memory is most likely in a cache.

        Returns:
            The region's index, and its memory as a flat array of unsigned bytes. The region is free again once that
            array and all its views have been collected. None if no region is free.
        """
        try:
            index = self._free.pop()
        except IndexError:
            return None
        return index, lend(self._buffers[index], self._free.append, index)


def remove_stale(directory: Path = SHM) -> list[str]:
    """Removes the segments whose owners died. Any number of processes may do this at once.

    Args:
        directory: folder of the segments; it may be missing.

    Returns:
        Names of the removed segments.
    """
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return []
    return [name for name in names if _NAME.fullmatch(name) and _swept(directory / name)]


def _swept(path: Path) -> bool:
    try:
        with _opened(path, os.O_RDONLY | _EXISTING) as file:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                return False
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have removed it before this one had the lock.
            if not os.path.samestat(status, path.lstat()):
                return False
            path.unlink()
    except OSError:  # the owner is alive, or the file is gone or not accessible
        return False
    return True


@contextmanager
def _opened(path: str | Path, flags: int, folder: int | None = None) -> Iterator[int]:
    """Opens a descriptor that child processes do not inherit, for the length of a `with` block."""
    file = os.open(path, flags | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        yield file
    finally:
        os.close(file)


def _check_space(folder: int, size: int, directory: Path) -> None:
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    # A tmpfs without a limit reports 0 blocks.
    if status.f_blocks and size > free * _MOST_OF_FREE:
        raise SegmentUnavailable(
            f"too little space in {directory}: a segment needs {size:,} bytes, but may take "
            f"at most {_MOST_OF_FREE:.0%} of the {free:,} that are free; {_MORE_SPACE}"
        )
    # A tmpfs uses ordinary memory, whatever its own limit.
    free = min(_free_memory(), default=size)
    if size > free * _MOST_OF_MEMORY:
        raise SegmentUnavailable(
            f"too little memory: a segment in {directory} needs {size:,} bytes, but may take "
            f"at most {_MOST_OF_MEMORY:.0%} of the {free:,} that are free; give the machine or container more"
        )


def _free_memory() -> Iterator[int]:
    """Yields the free bytes of the machine and of this process's container, as far as they are known."""
    with suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        yield from (int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    with suppress(OSError, ValueError):  # cgroups version 2; "max" means no limit
        group = Path("/sys/fs/cgroup")
        yield int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())


def _complaint(file: int, nbytes: int, nonce: bytes) -> str:
    """Returns why an open file is not the expected segment; empty if it is."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}, and this is user {os.geteuid()}: run both processes as the same user"
    if status.st_mode & 0o077:
        return f"is accessible to other users (mode {stat.S_IMODE(status.st_mode):04o})"
    if nbytes < 1 or status.st_size != HEADER_BYTES + nbytes:
        return f"has {status.st_size} bytes instead of a header of {HEADER_BYTES} and {nbytes}"
    # The owner allocated every byte. Writing into a hole could cause SIGBUS.
    if status.st_blocks * 512 < status.st_size:
        return "has holes: its memory is not allocated"
    # Read rather than mapped, and padded: if the file is truncated now, the header does not match.
    header = os.pread(file, _HEADER.size, 0).ljust(_HEADER.size, b"\0")
    magic, version, own_nonce, own_nbytes = _HEADER.unpack(header)
    if magic != _MAGIC:
        return "is not a segment: its first bytes differ"
    if version != _VERSION:
        return f"has version {version}, and this is version {_VERSION}: run the same Shoal in both processes"
    if not hmac.compare_digest(own_nonce, nonce):
        return "has another nonce: it is not the expected memory"
    return "" if own_nbytes == nbytes else f"has a header for {own_nbytes} bytes instead of {nbytes}"


def _unavailable(what: str, error: OSError) -> SegmentUnavailable:
    advice = _ADVICE.get(error.errno or 0)
    return SegmentUnavailable(f"{what}: {error.strerror}" + (f"; {advice}" if advice else ""))


__all__ = [
    "FOLDER_VARIABLE",
    "HEADER_BYTES",
    "NONCE_BYTES",
    "SHM",
    "Regions",
    "Segment",
    "SegmentLost",
    "SegmentUnavailable",
    "remove_stale",
]
