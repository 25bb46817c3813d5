"""Where checkpoints live: what any such place does, and folders of this machine. A file is there whole, or not at all.

Names within a folder are checked here, once for all: nothing that comes from a user, a job or a manifest leads out.
"""

import errno
import os
import re
import secrets
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from shoal import errors
from shoal._checkpoint import direct
from shoal._system import volumes

Buffer: TypeAlias = bytes | bytearray | memoryview

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_MAX_TARGETS = os.sysconf("SC_IOV_MAX")  # of one call to the system
TEMPORARY = ".tmp-"  # begins the name of a file that is being written: no name may


class File(Protocol):
    """A file that is open for reading.

    Attributes:
        nbytes: its size.
        at_a_time: so many reads side by side are faster than one after the other.
    """

    nbytes: int
    at_a_time: int

    def read_into(self, start: int, targets: Sequence[memoryview]) -> None:
        """Fills the targets one after the other with the bytes from `start` on.

        Raises:
            CorruptCheckpoint: the file ends before.
        """
        ...


class Folder(Protocol):
    """Files by path; a path is names, at least one.

    Everything raises StorageFailed where the storage does, with what to do about it.
    """

    url: str

    def write(self, path: Sequence[str], pieces: Iterable[Buffer]) -> None:
        """Writes a file; when this returns it is there for good. If it fails, or dies, what was there stays."""
        ...

    def open(self, path: Sequence[str]) -> Any:
        """A context manager of `File`; UnknownCheckpoint if there is none."""
        ...

    def names(self, path: Sequence[str]) -> list[str]:
        """What is in a folder, sorted; nothing if there is no such folder, or something else of that name."""
        ...

    def holding(self, path: Sequence[str], name: str) -> list[str]:
        """Those folders in a folder that have something of this name, sorted; nothing as for `names`. One listing."""
        ...

    def remove(self, path: Sequence[str]) -> None:
        """Removes a file, or a folder and all that is in it; one that is not there is no error."""
        ...


def is_name(name: str) -> bool:
    """Whether a file of a checkpoint may be called so."""
    return _NAME.fullmatch(name) is not None


def checked(name: str) -> str:
    """The name itself.

    Raises:
        BadRequest: it is not one that a file of a checkpoint may have.
    """
    if not is_name(name):
        raise errors.BadRequest(
            f"{name!r} is no name in a folder of checkpoints: 1 to 255 letters, digits, '.', '_' and '-', the first a "
            "letter or digit"
        )
    return name


def open_folder(url: str, *, make: bool = True) -> Folder:
    """The folder that a user names.

    Args:
        url: a path of this machine, or file://PATH; or of an object store, as fsspec has them: s3://BUCKET/PREFIX.
        make: makes a folder of this machine that is not there, when something is written.

    Raises:
        BadRequest: another kind of URL, or the package for it is not installed.
    """
    scheme, found, path = url.partition("://")
    if found and scheme not in ("file", "local"):
        from shoal._checkpoint.object_store import ObjectStore  # noqa: PLC0415 - which needs what is here

        return ObjectStore(url)
    return LocalFolder(Path(path if found else url).absolute(), make=make)


def open_shared(url: str) -> Folder:
    """The folder that an operator names for all processes of a cluster; never made, as it may be a volume.

    Raises:
        BadRequest: as for `open_folder`; or it is the memory of one process, where no other finds anything.
    """
    if url.startswith("memory://"):
        raise errors.BadRequest(
            f"checkpoints at {url} would be in the memory of one process, where no other finds them: name a folder "
            "that the coordinator and all servers see, or an object store",
            url=url,
        )
    return open_folder(url, make=False)


def probe(folder: Folder) -> None:
    """Writes a small file and removes it, to find out at a start what would fail every checkpoint.

    Raises:
        StorageFailed: that could not be done.
    """
    path = [f"probe-{secrets.token_hex(8)}"]
    folder.write(path, [b"Shoal looks whether it can write here.\n"])
    folder.remove(path)


