"""Storage of checkpoints: what any place that holds them does, and the names that files may have there.

A file is there whole, or not at all. Names within a folder are checked here, once for all: nothing that comes from a
user, a job or a manifest leads out of it.
"""

import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeAlias

from shoal import errors

Buffer: TypeAlias = bytes | bytearray | memoryview

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
TEMPORARY = ".tmp-"  # begins the name of a file that is being written: no name may


class StorageFile(Protocol):
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


class CheckpointStorage(Protocol):
    """Files by path; a path is names, at least one.

    Everything raises StorageFailed where the storage does, with what to do about it.
    """

    url: str

    def write(self, path: Sequence[str], pieces: Iterable[Buffer]) -> None:
        """Writes a file; when this returns it is there for good. If it fails, or dies, what was there stays."""
        ...

    def open(self, path: Sequence[str]) -> Any:
        """A context manager of `StorageFile`; UnknownCheckpoint if there is none."""
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


def probe(folder: CheckpointStorage) -> None:
    """Writes a small file and removes it, to find out at a start what would fail every checkpoint.

    Raises:
        StorageFailed: that could not be done.
    """
    path = [f"probe-{secrets.token_hex(8)}"]
    folder.write(path, [b"Shoal looks whether it can write here.\n"])
    folder.remove(path)


def missing(url: str, path: Sequence[str]) -> errors.UnknownCheckpoint:
    """What is said of a file that is not there."""
    return errors.UnknownCheckpoint(f"there is no {'/'.join((url, *path))}", path="/".join(path))


def no_storage_message(who: str) -> errors.StorageFailed:
    """What is said of a process that was started without a folder."""
    return errors.StorageFailed(f"{who} has no folder of checkpoints: start it with --checkpoints")


__all__ = [
    "TEMPORARY",
    "Buffer",
    "CheckpointStorage",
    "StorageFile",
    "checked",
    "is_name",
    "missing",
    "no_storage_message",
    "probe",
]
