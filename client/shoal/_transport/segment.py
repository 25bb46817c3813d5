"""Segments: memory that two processes of one host share, named in /dev/shm or where SHOAL_SHARED_MEMORY says.

One process creates a segment and owns it, another opens it; either may cut it into slots. What they say to each other
about its bytes is not here.
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

# Names the folder of segments, a tmpfs, where that is not Linux's usual one.
FOLDER_VARIABLE = "SHOAL_SHARED_MEMORY"
SHM = Path(os.environ.get(FOLDER_VARIABLE) or "/dev/shm")  # noqa: S108 - shared memory, not temporary files
# The header has a page of its own, so that the data begin at a page as well.
HEADER_BYTES = 4096
NONCE_BYTES = 16

_MAGIC = b"SHOALSEG"
_VERSION = 1
_HEADER = struct.Struct(f"<8sI{NONCE_BYTES}sQ")  # magic, version, nonce, nbytes
_NAME = re.compile(r"shoal-[0-9a-f]{32}")
# What others put under such a name is not followed, and not waited for, as a pipe or a leased file would be.
_EXISTING = os.O_NOFOLLOW | os.O_NONBLOCK
_MOST_OF_FREE = 0.9  # a segment takes at most so much of what is free: others need shared memory too
_MOST_OF_MEMORY = 0.5
_MORE_SPACE = (
    f"give the machine or container a larger /dev/shm (docker: --shm-size), or set {FOLDER_VARIABLE} to another tmpfs"
)
_ADVICE = {
    errno.ENOENT: "mount a tmpfs there, the same one for both processes",
    errno.ENOSPC: _MORE_SPACE,
    errno.ENOMEM: "leave it more memory, or address space (ulimit -v)",
    errno.EOPNOTSUPP: "it has to be a tmpfs",
    errno.EACCES: "run both processes as the same user",
}


class SegmentUnavailable(Exception):
    """There is no shared memory to be had, or not the one that was named; the message says why and what to do."""


class SegmentLost(SegmentUnavailable):
    """A segment's file was cut short. Touching what is gone would kill the process, so nobody may go on using it."""