class LocalFolder:
    """A folder of this machine.

    Every step down is taken without following links, from a folder that is held open: what lies below may be changed
    meanwhile, but never lead elsewhere.

    Args:
        root: its path.
        make: makes it when something is written, if it is not there.
    """

    def __init__(self, root: Path, *, make: bool = True) -> None:
        self._root, self._make = root, make
        self.url = str(root)

    def write(self, path: Sequence[str], pieces: Iterable[Buffer]) -> None:
        """See `Folder.write`: a temporary file, fsync, rename, fsync of the folder."""
        *parents, name = map(checked, path)
        with self._failing("written", path), self._descend(parents, make=True) as folder:
            temporary = f"{TEMPORARY}{secrets.token_hex(8)}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(temporary, flags, 0o666, dir_fd=folder)
            try:
                try:
                    direct.write_file(descriptor, pieces)
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise
            os.fsync(folder)

    @contextmanager
    def open(self, path: Sequence[str]) -> Iterator[File]:
        """See `Folder.open`."""
        *parents, name = map(checked, path)
        try:
            with self._failing("read", path, unless_missing=True), self._descend(parents) as folder:
                descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
        except FileNotFoundError:
            raise missing(self.url, path) from None
        try:
            with self._failing("read", path):
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise OSError(errno.EINVAL, "it is no file")
                yield _LocalFile(descriptor, status.st_size, "/".join(path))
        finally:
            os.close(descriptor)

    def names(self, path: Sequence[str]) -> list[str]:
        """See `Folder.names`."""
        return self._those(path, lambda _folder, _name: True)

    def holding(self, path: Sequence[str], name: str) -> list[str]:
        """See `Folder.holding`."""
        checked(name)
        return self._those(path, lambda folder, below: _holds(folder, below, name))

    def remove(self, path: Sequence[str]) -> None:
        """See `Folder.remove`."""
        *parents, name = map(checked, path)
        with (
            suppress(FileNotFoundError),
            self._failing("removed", path, unless_missing=True),
            self._descend(parents) as folder,
        ):
            _remove(folder, name)
            os.fsync(folder)

    def _those(self, path: Sequence[str], wanted: Callable[[int, str], bool]) -> list[str]:
        """The names in a folder that are wanted, given a descriptor of the folder and the name."""
        parents = [*map(checked, path)]
        try:
            with self._failing("listed", path, unless_missing=True), self._descend(parents) as folder:
                return sorted(name for name in os.listdir(folder) if is_name(name) and wanted(folder, name))
        except FileNotFoundError:
            return []
        except errors.StorageFailed as error:
            if parents and isinstance(error.__cause__, NotADirectoryError):
                return []
            raise

    @contextmanager
    def _descend(self, names: Sequence[str], *, make: bool = False) -> Iterator[int]:
        """A descriptor of the folder below the root that these names lead to."""
        if make and self._make:
            self._root.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        folder = os.open(self._root, flags)
        try:
            for name in names:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(name, dir_fd=folder)
                        os.fsync(folder)
                below = os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder)
                os.close(folder)
                folder = below
            yield folder
        finally:
            os.close(folder)

    @contextmanager
    def _failing(self, verb: str, path: Sequence[str], *, unless_missing: bool = False) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if unless_missing and isinstance(error, FileNotFoundError):
                raise
            raise errors.StorageFailed(
                f"{'/'.join((self.url, *path))} could not be {verb}: {error.strerror or error}{_advice(error)}",
                path="/".join(path),
            ) from error


class _LocalFile:
    at_a_time = 2  # one is looked through while the next is read

    def __init__(self, descriptor: int, nbytes: int, where: str) -> None:
        self._descriptor, self.nbytes, self._where = descriptor, nbytes, where

    def read_into(self, start: int, targets: Sequence[memoryview]) -> None:
        waiting = deque(filter(len, targets))
        while waiting:
            count = os.preadv(self._descriptor, [*islice(waiting, _MAX_TARGETS)], start)
            if not count:
                raise errors.CorruptCheckpoint(f"{self._where} is cut short: it ends at byte {start}", file=self._where)
            start += count
            while waiting and count >= len(waiting[0]):
                count -= len(waiting.popleft())
            if count:
                waiting[0] = waiting[0][count:]


def _remove(folder: int, name: str) -> None:
    with suppress(IsADirectoryError):
        os.unlink(name, dir_fd=folder)
        return
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    below = os.open(name, flags, dir_fd=folder)
    try:
        for entry in os.listdir(below):
            with suppress(FileNotFoundError):
                _remove(below, entry)
    finally:
        os.close(below)
    os.rmdir(name, dir_fd=folder)


def _holds(folder: int, below: str, name: str) -> bool:
    """Whether something of a name is in a folder of a folder."""
    try:
        opened = os.open(below, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except (FileNotFoundError, NotADirectoryError):  # removed meanwhile, or no folder
        return False
    try:
        os.stat(name, dir_fd=opened, follow_symlinks=False)
    except FileNotFoundError:
        return False
    else:
        return True
    finally:
        os.close(opened)


def missing(url: str, path: Sequence[str]) -> errors.UnknownCheckpoint:
    """What is said of a file that is not there."""
    return errors.UnknownCheckpoint(f"there is no {'/'.join((url, *path))}", path="/".join(path))


def no_folder(who: str) -> errors.StorageFailed:
    """What is said of a process that was started without a folder."""
    return errors.StorageFailed(f"{who} has no folder of checkpoints: start it with --checkpoints")


def _advice(error: OSError) -> str:
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return "; free some space, or keep fewer checkpoints"
        case errno.EFBIG:
            return "; raise the limit on the size of files (ulimit -f)"
        case errno.ENOENT:
            return f"; {volumes.advice(error)}, unless somebody has just removed it"
        case errno.ELOOP:
            return "; links are not followed below a folder of checkpoints"
    advice = volumes.advice(error)
    return f"; {advice}" if advice else ""


__all__ = [
    "TEMPORARY",
    "Buffer",
    "File",
    "Folder",
    "LocalFolder",
    "checked",
    "is_name",
    "missing",
    "no_folder",
    "open_folder",
    "open_shared",
    "probe",
]
