"""The checkpoints in a folder: a folder a job, in it one a checkpoint, named by its number.

A checkpoint is there from the moment on when its manifest is, and until that is removed, which comes first.
"""

import re
from collections.abc import Collection, Iterable, Iterator

from shoal import errors
from shoal._checkpoint.manifest import FILE, MAX_BYTES, Manifest
from shoal._checkpoint.storage import CheckpointStorage
from shoal._checkpoint.tensor_files import open_tensors

_NUMBER = re.compile(r"[0-9]{8,18}")


def path_of(job: str, number: int) -> tuple[str, str]:
    """The folder of a checkpoint."""
    return job, f"{number:08}"


class Catalogue:
    """What is in a folder of checkpoints.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: CheckpointStorage) -> None:
        self.folder = folder

    def jobs(self) -> list[str]:
        """Those that have a whole checkpoint."""
        return [name for name in self.folder.names(()) if self.numbers(name)]

    def numbers(self, job: str) -> list[int]:
        """The whole checkpoints of a job, oldest first."""
        return _numbers(self.folder.holding((job,), FILE))

    def torn(self, job: str) -> list[int]:
        """What is there without a manifest, oldest first: being written, or left by a writer that died."""
        there = _numbers(self.folder.names((job,)))  # first: what becomes whole meanwhile is not torn
        whole = {*self.numbers(job)}
        return [number for number in there if number not in whole]

    def next_number(self, job: str) -> int:
        """One that no checkpoint of the job has, torn ones included."""
        return max(_numbers(self.folder.names((job,))), default=0) + 1

    def unknown(self, name: str) -> errors.UnknownCheckpoint:
        """What is said of a checkpoint, as a user names it, that is not there."""
        return errors.UnknownCheckpoint(
            f"there is no checkpoint {name} in {self.folder.url}; `shoal checkpoints ls` lists them", checkpoint=name
        )

    def manifest(self, job: str, number: int) -> Manifest:
        """What a checkpoint consists of.

        Raises:
            UnknownCheckpoint: there is none of that number.
            CorruptCheckpoint, IncompatibleCheckpoint: its manifest cannot be used.
        """
        path = (*path_of(job, number), FILE)
        where = "/".join((self.folder.url, *path))
        with self.folder.open(path) as file:
            if file.nbytes > MAX_BYTES:
                raise errors.CorruptCheckpoint(f"{where} has {file.nbytes} bytes, more than any manifest", file=where)
            text = bytearray(file.nbytes)
            file.read_into(0, [memoryview(text)])
        manifest = Manifest.from_bytes(bytes(text), where)
        if (manifest.job, manifest.number) != (job, number):
            raise errors.CorruptCheckpoint(
                f"{where} is of checkpoint {manifest.number} of {manifest.job}: it was copied or renamed", file=where
            )
        return manifest

    def publish(self, manifest: Manifest) -> None:
        """Makes a checkpoint of files that are all there."""
        self.folder.write((*path_of(manifest.job, manifest.number), FILE), [manifest.to_bytes()])

    def verify(self, manifest: Manifest) -> None:
        """Reads all files of a checkpoint; CorruptCheckpoint if anything is not what was written."""
        for entry in manifest.files:
            with open_tensors(self.folder, (*path_of(manifest.job, manifest.number), entry.name), entry) as reader:
                reader.verify()

    def newest(self, job: str) -> Iterator[Manifest | errors.ShoalError]:
        """The job's checkpoints, newest first: of each its manifest, or why it cannot be used, which names it."""
        return (self.found(job, number) for number in reversed(self.numbers(job)))

    def best(self, job: str) -> Iterator[Manifest | errors.ShoalError]:
        """As `newest`, of those that were taken at the job's best evaluation. One that cannot be used may be one."""
        return (it for it in self.newest(job) if isinstance(it, errors.ShoalError) or it.evaluation)

    def found(self, job: str, number: int) -> Manifest | errors.ShoalError:
        """The manifest of a checkpoint, or why it cannot be used, which names it."""
        try:
            return self.manifest(job, number)
        except errors.ShoalError as error:
            error.details["checkpoint"] = f"{job}/{number}"
            return error

    def remove(self, job: str, number: int) -> None:
        """Removes a checkpoint, whole or torn; its manifest first, so that none is ever there in part."""
        path = path_of(job, number)
        self.folder.remove((*path, FILE))
        self.folder.remove(path)

    def sweep(self, job: str, *, below: int | None = None) -> list[int]:
        """Removes what writers left torn; the numbers.

        Args:
            job: whose.
            below: only smaller numbers, for larger ones may be being written; None: all.
        """
        torn = [number for number in self.torn(job) if below is None or number < below]
        for number in torn:
            self.remove(job, number)
        return torn


def expired_numbers(numbers: Collection[int], *, keep_last: int, keep_every: int = 0) -> list[int]:
    """Which checkpoints are to go.

    Args:
        numbers: of those that are whole.
        keep_last: so many of the newest stay; at least 1.
        keep_every: those whose number is a multiple of it stay as well; 0: none.
    """
    ordered = sorted(numbers)
    return [number for number in ordered[: -max(1, keep_last)] if not keep_every or number % keep_every]


def _numbers(names: Iterable[str]) -> list[int]:
    return sorted(int(name) for name in names if _NUMBER.fullmatch(name))


__all__ = ["Catalogue", "expired_numbers", "path_of"]