class Segment:
    """A file in shared memory that two processes map; a context manager that closes it.

    The owner holds a lock on the file for as long as it has it mapped; by that `remove_stale` knows that it lives. A process
    forked from the owner, without a program of its own, shares the lock. The other end holds none: it does not keep
    what a dead owner left.

    Made by `create` and `open`. Any thread may use it, and close it while others do.

    Attributes:
        name: of the file; what the owner tells the other end.
        nbytes: usable bytes.
        nonce: random, in the file's header; told to the other end as well, it proves that both see the same memory.
    """

    def __init__(self, memory: mmap.mmap, directory: Path, name: str, nonce: bytes, *, owner: bool) -> None:
        self.name, self.nonce = name, nonce
        self.nbytes = len(memory) - HEADER_BYTES
        self._path, self._owner = directory / name, owner
        # Never closed, only let go of: with its last view it unmaps itself, and closes its descriptor, the only one.
        self._memory: mmap.mmap | None = memory

    @classmethod
    def create(cls, nbytes: int, *, directory: Path = SHM) -> Self:
        """Makes a segment of so many usable bytes, at least one; all zero, and all there.

        Raises:
            SegmentUnavailable: there is no tmpfs, or too little space; nothing was left behind.
        """
        if nbytes < 1:
            raise ValueError(f"a segment has at least one byte, not {nbytes}")
        size = HEADER_BYTES + nbytes
        name, nonce = f"shoal-{secrets.token_hex(16)}", secrets.token_bytes(NONCE_BYTES)
        try:
            with _opened(directory, os.O_RDONLY | os.O_DIRECTORY) as folder:
                _check_space(folder, size, directory)
                # Until it is locked and whole the file has no name: no sweep meets it, and a death here leaves nothing.
                with _opened(".", os.O_TMPFILE | os.O_RDWR, folder) as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.fchmod(file, 0o600)  # whatever the umask took away
                    # Writing to memory that cannot be had would be SIGBUS. Here it is an error.
                    os.posix_fallocate(file, 0, size)
                    os.pwrite(file, _HEADER.pack(_MAGIC, _VERSION, nonce, nbytes), 0)
                    memory = mmap.mmap(file, size)  # has a duplicate of the descriptor, and so the lock
                    # Only linkat follows the link in /proc to the file, and Python calls it only with a dst_dir_fd.
                    os.link(f"/proc/self/fd/{file}", name, dst_dir_fd=folder, follow_symlinks=True)
        except OSError as error:
            raise _unavailable(f"no segment of {nbytes:,} bytes in {directory}", error) from error
        return cls(memory, directory, name, nonce, owner=True)

    @classmethod
    def open(cls, name: str, nbytes: int, nonce: bytes, *, directory: Path = SHM) -> Self:
        """Maps a segment that another process has created.

        Args:
            name, nbytes, nonce: what that process says they are; believed only as far as the file bears them out.
            directory: where it lies.

        Raises:
            SegmentUnavailable: it is not here, not ours, or not what it is said to be.
        """
        if not _NAME.fullmatch(name):
            raise SegmentUnavailable(f"{name[:50]!r} is no name of a segment")
        path = directory / name
        try:
            with _opened(path, os.O_RDWR | _EXISTING) as file:
                complaint = _complaint(file, nbytes, nonce)
                if complaint:
                    raise SegmentUnavailable(f"{path} {complaint}")
                memory = mmap.mmap(file, HEADER_BYTES + nbytes)
        except OSError as error:
            raise _unavailable(f"no segment {path}", error) from error
        except ValueError as error:  # mmap's, if the file has shrunk this moment
            raise SegmentLost(f"{path} was cut short: {error}") from error
        return cls(memory, directory, name, nonce, owner=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def view(self, offset: int, nbytes: int) -> memoryview:
        """A part of the segment, writable, as unsigned bytes; it outlives `close`.

        Args:
            offset: bytes from the beginning of the usable ones.
            nbytes: how many.

        Raises:
            ValueError: there is no such part.
            SegmentLost: the file was cut short.
            SegmentUnavailable: the segment is closed.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"segment {self.name} has {self.nbytes:,} bytes, not {nbytes:,} from {offset:,} on")
        start = HEADER_BYTES + offset
        return memoryview(self._mapped())[start : start + nbytes]

    def check(self) -> None:
        """Looks whether all of the segment is still there; to be called before bytes are touched again.

        Raises:
            SegmentLost: the file was cut short.
            SegmentUnavailable: the segment is closed.
        """
        self._mapped()

    def unlink(self) -> None:
        """Removes the name, if it is still there; the memory stays until both ends have let go of it."""
        with suppress(FileNotFoundError):
            self._path.unlink()

    def close(self) -> None:
        """Lets go of the memory, which is unmapped with its last view; the owner's end removes the name too."""
        if self._memory is None:
            return
        if self._owner:
            self.unlink()
        self._memory = None

    def _mapped(self) -> mmap.mmap:
        memory = self._memory
        if memory is None:
            raise SegmentUnavailable(f"segment {self.name} is closed")
        size = memory.size()  # of the file, by its descriptor
        if size < len(memory):
            raise SegmentLost(f"{self._path} was cut to {size:,} of {len(memory):,} bytes; something else writes there")
        return memory


class Regions:
    """A fixed number of equal regions, each lent to one user at a time. Any thread may take.

    Args:
        buffers: the regions, contiguous, of one size that is not 0. Their memory stays as long as the slots do, or
            an array.

    Raises:
        ValueError: the regions are not of one size, or there is none.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        sizes = {buffer.nbytes for buffer in buffers}
        if len(sizes) != 1 or 0 in sizes:
            raise ValueError(f"slots are of one size, not of {sorted(sizes)} bytes")
        self._buffers = tuple(buffers)
        # The slots that nothing looks into. Given back without a lock: an append is one step of the interpreter's.
        self._free = deque(reversed(range(len(buffers))))

    def take(self) -> tuple[int, np.ndarray] | None:
        """Lends a slot, of the free ones the last that came back: its memory is the likeliest to be in a cache.

        Returns:
            The slot's index, and its memory as a flat array of unsigned bytes; the slot is free again once that array
            and all its views have been collected. None if no slot is free.
        """
        try:
            index = self._free.pop()
        except IndexError:
            return None
        return index, lend(self._buffers[index], self._free.append, index)


def remove_stale(directory: Path = SHM) -> list[str]:
    """Removes the segments whose owners died without doing so. Any number of processes may sweep at once.

    Args:
        directory: where they lie; without it there is nothing to do.

    Returns:
        Their names.
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
            # Nobody else removes it while we hold the lock, but before that somebody may have.
            if not os.path.samestat(status, path.lstat()):
                return False
            path.unlink()
    except OSError:  # its owner lives, or it is gone, or not for us
        return False
    return True


@contextmanager
def _opened(path: str | Path, flags: int, folder: int | None = None) -> Iterator[int]:
    """A descriptor, which no program that this one starts inherits."""
    file = os.open(path, flags | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        yield file
    finally:
        os.close(file)


def _check_space(folder: int, size: int, directory: Path) -> None:
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    # A tmpfs without a limit says that it has no blocks at all.
    if status.f_blocks and size > free * _MOST_OF_FREE:
        raise SegmentUnavailable(
            f"too little space in {directory}: a segment needs {size:,} bytes, and {free:,} are free, of which it may "
            f"take {_MOST_OF_FREE:.0%}; {_MORE_SPACE}"
        )
    # What lies in a tmpfs is memory like any other, whatever size the tmpfs says it has.
    free = min(_free_memory(), default=size)
    if size > free * _MOST_OF_MEMORY:
        raise SegmentUnavailable(
            f"too little memory: a segment in {directory} needs {size:,} bytes, and {free:,} are free, of which it may "
            f"take {_MOST_OF_MEMORY:.0%}; give the machine or container more"
        )


def _free_memory() -> Iterator[int]:
    """Bytes that the machine has, and that this process's container may still take; nothing where nobody says so."""
    with suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        yield from (int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    with suppress(OSError, ValueError):  # version 2 of cgroups; "max" is no limit
        group = Path("/sys/fs/cgroup")
        yield int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())


def _complaint(file: int, nbytes: int, nonce: bytes) -> str:
    """Why an open file is not the segment that it is said to be; empty if it is."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        return "is no regular file"
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}, and this is user {os.geteuid()}: run both processes as the same user"
    if status.st_mode & 0o077:
        return f"is open to other users (mode {stat.S_IMODE(status.st_mode):04o}), as no segment is"
    if nbytes < 1 or status.st_size != HEADER_BYTES + nbytes:
        return f"has {status.st_size} bytes, not a header of {HEADER_BYTES} and {nbytes}"
    # Its owner reserved every byte. To write into a hole would be SIGBUS where there is no memory left.
    if status.st_blocks * 512 < status.st_size:
        return "has holes, as no segment has"
    # Read, not mapped, and filled up: if the file shrinks this moment, its header is wrong.
    header = os.pread(file, _HEADER.size, 0).ljust(_HEADER.size, b"\0")
    magic, version, own_nonce, own_nbytes = _HEADER.unpack(header)
    if magic != _MAGIC:
        return "is no segment: it begins with something else"
    if version != _VERSION:
        return f"has version {version}, and this is version {_VERSION}: run the same Shoal in both processes"
    if not hmac.compare_digest(own_nonce, nonce):
        return "has another nonce: it is not the memory that was meant"
    return "" if own_nbytes == nbytes else f"says that it has {own_nbytes} bytes, not {nbytes}"


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
