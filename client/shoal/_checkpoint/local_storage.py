"""Checkpoint storage in a folder of this machine or of a mounted volume."""

import errno
import os
import secrets
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

from shoal import errors
from shoal._checkpoint import direct_io
from shoal._checkpoint.storage import TEMPORARY, StorageFile, checked, is_name, missing
from shoal._system import private_files, volumes
from shoal._wire import Buffer

MAX_TARGETS = os.sysconf("SC_IOV_MAX")  # of one system call


class LocalStorage:
    """Checkpoint storage in a local folder.

    Each path is resolved from an open descriptor of the parent folder and without following links, so that concurrent
    changes below the root never lead outside it.

    Args:
        root: the folder's path.
        make: creates the folder at the first write if it does not exist.
    """

    def __init__(self, root: Path, *, make: bool = True) -> None:
        self._root, self._make = root, make
        self.url = str(root)

    def write(self, path: Sequence[str], pieces: Iterable[Buffer]) -> None:
        """See `CheckpointStorage.write`: a temporary file, fsync, rename, fsync of the folder."""
        *parents, name = map(checked, path)
        with self._failing("written", path), self._descend(parents, make=True) as folder:
            temporary = f"{TEMPORARY}{secrets.token_hex(8)}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(temporary, flags, 0o600, dir_fd=folder)
            try:
                try:
                    os.fchmod(descriptor, private_files.file_mode())
                    direct_io.write_file(descriptor, pieces)
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
    def open(self, path: Sequence[str]) -> Iterator[StorageFile]:
        """See `CheckpointStorage.open`."""
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
                    raise OSError(errno.EINVAL, "it is not a file")
                yield _LocalFile(descriptor, status.st_size, "/".join(path))
        finally:
            os.close(descriptor)

    def names(self, path: Sequence[str]) -> list[str]:
        """See `CheckpointStorage.names`."""
        return self._those(path, lambda _folder, _name: True)

    def holding(self, path: Sequence[str], name: str) -> list[str]:
        """See `CheckpointStorage.holding`."""
        checked(name)
        return self._those(path, lambda folder, below: _holds(folder, below, name))

    def remove(self, path: Sequence[str]) -> None:
        """See `CheckpointStorage.remove`."""
        *parents, name = map(checked, path)
        with (
            suppress(FileNotFoundError),
            self._failing("removed", path, unless_missing=True),
            self._descend(parents) as folder,
        ):
            _remove(folder, name)
            os.fsync(folder)

    def _those(self, path: Sequence[str], wanted: Callable[[int, str], bool]) -> list[str]:
        """Returns the names in a folder for which `wanted`, called with the folder's descriptor and a name, is true."""
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
        """Yields a descriptor of the folder at a path below the root."""
        if make and self._make:
            private_files.make_folder(self._root)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        folder = os.open(self._root, flags)
        try:
            for name in names:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=folder)
                        os.chmod(name, private_files.folder_mode(), dir_fd=folder)
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
    at_a_time = 2  # one block is checked while the next is read

    def __init__(self, descriptor: int, nbytes: int, where: str) -> None:
        self._descriptor, self.nbytes, self._where = descriptor, nbytes, where

    def read_into(self, start: int, targets: Sequence[memoryview]) -> None:
        waiting = deque(filter(len, targets))
        while waiting:
            count = os.preadv(self._descriptor, [*islice(waiting, MAX_TARGETS)], start)
            if not count:
                raise errors.CorruptCheckpoint(f"{self._where} is truncated at byte {start}", file=self._where)
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
    """Returns whether a subfolder of a folder has an entry of a name."""
    try:
        opened = os.open(below, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except (FileNotFoundError, NotADirectoryError):  # removed meanwhile, or not a folder
        return False
    try:
        os.stat(name, dir_fd=opened, follow_symlinks=False)
    except FileNotFoundError:
        return False
    else:
        return True
    finally:
        os.close(opened)


def _advice(error: OSError) -> str:
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return "; free some space, or keep fewer checkpoints"
        case errno.EFBIG:
            return "; raise the limit on the size of files (ulimit -f)"
        case errno.ENOENT:
            return f"; {volumes.advice(error)} (or it was removed just now)"
        case errno.ELOOP:
            return "; symbolic links are not followed below the checkpoint folder"
    advice = volumes.advice(error)
    return f"; {advice}" if advice else ""


__all__ = ["LocalStorage"]
