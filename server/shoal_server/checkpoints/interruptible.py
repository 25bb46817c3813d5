"""A checkpoint storage whose reads end early when their result is no longer needed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shoal._checkpoint import CheckpointStorage, StorageFile


class InterruptibleStorage:
    """Reads of another storage, with a check before each. A read that hangs ends only when the storage answers.

    Args:
        storage: the storage.
        check: raises an error if the reads should end.

    Attributes:
        url: as in `CheckpointStorage`.
    """

    def __init__(self, storage: CheckpointStorage, check: Callable[[], None]) -> None:
        self._storage, self._check, self.url = storage, check, storage.url

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    @contextmanager
    def open(self, path: Sequence[str]) -> Iterator["InterruptibleFile"]:
        """Opens a file for reading."""
        self._check()
        with self._storage.open(path) as file:
            yield InterruptibleFile(file, self._check)


class InterruptibleFile:
    """A `StorageFile` that is checked before each read.

    Args:
        file: the file.
        check: raises an error if the reads should end.
    """

    def __init__(self, file: StorageFile, check: Callable[[], None]) -> None:
        self._file, self._check = file, check
        self.nbytes, self.at_a_time = file.nbytes, file.at_a_time

    def read_into(self, start: int, targets: Sequence[memoryview]) -> None:
        """Fills the targets with the bytes from an offset."""
        self._check()
        self._file.read_into(start, targets)


__all__ = ["InterruptibleStorage"]
