"""The interface of checkpoint storage, and the check of file names.

Writes are atomic. All storages check names with `checked`, so that no name from a user, a job or a manifest leads
outside the storage.
"""

import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from shoal import errors
from shoal._wire import Buffer

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
TEMPORARY = ".tmp-"  # prefix of files that are being written; no valid name has it


class StorageFile(Protocol):
    """A file that is open for reading.

    Attributes:
        nbytes: size in bytes.
        at_a_time: number of concurrent reads that gives the best throughput.
    """

    nbytes: int
    at_a_time: int

    def read_into(self, start: int, targets: Sequence[memoryview]) -> None:
        """Fills the targets one after the other with the bytes from offset `start`.

        Raises:
            CorruptCheckpoint: the file ends too early.
        """
        ...


class CheckpointStorage(Protocol):
    """Files by path. A path consists of one or more names.

    All methods raise StorageFailed, with advice, if the storage fails.

    Attributes:
        url: the path or URL that users see.
    """

    url: str

    def write(self, path: Sequence[str], pieces: Iterable[Buffer]) -> None:
        """Writes a file atomically and durably. If this fails, an earlier file of the same path is unchanged."""
        ...

    def open(self, path: Sequence[str]) -> Any:
        """Returns a context manager of a `StorageFile`, or raises UnknownCheckpoint if there is no such file."""
        ...

    def names(self, path: Sequence[str]) -> list[str]:
        """Returns the names in a folder, sorted. The list is empty if the path is not a folder."""
        ...

    def holding(self, path: Sequence[str], name: str) -> list[str]:
        """Returns the subfolders that have an entry of this name, sorted, with one listing if the storage allows."""
        ...

    def remove(self, path: Sequence[str]) -> None:
        """Removes a file, or a folder with all its contents. It is no error if the path does not exist."""
        ...


def is_name(name: str) -> bool:
    """Returns whether a name is valid in checkpoint storage."""
    return _NAME.fullmatch(name) is not None


def checked(name: str) -> str:
    """Returns the name unchanged if it is valid.

    Raises:
        BadRequest: the name is invalid.
    """
    if not is_name(name):
        raise errors.BadRequest(
            f"{name!r} is not a valid name in checkpoint storage; use 1 to 255 letters, digits, '.', '_' and '-', "
            "starting with a letter or digit"
        )
    return name


def probe(folder: CheckpointStorage) -> None:
    """Writes a small file and removes it, to check at the start that the storage works.

    Raises:
        StorageFailed: the storage failed.
    """
    path = [f"probe-{secrets.token_hex(8)}"]
    folder.write(path, [b"Shoal checks whether it can write here.\n"])
    folder.remove(path)


def missing(url: str, path: Sequence[str]) -> errors.UnknownCheckpoint:
    """Returns the error for a file that does not exist."""
    return errors.UnknownCheckpoint(f"there is no {'/'.join((url, *path))}", path="/".join(path))


def no_storage_message(process: str) -> errors.StorageFailed:
    """Returns the error for a process that was started without checkpoint storage."""
    return errors.StorageFailed(
        f"{process} has no checkpoint storage; start it with --checkpoints (from Python: LocalCluster(checkpoints=...))"
    )


__all__ = [
    "TEMPORARY",
    "CheckpointStorage",
    "StorageFile",
    "checked",
    "is_name",
    "missing",
    "no_storage_message",
    "probe",
]
